"""Copies from the host to a device that the host does not wait for. Knows arrays alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def pinned(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor that the device can read while the host goes on: torch keeps it until then."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" and array.size else tensor


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    return pinned(array, device).to(device, non_blocking=True)
