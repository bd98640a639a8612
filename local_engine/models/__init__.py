"""One decoder for every supported family (see `checkpoints/families.py`). Imports no engine; read `decoder` first."""
