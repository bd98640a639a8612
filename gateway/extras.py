"""What needs an extra of the package, and whether it is installed. Imports none of it."""

import functools
from importlib.util import find_spec

# the modules of each extra of pyproject.toml without which its part does not run
EXTRAS = {
    "semantic": ("numpy", "faiss", "openvino", "tokenizers", "safetensors"),
    "engine": ("numpy", "torch", "tokenizers", "safetensors", "gguf", "llguidance"),
    "litellm": ("litellm",),
    "parquet": ("pyarrow",),
    "s3": ("obstore",),
    "access": ("joserfc",),
    "masking": ("re2", "phonenumbers", "stdnum"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


@functools.cache
def lacks(extra: str) -> str:
    """What to install, where a module of `extra` is missing; else empty."""
    return "" if all(map(_is_there, EXTRAS[extra])) else f"install `sameway[{extra}]`"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None  # imports the packages that it is in
    except ModuleNotFoundError:
        return False
