"""Rows in a file that outlives its worker: whatever is put and not dropped is adopted, once a process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts.spool import NOWHERE, SLOT_BYTES, Spool

SIZES = st.one_of(st.integers(1, 40), st.integers(SLOT_BYTES - 8, 3 * SLOT_BYTES))


def adopted(folder: Path) -> list[bytes]:
    """What a worker that starts now takes over, and ends with."""
    found: list[tuple[bytes, range]] = []
    spool = Spool(folder)
    spool.adopt(lambda data, place: found.append((data, place)))
    for _, place in found:
        spool.drop(place)
    spool.close()
    return sorted(data for data, _ in found)


@given(st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=400))
def test_what_is_left_is_what_was_put_and_not_dropped(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[int, int]]
) -> None:
    """Rows of any size, dropped in any order, through growth and shrinking."""
    folder = tmp_path_factory.mktemp("spool")
    spool, kept = Spool(folder), list[tuple[range, bytes]]()
    for number, (size, act) in enumerate(acts):
        if act == 3 and kept:
            place, _ = kept.pop(size % len(kept))
            spool.drop(place)
        else:
            data = (b"%d," % number * size)[:size] + b"."
            kept.append((spool.put(data), data))
    assert len(spool) == len(kept)
    spool.close()
    assert adopted(folder) == sorted(data for _, data in kept)
    assert list(folder.iterdir()) == []


_WORKER = """
import sys
from pathlib import Path
from gateway.accounts.spool import Spool
spool = Spool(Path(sys.argv[1]))
for number in range(1000):
    place = spool.put(b"%d" % number)
    if number % 10:
        spool.drop(place)
print("put", flush=True)
sys.stdin.read()
"""


def test_a_kill_loses_no_row(tmp_path: Path) -> None:
    """Rows of a process that runs are its own; those of one that was killed are adopted by one of several others."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"put\n"
        assert adopted(tmp_path) == []
        os.kill(worker.pid, signal.SIGKILL)
    spools, found = [Spool(tmp_path) for _ in range(3)], list[bytes]()
    for spool in spools:
        spool.adopt(lambda data, _: found.append(data))
    assert sorted(found) == sorted(b"%d" % number for number in range(0, 1000, 10))
    assert [len(spool) for spool in spools] == [100, 0, 0]
    for spool in spools:
        spool.close()
    assert len(adopted(tmp_path)) == 100


_KILLED = """
import os, signal, sys
from pathlib import Path
from gateway.accounts import spool as module

class Killing:
    def __init__(self, map, stores):
        self.map, self.left = map, stores
    def __getitem__(self, place):
        return self.map[place]
    def __len__(self):
        return len(self.map)
    def __setitem__(self, place, data):
        for at in range(place.start, place.stop, 40):  # a copy may end anywhere
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            self.map[at : min(at + 40, place.stop)] = data[at - place.start :][:40]

def child(folder, stores):
    spool = module.Spool(folder)
    spool.put(b"first")
    dropped = spool.put(b"old" * 400)
    spool.put(b"second")
    spool.mapped = Killing(spool.mapped, stores)
    spool.put(b"new" * 400)
    spool.drop(dropped)
    os._exit(0)

for stores in range(1000):
    if not (pid := os.fork()):
        child(Path(sys.argv[1]) / str(stores), stores)
    if not os.waitpid(pid, 0)[1]:
        break
"""


def test_a_kill_at_any_store_leaves_no_other_row(tmp_path: Path) -> None:
    """A row of several slots is there whole or not at all, wherever its worker was killed; its bytes are no rows."""
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=True)
    found = {tuple(adopted(folder)) for folder in tmp_path.iterdir()}
    first, old, second, new = b"first", b"old" * 400, b"second", b"new" * 400
    assert found == {(first, old, second), (first, new, old, second), (first, new, second)}


def test_without_room_nothing_is_kept_and_nothing_raises(tmp_path: Path) -> None:
    """A folder that is none, and a file that may not grow: rows have no place, and those that have one stay."""
    (tmp_path / "file").touch()
    spool = Spool(tmp_path / "file")
    assert spool.error is not None
    assert spool.put(b"x") == NOWHERE
    spool.drop(NOWHERE)
    spool.close()
    code = """
import resource, signal, sys
from pathlib import Path
from gateway.accounts.spool import NOWHERE, Spool
spool = Spool(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
places = [spool.put(b"%d" % number) for number in range(300)]
print(places.count(NOWHERE), len(spool))
spool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "small")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["44", "256"], done.stderr
    assert len(adopted(tmp_path / "small")) == 256
