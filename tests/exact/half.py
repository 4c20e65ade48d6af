"""A constraint of no library: which half of the vocabulary may come next is a hash of the answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch


class Half:
    """Now and then it allows everything; never anything of an answer that it did not allow."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed
        self._mask = cache(self._made)

    def allowed(self, ids: Sequence[int]) -> torch.Tensor | None:
        before = self._mask(tuple(ids[:-1])) if ids else None
        assert before is None or before[ids[-1]], "it was asked of an answer that cannot be"
        return self._mask(tuple(ids))

    def _made(self, ids: tuple[int, ...]) -> torch.Tensor | None:
        number = hash((self.seed, *ids)) & 0x7FFF_FFFF
        if number % 7 == 0:
            return None
        return torch.rand(self.vocab, generator=torch.Generator().manual_seed(number)) < 0.5
