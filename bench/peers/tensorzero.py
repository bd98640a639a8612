"""TensorZero's gateway (Rust), as its PyPI package embeds it: a real HTTP server started by `patch_openai_client`.

Observability is off, its fastest; its response cache wants ClickHouse or Valkey and is not measured.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.lab.native import WORK, Stub
from bench.lab.processes import Child
from bench.lab.systems import Running, Setup, Target, clean_environment, environment_of

_VERSION = "2026.6.0"
_SERVE = """
import sys, threading, types, tensorzero
client = types.SimpleNamespace(base_url="")
tensorzero.patch_openai_client(client, config_file=sys.argv[1], async_setup=False)
print("serving", client.base_url, flush=True)
threading.Event().wait()
"""
_MODEL = """
[models.{name}]
routing = ["stub"]
[models.{name}.providers.stub]
type = "openai"
model_name = "stub"
api_base = "http://127.0.0.1:{port}{path}/"
api_key_location = "none"
"""


class TensorZero:
    """The gateway inside the PyPI package `tensorzero`, in an environment of its own."""

    name = "tensorzero"

    def install(self) -> None:
        environment_of("tensorzero", [f"tensorzero=={_VERSION}"])

    def lacks(self, setup: Setup) -> str | None:
        return None if setup is Setup.MISS else "its cache wants ClickHouse or Valkey, and it has one process"

    def configuration(self, setup: Setup) -> str:
        return "the"

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        config = folder / "tensorzero.toml"
        models = [
            _MODEL.format(name=n, port=stub.port, path=p) for n, p in (("instant", "/v1"), ("paced", "/pace/10/v1"))
        ]
        config.write_text("[gateway]\nobservability.enabled = false\n" + "".join(models))
        python = WORK / "tensorzero" / "bin" / "python"
        command = [str(python), "-c", _SERVE, str(config)]
        child = Child(command, folder / "tensorzero.log", clean_environment(), folder)
        try:
            child.wait_until(lambda: _base(child) is not None, 30.0)
        except BaseException:
            child.stop()
            raise
        base = _base(child)
        assert base is not None
        return Running(
            port=int(base[1]),
            roots=(child.pid,),
            stop=child.stop,
            version=_VERSION,
            instant=Target("tensorzero::model_name::instant", f"{base[2]}/chat/completions"),
            paced=Target("tensorzero::model_name::paced", f"{base[2]}/chat/completions"),
        )


def _base(child: Child) -> re.Match[str] | None:
    return re.search(r"serving http://[^:]+:(\d+)(\S*)", child.log_path.read_text(errors="replace"))
