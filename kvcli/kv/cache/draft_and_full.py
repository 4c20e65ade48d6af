"""A whole past, and beside it what a lossy profile keeps of it: that one guesses, this one checks.

The text is that of the whole past, to the bit. How often guesses come true says what the other one is worth (any
compression of the past as a draft: MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912). Policies judge the part
that is kept, which is what such a store shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kv.slots import AttentionParams, Masks, Slots, Usage
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.slots import KVCache
    from kvcli.kv.snapshot import SnapshotReader, State


class DraftAndFullCache:
    """Two stores of one text. Rows whose finds are checked later read `kept`; all others the `whole` one."""

    forgets = False

    def __init__(self, whole: KVCache, kept: KVCache) -> None:
        self._whole, self._kept = whole, kept

    @property
    def dtype(self) -> torch.dtype:
        """Numbers of the whole past."""
        return self._whole.dtype

    @property
    def changes(self) -> int:
        return self._whole.changes + self._kept.changes

    @property
    def batch_variant_reason(self) -> str:
        """What the whole past says: the other one makes guesses."""
        return self._whole.batch_variant_reason

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="two stores hold one text")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> parts over one of the two."""
        return (self._kept if sight.is_guess else self._whole).attend(layer, q, sight, pos, own)

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in both."""
        self._whole.append(layer, k, v, start)
        self._kept.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store these slots in both."""
        self._whole.take(layer, slots)
        self._kept.take(layer, slots)

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head that are kept."""
        return self._kept.n_slots(layer)

    def slots(self, layer: int) -> Slots:
        """What is kept."""
        return self._kept.slots(layer)

    def newest(self, layer: int, n: int) -> Slots:
        """Of what is kept, the n slots that each head stored last."""
        return self._kept.newest(layer, n)

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Of what is kept, forget slots whose mask [K, S] is False; returns what fell out."""
        return self._kept.keep(layer, mask)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Room for n slots a head; where a policy lets go of some, nobody asks for it."""
        self._whole.reserve(n, layers)
        self._kept.reserve(n, layers)

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later."""
        self._whole.crop(n)
        self._kept.crop(n)

    def reaches(self, n: int) -> bool:
        """Whether a row at position n finds all that it sees: in the whole past."""
        return self._whole.reaches(n)

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """The masks are of what is kept; windows give back in both."""
        layers = None if layers is None else list(layers)
        self._whole.compress((), end, layers)
        return self._kept.compress(masks, end, layers)

    def snapshot(self) -> State:
        """Both."""
        return {"whole": self._whole.snapshot(), "kept": self._kept.snapshot()}

    def restore(self, given: SnapshotReader) -> None:
        """Each what it had."""
        self._whole.restore(given.part("whole"))
        self._kept.restore(given.part("kept"))

    def usage(self) -> list[Usage]:
        """What is kept, as a tier of its own, of which no answer misses anything."""
        return [*self._whole.usage(), *(replace(use, tier="draft", lost=None) for use in self._kept.usage())]
