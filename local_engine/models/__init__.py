"""Model code: one configurable decoder for every supported family (see `config.FAMILIES`)."""
