"""Penalties: functions of logits [N, V] and of facts about the tokens before each row (token_history.py)."""

from __future__ import annotations

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.tables import sent

LONGEST = 255  # tokens of a repetition beyond the allowed ones, at most: longer ones have the same penalty
LARGEST = 88.7228391  # log of the largest float32


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make seen tokens ([N, V] bool) less likely: CTRL, arXiv 1909.05858, in the form of transformers and llama.cpp."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_counts(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Subtract `presence` once and `frequency` per occurrence in the answer ([N, V]), as the OpenAI API does."""
    return logits - (counts * frequency + (counts > 0) * presence)


def penalize_repeats(logits: Tensor, repeats: Tensor, multiplier: float, base: float, allowed: int) -> Tensor:
    """Subtract multiplier * base ** (length - allowed) if a token continues a repetition of `allowed` tokens or more.

    `repeats` [N, V]: the lengths. DRY, by p-e-w (text-generation-webui #5677), as in llama.cpp.
    """
    beyond = (repeats - min(allowed - 1, 1 << 31)).clamp_min(0)  # 1 for a repetition of `allowed` tokens
    return logits - _by_length(multiplier, base, logits.dtype, logits.device)[beyond]


def longest_repeat(base: float, allowed: int) -> int:
    """Return the length from which on the penalty is the same."""
    return allowed + (min(LONGEST, int(LARGEST / log(base))) if base > 1 else 0)


@lru_cache(maxsize=8)
def _by_length(multiplier: float, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the penalty by tokens beyond the allowed ones, after that of shorter repetitions, 0. A table, because a
    power may differ in its last bit among vectors of other lengths."""
    powers = [multiplier * base**n for n in range(longest_repeat(base, 0) + 1)]
    return torch.tensor([0.0, *powers], dtype=dtype, device=device)


def add_bias(logits: Tensor, bias: tuple[tuple[int, float], ...]) -> Tensor:
    """Add to the logits of some tokens: pairs of id and number, each id once."""
    ids, values = (sent(torch.tensor(each), logits.device) for each in zip(*bias, strict=True))
    return logits.index_add(1, ids, values.to(logits.dtype).expand(len(logits), -1))
