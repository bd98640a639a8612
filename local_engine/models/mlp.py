"""The MLP of a layer: gated (arXiv:2002.05202), or a mixture of experts.

Knows rows and weights, no layers and no sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from local_engine.kernels.fused import gate
from local_engine.kernels.supports import supports
from local_engine.weights.linear import Linear

if TYPE_CHECKING:
    from local_engine.kernels.fused import RowKernels
    from local_engine.kernels.gpu.experts import GroupedExperts


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate) * up); gate and up are one matrix."""

    gate_up: Linear
    down: Linear
    activation: str
    native: RowKernels | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gate(self.native, self.gate_up(x), self.activation))

    def linears(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down


@dataclass(slots=True)
class Experts:
    """A router, and experts that compute the rows that chose them: one after the other, or
    `grouped`, with shapes that do not depend on the choice."""

    router: Linear
    experts: tuple[Mlp, ...]
    per_token: int
    normalises: bool
    grouped: GroupedExperts | None = None

    def prepare(self, device: torch.device) -> None:
        """After the experts' own `prepare`: group them if a GPU's kernel supports their matrices."""
        first_expert = self.experts[0]
        pairs = [(expert.gate_up.whole, expert.down.whole) for expert in self.experts]
        gate_ups, downs = ([whole for whole in wholes if whole is not None] for wholes in zip(*pairs, strict=True))
        if not supports(device, "experts") or min(len(gate_ups), len(downs)) < len(pairs):
            return
        from local_engine.kernels.gpu.experts import GroupedExperts

        stacks = torch.stack(gate_ups), torch.stack(downs)
        for expert, gate_up, down in zip(self.experts, *stacks, strict=True):
            expert.gate_up.whole, expert.down.whole = gate_up, down
        self.grouped = GroupedExperts(*stacks, first_expert.activation, first_expert.native)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).float().softmax(-1).topk(self.per_token, -1)
        if self.normalises:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        if self.grouped is not None:
            return self.grouped(x, chosen, shares)
        output = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, places = (chosen == index).nonzero(as_tuple=True)
            found = self.experts[index](x[rows]) * shares[rows, places].unsqueeze(1)
            output.index_add_(0, rows, found)
        return output

    def linears(self) -> Iterator[Linear]:
        yield self.router
        for expert in self.experts:
            yield from expert.linears()
