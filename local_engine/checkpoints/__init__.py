"""Models on disk, read as they lie there. Imports no model and no engine; read `open` first."""
