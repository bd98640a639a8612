"""A GPU, where there is one: whether torch has it, and a flat index on it for machines without
FAISS' GPU build.

Knows no keys and no namespaces. Imports torch only where the driver's device is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def has_cuda() -> bool:
    """Whether there is a GPU that torch can use; torch is asked only where the driver's device
    is.
    """
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


class TorchFlat:
    """Exact search by inner product as one matrix product and a top-k, on any torch device. The
    methods are those of FAISS' flat indexes that `cache.semantic.index` uses; rows are float32, so
    cosines are those of the CPU to within rounding.
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
        """Similarities and places (n, count), the nearest first. `count` is at most `ntotal`."""
        asked = self._torch.from_numpy(queries).to(self._rows.device)
        similarities, places = (asked @ self._rows[: self.ntotal].T).topk(count, dim=1)
        return similarities.cpu().numpy(), places.cpu().numpy()

    def reset(self) -> None:
        """Forget all rows; the memory stays."""
        self.ntotal = 0
