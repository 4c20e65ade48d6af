"""Rows of every quality table: the full cache, the profiles, and two controls with the same memory as the profiles.

The controls are random eviction and StreamingLLM. A method that does not beat them has no useful score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvcli.settings.profile import Profile

Role = Literal["full", "profile", "control"]

SINKS = 4  # first tokens that both controls keep
NEWEST = 64  # newest tokens that the random control keeps, at most a quarter of its budget
SHARE = 0.25  # share of the context that controls keep if no profile evicts


@dataclass(frozen=True)
class Row:
    """One row of the quality table: a profile, or a control that adapts to the context."""

    name: str
    role: Role
    base: Profile
    budget: ControlBudget | None = None
    policy: str = ""

    def at(self, n: int, lot: int = 0) -> Profile:
        """Return the row's profile for a context of `n` tokens; controls adapt to the budget. `lot`: random seed."""
        if self.budget is None:
            return self.base
        policy = _policy(self.policy, self.budget.at(n), lot)
        return self.base.replace(exactness="approx", name=self.name, policy=policy)


@dataclass(frozen=True)
class ControlBudget:
    """Token budget of the controls: as many as the leanest profile keeps, if any profile evicts."""

    lean: tuple[Profile, ...]  # profiles that evict at the lengths measured

    @staticmethod
    def of(profiles: Sequence[Profile], lengths: Sequence[int]) -> ControlBudget:
        """Return the budget for texts of these lengths."""
        return ControlBudget(tuple(p for p in profiles if any(p.policy.footprint(n).slots < n for n in lengths)))

    def at(self, n: int) -> int:
        """Return the tokens kept of `n`; all `n` if the leanest profile keeps all of them."""
        return min((p.policy.footprint(n).slots for p in self.lean), default=max(1, int(SHARE * n)))

    def words(self) -> str:
        """Describe the source of the budget in words."""
        names = list(dict.fromkeys(p.name for p in self.lean))
        return f"as much as {' or '.join(names)}" if names else f"{SHARE:.0%} of the context"


def rows(profiles: Sequence[Profile], full: Profile, lengths: Sequence[int]) -> list[Row]:
    """Return the rows: the full cache, the profiles in their order except those equal to it, and the controls."""
    asked: dict[str, Row] = {}
    for profile in profiles:
        if profile.hash != full.hash:
            asked.setdefault(profile.hash, Row(profile.name, "profile", profile))
    budget = ControlBudget.of(profiles, lengths)
    by_lot = Row("random", "control", full, budget, policy="random")
    by_age = Row("streaming", "control", full, budget, policy="window")
    return [Row(full.name, "full", full), *asked.values(), by_lot, by_age]


def full_profile(loaded: Profile) -> Profile:
    """Return a profile without eviction, quantization or drafting, for weights loaded as in `loaded`.

    Its sampling settings are those of `loaded` too, as of all profiles of a benchmark. So a profile equals it if it
    keeps the full cache and does not draft.
    """
    exact = Profile.load("exact")
    changed: dict[str, Any] = {
        table: {k: v for k, v in asdict(getattr(loaded, table)).items() if v != getattr(getattr(exact, table), k)}
        for table in ("load", "sample")
    }
    return exact.replace(**changed, name=exact.name, description=exact.description)


def _policy(name: str, budget: int, lot: int) -> dict[str, object]:
    sinks = min(SINKS, budget - 1)
    if name == "window":
        return {"name": name, "sinks": sinks, "window": budget - sinks}
    newest = max(1, min(NEWEST, budget // 4))
    sinks = min(sinks, budget - newest)
    return {"name": name, "sinks": sinks, "window": newest, "budget": budget, "seed": lot}
