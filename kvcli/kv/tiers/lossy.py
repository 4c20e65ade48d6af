"""Common methods of tiers that quantize old slots."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import StoredKV
from kvcli.kv.slots import Slots, compact, empty_like, picked, run_of


class LossyTier:
    """A tier below the top, because it quantizes slots as they are stored. Subclasses store slots (`take`), dequantize
    them (`slots`) and evict them (`_keep`)."""

    gather_async: ClassVar[None] = None

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots, keys after rotary embedding; slots with position -1 are skipped."""
        raise NotImplementedError

    def slots(self, layer: int) -> Slots:
        """Return a dequantized copy of the slots of a layer, padded to the longest head; holes have position -1."""
        raise NotImplementedError

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on."""
        self.take(layer, Slots(k, v, run_of(start, k.shape[1], k.shape[0], k.device)))

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last, which have the highest positions, by position."""
        s = self.slots(layer)
        found = picked(s, s.pos.argsort(dim=1, stable=True)[:, max(0, s.n_slots - n) :])
        return compact(found, found.pos >= 0)

    def run(self, layer: int) -> StoredKV | None:
        """Return None: slots are not stored in full precision."""
        return None

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False and return them dequantized."""
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
    """Return the tensors stored as keys and as values. Of latents (rank > 0): the rotary part and the rest."""
    return (s.k[..., rank:], s.k[..., :rank]) if rank else (s.k, s.v)


def join_latent(rank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `split_latent`."""
    if not rank:
        return k, v
    both = torch.cat((v, k), 2)
    return both, both
