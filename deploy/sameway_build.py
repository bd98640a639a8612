"""Builds the distributions: in a wheel, the tree's packages are parts of one package, `sameway`.

A build backend (PEP 517) around setuptools'. The tree has `cache` and `gateway` at its top; installed so,
they would shadow, or be shadowed by, a stranger's. So a wheel has them below `sameway/`, with the absolute
imports among them rewritten, and every process is started by its name there. An editable installation and
the tree itself stay as they are. Invariant: an import that cannot be rewritten ends the build.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]

PACKAGES = ("gateway", "cache", "policies", "local_engine", "ipc")
_TOP = "sameway"
_OWN = re.compile(rf"({'|'.join(PACKAGES)})(?=[./]|$)")
_BUILD = Path("gateway/build.txt")  # the commit; an sdist brings it along
_MAIN = "import sys\n\nfrom sameway.gateway.cli import main\n\nsys.exit(main())\n"


def build_wheel(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    """The wheel's name in `folder`. Raises ValueError for an import that it cannot rewrite."""
    shutil.rmtree("build", ignore_errors=True)  # setuptools' own, which keeps files that the tree has no more
    with _stamped():
        name: str = build_meta.build_wheel(folder, settings, metadata)
    path = Path(folder) / name
    with zipfile.ZipFile(path) as wheel:
        files = {item.filename: wheel.read(item) for item in wheel.infolist() if not item.is_dir()}
    placed = {f"{_TOP}/__init__.py": b'"""Sameway, a semantic-caching inference gateway."""\n'}
    placed[f"{_TOP}/__main__.py"] = _MAIN.encode()
    for file, content in files.items():
        if file.endswith(".py"):
            content = rewritten(content.decode(), file).encode()
        elif file.endswith(".dist-info/entry_points.txt"):
            content = re.sub(r"(?m)= *(?=gateway\b)", f"= {_TOP}.", content.decode()).encode()
        elif file.endswith(".dist-info/top_level.txt"):
            content = f"{_TOP}\n".encode()
        placed[f"{_TOP}/{file}" if _OWN.match(file) else file] = content
    _write(path, placed)
    return name


def build_sdist(folder: str, settings: Any = None) -> str:
    """The archive's name in `folder`; wheels built from it name the same commit."""
    with _stamped():
        name: str = build_meta.build_sdist(folder, settings)
    return name


def rewritten(source: str, file: str) -> str:
    """The source of a module with its imports of the tree's packages from `sameway`. Lines keep their numbers."""
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _OWN.match(node.module or ""):
            found, put = b"from ", f"from {_TOP}.".encode()
        elif isinstance(node, ast.Import) and any(_OWN.match(alias.name) for alias in node.names):
            if len(node.names) > 1 or "." in node.names[0].name:
                raise ValueError(
                    f"{file}:{node.lineno}: expected `from PACKAGE import NAME`, or `import PACKAGE` alone"
                )
            found, put = b"import ", f"from {_TOP} import ".encode()
        else:
            continue
        line, start = lines[node.lineno - 1], node.col_offset
        if not line.startswith(found, start):
            raise ValueError(f"{file}:{node.lineno}: expected an import that begins with {found.decode()!r}")
        lines[node.lineno - 1] = line[:start] + put + line[start + len(found) :]
    return b"".join(lines).decode()


@contextlib.contextmanager
def _stamped() -> Iterator[None]:
    """The tree with the file that names the commit: $SAMEWAY_BUILD, else git's; an sdist has it already."""
    if _BUILD.exists():
        yield
        return
    try:
        argv = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = os.environ.get("SAMEWAY_BUILD") or subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    _BUILD.write_text(commit + "\n")
    try:
        yield
    finally:
        _BUILD.unlink()


def _write(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel anew, with its RECORD (the format: "Binary distribution format", packaging.python.org)."""
    record = next(file for file in files if file.endswith(".dist-info/RECORD"))
    del files[record]
    digests = {
        file: base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        for file, text in files.items()
    }
    lines = [f"{file},sha256={digest},{len(files[file])}" for file, digest in digests.items()]
    files[record] = "".join(f"{line}\n" for line in [*lines, f"{record},,"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(files, key=lambda file: (".dist-info/" in file, file)):
            wheel.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), files[file], zipfile.ZIP_DEFLATED)
