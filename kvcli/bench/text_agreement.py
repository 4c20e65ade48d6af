"""Whether two sides wrote the same text, and whether a difference is rounding or a mistake.

A pass of one row and a pass of many sum the same products in different orders. In 16 bits that moves logits by a few
roundings, so two tokens closer than that (a near tie) may fall either way; both are the model's own choice.
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

ROUNDINGS = 4  # a near tie is at most so many roundings of the largest logit wide


@dataclass(frozen=True, slots=True)
class Tie:
    """How far the token that lost lay behind the best one, where two texts part."""

    margin: float
    bound: float

    @property
    def is_near(self) -> bool:
        return self.margin <= self.bound


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where they differ; None where one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def tie_at(model: Model, text: Sequence[int], a: int, b: int) -> Tie:
    """The plain model reads `text` (prompt and the part that both sides wrote) and says what it thinks of a and b."""
    session = assemble.session(model.lm, model.mapped())
    run_to_end(session.read(text))
    logits = run_to_end(session.step(most=1)).logits[0]
    noise = torch.zeros_like(logits, dtype=torch.float64)
    if temperature := session.sampler.temperature:
        ids = torch.arange(len(logits), device=logits.device)[None]
        noise = temperature * gumbel(session.sampler.seed, torch.tensor([len(text) - 1], device=logits.device), ids)[0]
    return tie_of(logits, a, b, noise)


def tie_of(logits: Tensor, a: int, b: int, noise: Tensor | float = 0.0) -> Tie:
    """logits [V], and what is added to them where the next token is drawn. Margin: from the best sum down to the worse
    of the two tokens'."""
    exact = logits.double() + noise
    margin = float(exact.max() - torch.minimum(exact[a], exact[b]))
    return Tie(margin, ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.double().abs().max()))
