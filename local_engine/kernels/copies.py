"""Asynchronous copies from the host to a device. Knows arrays alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def pinned(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor that the device can read while the host continues: torch keeps it until then."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" and array.size else tensor


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Start an asynchronous copy to the device."""
    return pinned(array, device).to(device, non_blocking=True)
