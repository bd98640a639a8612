"""The wheel, by way of the source distribution: what is in it, and that it stands beside anything."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gateway.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "cache", "policies", "local_engine", "ipc")
# each process of `sameway serve`, without what takes seconds to import
_PROCESSES = ("gateway.cli", "gateway.supervisor", "cache.worker.worker", "local_engine.config")


def _rewritten(source: str) -> str:
    spec = importlib.util.spec_from_file_location("sameway_build", ROOT / "deploy" / "sameway_build.py")
    assert spec is not None
    assert spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    rewritten: str = backend.rewritten(source, "a.py")
    return rewritten


def _build(what: str, folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": "deploy", "SAMEWAY_BUILD": "0123456789ab"}
    argv = [sys.executable, "-c", f"import sameway_build; sameway_build.build_{what}('dist')"]
    built = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution of a copy of the tree."""
    folder = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    _build("sdist", folder)
    assert not (folder / "gateway" / "build.txt").exists()
    with tarfile.open(folder / "dist" / f"sameway-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    _build("wheel", folder / f"sameway-{VERSION}")
    return folder / f"sameway-{VERSION}" / "dist" / f"sameway-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel's, and a stranger's of each name that the tree has at its top."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("STRANGER = True\n")
    return folder


def _python(site: Path, *argv: str) -> str:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site)}
    done = subprocess.run([sys.executable, *argv], cwd=site, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_tree_in_one_package(site: Path) -> None:
    """Its only other folder is the metadata's, and RECORD lists what there is."""
    tops = {path.name for path in site.iterdir()} - set(PACKAGES)
    assert tops == {"sameway", f"sameway-{VERSION}.dist-info"}
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT) for path in files if path.suffix != ".pyc"}
    packed = {path.relative_to(site / "sameway") for path in (site / "sameway").rglob("*") if path.is_file()}
    extra = {Path("__init__.py"), Path("__main__.py"), Path("gateway/build.txt")}
    assert {path for path in packed if path.suffix != ".pyc"} - extra == wanted
    record = (site / f"sameway-{VERSION}.dist-info" / "RECORD").read_text().splitlines()
    assert len(record) == len(packed) + sum(path.is_file() for path in site.glob("*.dist-info/**/*"))


def test_no_module_of_the_wheel_imports_a_package_of_the_tree(site: Path) -> None:
    """Every import among the packages names `sameway`, and each module has the lines that it has in the tree."""
    for path in (site / "sameway").rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & set(PACKAGES), (path, node.lineno)
        own = ROOT / path.relative_to(site / "sameway")
        assert not own.exists() or source.count("\n") == own.read_text().count("\n"), path


def test_neither_shadows_a_strangers_packages(site: Path) -> None:
    """With a stranger's `cache`, `gateway` and so on in one environment, both are imported, each under its name."""
    ours = ", ".join(f"sameway.{name}" for name in _PROCESSES)
    code = f"import {', '.join(PACKAGES)}, {ours}; print(all(m.STRANGER for m in ({', '.join(PACKAGES)})))"
    child = "from sameway.gateway.supervisor import python; print(*python('cache.worker')[1:])"
    assert _python(site, "-c", f"{code}; {child}").split() == ["True", "-m", "sameway.cache.worker"]


def test_a_wheel_names_its_version_and_its_commit(site: Path) -> None:
    """`sameway --version` and `python -m sameway --version` are one command."""
    entry = (site / f"sameway-{VERSION}.dist-info" / "entry_points.txt").read_text()
    assert "sameway = sameway.gateway.cli:main" in entry
    assert _python(site, "-m", "sameway", "--version") == f"sameway {VERSION} (0123456789ab)\n"


@pytest.mark.parametrize(
    ("source", "packed"),
    [
        ("from cache.entry import Entry\n", "from sameway.cache.entry import Entry\n"),
        ("def f():\n    import ipc  # é\n", "def f():\n    from sameway import ipc  # é\n"),
        ("x = 'é'; from ipc import (\n    a,\n)\n", "x = 'é'; from sameway.ipc import (\n    a,\n)\n"),
        ("import cache_lib\nfrom gateways import a\n", "import cache_lib\nfrom gateways import a\n"),
        (
            "'''\nfrom cache import Hit\n'''\nfrom . import cache\n",
            "'''\nfrom cache import Hit\n'''\nfrom . import cache\n",
        ),
    ],
)
def test_imports_are_rewritten_where_they_are_imports(source: str, packed: str) -> None:
    """In any place of a line, in no text, and under no longer name."""
    assert _rewritten(source) == packed


@pytest.mark.parametrize("source", ["import os, cache\n", "import cache.entry\n", "from\\\n  ipc import a\n"])
def test_an_import_that_cannot_be_rewritten_ends_the_build(source: str) -> None:
    """The error names the line, and what is expected there."""
    with pytest.raises(ValueError, match=r"a\.py:1: expected"):
        _rewritten(source)
