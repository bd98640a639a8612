"""GPU support: whether torch has a GPU, and a flat index on it for machines without FAISS' GPU
build.

Knows no keys and no namespaces. Imports torch only if the driver's device exists.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def has_cuda() -> bool:
    """Whether torch can use a GPU. torch is imported only if the driver's device exists."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")) or not find_spec("torch"):
        return False
    import torch

    return torch.cuda.is_available()


class TorchFlat:
    """Exact search by inner product, as one matrix product and a top-k, on any torch device.

    It has the methods of FAISS' flat indexes that `cache.semantic.index` uses. Rows are float32;
    cosines equal the CPU's to within rounding.
    """

    def __init__(self, dims: int, device: str = "cuda") -> None:
        import torch

        self.ntotal = 0
        self._torch: Any = torch
        self._rows = torch.empty((1_024, dims), dtype=torch.float32, device=device)

    def add(self, rows: NDArray[np.float32]) -> None:
        """Append rows (n, dims)."""
        end = self.ntotal + len(rows)
        if end > len(self._rows):
            grown = self._rows.new_empty((max(end, 2 * len(self._rows)), self._rows.shape[1]))
            grown[: self.ntotal] = self._rows[: self.ntotal]
            self._rows = grown
        self._rows[self.ntotal : end] = self._torch.from_numpy(rows)
        self.ntotal = end

    def search(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return similarities and row numbers (n, count), nearest first. `count` is at most
        `ntotal`.
        """
        rows = self._torch.from_numpy(queries).to(self._rows.device)
        similarities, indexes = (rows @ self._rows[: self.ntotal].T).topk(count, dim=1)
        return similarities.cpu().numpy(), indexes.cpu().numpy()

    def reset(self) -> None:
        """Remove all rows, and keep the memory."""
        self.ntotal = 0
