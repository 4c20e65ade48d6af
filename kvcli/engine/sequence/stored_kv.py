"""Stored KV of a sequence, as the companion that the others work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.kv.companion import Companion
from kvcli.kv.slots import KVCache, Loss, Usage

if TYPE_CHECKING:
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.kv.snapshot import SnapshotReader, State
    from kvcli.kv.views.view import CompactView


class StoredKV(Companion):
    """The KV cache of a sequence, and the view of it that lookahead rows read."""

    def __init__(self, cache: KVCache, view: CompactView | None) -> None:
        self.cache, self.view = cache, view
        self.is_whole = True  # no policy has evicted or moved a slot, and no companion has left a token out

    def replace(self, cache: KVCache) -> None:
        """Continue with the KV in another cache."""
        self.cache = cache
        self.view = self.view.rebind(cache) if self.view is not None else None

    @property
    def _forgot(self) -> bool:
        return not self.is_whole and self.cache.forgets

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 if evicted slots would be needed."""
        return n if n == of or not (self._forgot or not self.cache.reaches(n)) else 0

    def rewind(self, n: int, of: int) -> None:
        """Remove all slots from position n on."""
        self.cache.crop(n)
        self.is_whole = self.is_whole or not n

    def compress(self, point: CompressionPoint) -> None:
        """Evict, demote or quantize stored slots, as the policy and the tiers require."""
        was_whole, self.is_whole = self.is_whole, False  # in case it fails midway
        self.is_whole = not self.cache.compress(point.masks, point.end) and was_whole

    def loss(self, n: int) -> Loss | None:
        """Return "forgotten" if a policy evicted KV for good."""
        return "forgotten" if self._forgot else None

    def snapshot(self) -> State:
        """Return the slots of all tiers."""
        return {"kv": self.cache.snapshot(), "is_whole": self.is_whole}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch, CacheFull."""
        self.cache.restore(given.part("kv"))
        self.is_whole = bool(given.number("is_whole", 1))

    def usage(self) -> list[Usage]:
        """Return the bytes of the tiers, and of the view."""
        return [*self.cache.usage(), *(self.view.usage() if self.view is not None else ())]
