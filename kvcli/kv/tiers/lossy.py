"""What tiers that round old slots have in common, however a slot lies in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvcli.kv.slots import Slots, compact, empty_like, picked, run_of

if TYPE_CHECKING:
    from kvcli.kernels.attend_invariant import StoredKV


class LossyTier:
    """A rung of a ladder, never the first one, as it rounds what it is given at once. Each tier says how it takes slots
    (`take`), reads them back (`slots`) and forgets some (`_keep`)."""

    is_far: ClassVar[bool] = False

    def take(self, layer: int, slots: Slots) -> None:
        """Store these slots, after rotary embedding; each head those whose position is not -1."""
        raise NotImplementedError

    def slots(self, layer: int) -> Slots:
        """What this layer holds, read back: a copy, padded to the longest head; holes have position -1."""
        raise NotImplementedError

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on; every head takes all of them."""
        self.take(layer, Slots(k, v, run_of(start, k.shape[1], k.shape[0], k.device)))

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last, which are those of the highest positions, in their order."""
        s = self.slots(layer)
        found = picked(s, s.pos.argsort(dim=1, stable=True)[:, max(0, s.n_slots - n) :])
        return compact(found, found.pos >= 0)

    def run(self, layer: int) -> StoredKV | None:
        """Slots do not lie in numbers."""
        return None

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False; returns what fell out, read back."""
        before = self.slots(layer)
        mask = mask & (before.pos >= 0)
        if torch.equal(mask, before.pos >= 0):
            return empty_like(before)
        fell = compact(before, ~mask)
        del before
        self._keep(layer, mask)
        return fell

    def _keep(self, layer: int, mask: Tensor) -> None:
        raise NotImplementedError


def split_latent(rank: int, s: Slots) -> tuple[Tensor, Tensor]:
    """What lies as keys and as values: of latents (rank > 0) the turned part and the others, each rounded by itself."""
    return (s.k[..., rank:], s.k[..., :rank]) if rank else (s.k, s.v)


def join_latent(rank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse."""
    if not rank:
        return k, v
    both = torch.cat((v, k), 2)
    return both, both
