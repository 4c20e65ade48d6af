"""Muon for the hidden matrices (Jordan and others, 2024), AdamW for the embedding and the norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# the quintic iteration that pushes all singular values towards one
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(g: Tensor, n_steps: int = 5) -> Tensor:
    """A stack of matrices [n, rows, columns] with nearly orthonormal rows or columns, whichever are fewer."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(n_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    flat: Tensor = (x.mT if tall else x).float()
    return flat


class Optimizer:
    """One step over all parameters, with a common scale for both rates; `pace` slows single parameters down."""

    def __init__(
        self,
        network: nn.Module,
        pace: Callable[[str], float] = lambda name: 1.0,
        rate: float = 0.02,
        adam_rate: float = 2e-3,
        decay: float = 0.01,
    ) -> None:
        named = list(network.named_parameters())
        self.matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        self.paces = [pace(name) for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [(name, p) for name, p in named if p.ndim != 2 or "embed" in name]
        groups = [{"params": [p], "pace": pace(name)} for name, p in others]
        self.adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.rate, self.adam_rate, self.decay = rate, adam_rate, decay

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale * group["pace"]
        self.adam.step()
        by_shape: dict[torch.Size, list[int]] = {}
        for i, p in enumerate(self.matrices):
            by_shape.setdefault(p.shape, []).append(i)
        for (n_rows, n_columns), members in by_shape.items():
            updates = orthogonalised(torch.stack([self._nesterov(i) for i in members]))
            for i, update in zip(members, updates, strict=True):
                rate = self.rate * scale * self.paces[i]
                self.matrices[i].mul_(1 - rate * self.decay)
                self.matrices[i].add_(update, alpha=-rate * max(1.0, n_rows / n_columns) ** 0.5)

    def _nesterov(self, i: int) -> Tensor:
        gradient = self.matrices[i].grad
        assert gradient is not None
        self.momentum[i].lerp_(gradient, 0.05)
        return gradient.lerp(self.momentum[i], 0.95)

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = [m.clone() for m in state["momentum"]]
