"""A rung of a ladder: a tier, and how much of the past stays in it at a boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcli.kv.offload.host_access import Answer
from kvcli.kv.sliding_windows import Windows
from kvcli.kv.slots import AttentionParams, Slots, Tier, last
from kvcli.kv.tiers.device_tables import DeviceCache

SLACK = 16  # a rung with others below may hold this part more than it has to
Ask = Callable[[int, Tensor, AttentionParams, Sequence[int]], Answer]


class CroppableTier(Tier, Protocol):
    """A tier that can be undone, which is all that a rung needs beside a tier's own verbs."""

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later."""


class TopTier(CroppableTier, Protocol):
    """The first rung: new rows go there."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def windows(self) -> Windows: ...

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """As of a store."""

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Room for n slots a head in these layers, None = all."""

    def put(self, layer: int, slots: Slots) -> None:
        """Hold these slots instead, in no more room than they need; their tensors become the tier's own."""

    def evict_below(self, layer: int, end: int) -> int:
        """Forget positions that a window hides from rows at `end` and later: those below the answer; 0 = none."""


@dataclass(frozen=True, slots=True)
class TierLevel:
    """Slots are counted a head."""

    tier: CroppableTier
    holds: int | None = None  # slots, sinks aside (up to SLACK more); None = all. Of the last: its room
    group: int = 1  # what is older moves down in multiples of so many slots
    name: str = ""  # of its bytes, where the top's are called as its tier's are
    attend_async: Ask | None = None  # where the tier can be read while the device reads others: how it is asked

    def ask(self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int]) -> Answer:
        """q [H, N, D] of rows at positions pos [N] -> the parts, when they are called for."""
        if self.attend_async is not None:
            return self.attend_async(layer, q, sight, pos)
        parts = self.tier.attend(layer, q, sight, pos)
        return lambda: parts

    def is_full(self, layer: int, *, is_last: bool) -> bool:
        """Whether what it holds too much is worth moving: a long rung is copied when its oldest go."""
        if self.holds is None:
            return False
        slack = self.group if is_last else max(self.group, self.holds // SLACK)
        return self.tier.n_slots(layer) >= self.holds + slack

    def has_room(self, layer: int, n: int) -> bool:
        """For n slots more."""
        return self.holds is None or self.tier.n_slots(layer) + n <= self.holds

    def forget(self, layer: int, s: Slots) -> Slots:
        """What came first, until all of these have room, or the newest of them: those are returned."""
        most, n = self.holds or 0, s.n_slots
        while (held := self.tier.n_slots(layer)) and held + n > most:  # a tier may give room back by the piece
            there = self.tier.slots(layer).pos >= 0
            gone = max(held + n - most, most // SLACK)
            self.tier.keep(layer, there & (there.cumsum(1) > gone))
        return s if n <= most else last(s, most)

    def __str__(self) -> str:
        """What it has room for, for people."""
        return f"{self.tier.usage()[0].tier}: {'all the rest' if self.holds is None else f'{self.holds:,} tokens'}"
