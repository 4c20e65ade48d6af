"""A level of a tiered cache: a tier and the number of slots that it keeps at a compression point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcli.kv.offload.host_access import Answer
from kvcli.kv.slots import AttentionParams, LowerTier, Slots, last

SLACK = 16  # a level with others below is cut once it exceeds its limit by 1/SLACK, or by `group` if that is more
Ask = Callable[[int, Tensor, AttentionParams, Sequence[int]], Answer]


@dataclass(frozen=True, slots=True)
class TierLevel:
    """A level of a tiered cache: one tier, with the number of slots per head that it may hold."""

    tier: LowerTier
    # limit in slots without sinks, None = no limit; `is_full` says by how much it may be exceeded
    holds: int | None = None
    group: int = 1  # slots beyond the limit are demoted by age in whole groups; masks need not keep to groups
    name: str = ""  # tier name in reports, if the tier of the top has the same name
    attend_async: Ask | None = None  # starts attention that runs in parallel with the other levels, if the tier can

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        """Return a function that returns the partial attention of q [H, N, D] at positions pos [N]."""
        if self.attend_async is not None:
            return self.attend_async(layer, q, params, pos)
        parts = self.tier.attend(layer, q, params, pos)
        return lambda: parts

    def is_full(self, layer: int, *, is_last: bool) -> bool:
        """True if the level exceeds its limit by its slack. The slack is there because demotion copies a long level."""
        if self.holds is None:
            return False
        slack = self.group if is_last else max(self.group, self.holds // SLACK)
        return self.tier.n_slots(layer) >= self.holds + slack

    def has_room(self, layer: int, n: int) -> bool:
        """True if the level has capacity for n more slots per head."""
        return self.holds is None or self.tier.n_slots(layer) + n <= self.holds

    def forget(self, layer: int, s: Slots) -> Slots:
        """Evict the oldest stored slots until `s` fits. Returns the slots of `s` that fit, which are its newest."""
        most, n = self.holds or 0, s.n_slots
        while (n_stored := self.tier.n_slots(layer)) and n_stored + n > most:  # a tier may free only whole blocks
            there = self.tier.slots(layer).pos >= 0
            gone = max(n_stored + n - most, most // SLACK)
            self.tier.evict_except(layer, there & (there.cumsum(1) > gone))
        return s if n <= most else last(s, most)

    def __str__(self) -> str:
        """Return tier and capacity for messages."""
        return f"{self.tier.usage()[0].tier}: {'all the rest' if self.holds is None else f'{self.holds:,} tokens'}"
