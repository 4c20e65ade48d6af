"""Agreement of the texts of two sides, and whether a difference is rounding or a mistake.

A pass of one row and a pass of many sum the same products in different orders. In 16 bits that moves logits by a few
roundings, so of two tokens closer than that (a near tie) either may win. Both are the model's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcli import assemble
from kvcli.engine.engine import run_to_end
from kvcli.kernels.gumbel_noise import gumbel

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.chat.model import Model

ROUNDINGS = 4  # a near tie is at most this many roundings of the largest logit wide


@dataclass(frozen=True, slots=True)
class Tie:
    """Distance between the best logit and the losing token's, at the first difference of two texts."""

    margin: float
    bound: float

    @property
    def is_near(self) -> bool:
        return self.margin <= self.bound


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; None if one sequence begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def tie_at(model: Model, text: Sequence[int], a: int, b: int) -> Tie:
    """Prefill `text` (prompt and common part of both answers) with the plain model; compare its logits of a and b."""
    session = assemble.session(model.lm, model.mapped())
    run_to_end(session.read(text))
    logits = run_to_end(session.step(most=1)).logits[0]
    noise = torch.zeros_like(logits, dtype=torch.float64)
    if temperature := session.sampler.temperature:
        ids = torch.arange(len(logits), device=logits.device)[None]
        noise = temperature * gumbel(session.sampler.seed, torch.tensor([len(text) - 1], device=logits.device), ids)[0]
    return tie_of(logits, a, b, noise)


def tie_of(logits: Tensor, a: int, b: int, noise: Tensor | float = 0.0) -> Tie:
    """Compare logits [V] of two tokens. `noise` is added to them where the next token is sampled. The margin is the
    difference between the best sum and the lower sum of the two tokens."""
    exact = logits.double() + noise
    margin = float(exact.max() - torch.minimum(exact[a], exact[b]))
    return Tie(margin, ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.double().abs().max()))
