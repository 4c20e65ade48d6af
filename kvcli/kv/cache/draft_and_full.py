"""A full KV cache for verification and a compressed KV cache for drafting, both of one sequence.

The generated text is that of the full cache, to the bit. The acceptance rate measures the quality of the compressed
cache (drafting with a compressed KV cache: MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912). Eviction policies
score the compressed cache, which is also the one that `slots` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, Masks, Slots, Usage
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.device_tables import DeviceCache


class DraftAndFullCache:
    """Two KV caches of one sequence. Draft rows attend to `kept`; all other rows attend to `whole`."""

    forgets = False

    def __init__(self, whole: KVCache, kept: KVCache) -> None:
        self._whole, self._kept = whole, kept

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the full cache."""
        return self._whole.dtype

    @property
    def changes(self) -> int:
        return self._whole.changes + self._kept.changes

    @property
    def batch_variant_reason(self) -> str:
        """Reason of the full cache. The compressed cache only drafts."""
        return self._whole.batch_variant_reason

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the reason why no captured pass can read this cache."""
        return DeviceCache(why_not="two KV caches hold one sequence")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over one of the two caches."""
        return (self._kept if params.is_draft else self._whole).attend(layer, q, params, pos, own)

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in both caches."""
        self._whole.append(layer, k, v, start)
        self._kept.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots in both caches."""
        self._whole.take(layer, slots)
        self._kept.take(layer, slots)

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head of the compressed cache."""
        return self._kept.n_slots(layer)

    def slots(self, layer: int) -> Slots:
        """Return the slots of the compressed cache."""
        return self._kept.slots(layer)

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head of the compressed cache stored last."""
        return self._kept.newest(layer, n)

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots of the compressed cache whose mask [K, S] is False and return them."""
        return self._kept.evict_except(layer, mask)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity for n slots per head in both caches. It is not called if a policy evicts slots."""
        self._whole.reserve(n, layers)
        self._kept.reserve(n, layers)

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later."""
        self._whole.crop(n)
        self._kept.crop(n)

    def reaches(self, n: int) -> bool:
        """True if a row at position n finds every slot inside its sliding windows in the full cache."""
        return self._whole.reaches(n)

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Apply the masks to the compressed cache; evict slots outside sliding windows from both caches."""
        layers = None if layers is None else list(layers)
        self._whole.compress((), end, layers)
        return self._kept.compress(masks, end, layers)

    def snapshot(self) -> State:
        """Return the snapshots of both caches."""
        return {"whole": self._whole.snapshot(), "kept": self._kept.snapshot()}

    def restore(self, given: SnapshotReader) -> None:
        """Restore both caches."""
        self._whole.restore(given.part("whole"))
        self._kept.restore(given.part("kept"))

    def usage(self) -> list[Usage]:
        """Return the memory use of both. The compressed cache is tier "draft", without loss in the answer."""
        return [*self._whole.usage(), *(replace(use, tier="draft", lost=None) for use in self._kept.usage())]
