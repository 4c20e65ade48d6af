"""Before and after a run: refuse what cannot fit, choose the window, foretell memory, and note what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from kvcli.errors import DoesNotFit
from kvcli.fit import base_memory, run_log
from kvcli.fit.advice import MIB, changes
from kvcli.fit.auto_placement import plan_on
from kvcli.fit.available_memory import AvailableMemory, choose, rooms
from kvcli.fit.base_memory import BASE
from kvcli.fit.plan import MeasuredFacts, Plan, PlannedModel, plan
from kvcli.fit.run_log import NOTHING
from kvcli.schemas.fit import RunEntry
from kvcli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcli.engine.stats import Stats
    from kvcli.settings.profile import Profile


@dataclass
class Preflight:
    """One model on this machine, and what earlier runs taught about it."""

    subject: PlannedModel
    name: str
    data: Path
    found: Mapping[str, AvailableMemory] = field(default_factory=rooms)
    base: int = BASE  # bytes of the program, by program.here() or elsewhere()
    notes: list[str] = field(default_factory=list)  # of files that could not be used
    highest: int = 0  # the most that was foretold for this process so far
    foretold: int = 0  # the same before any correction
    find: Callable[[str], PlannedModel] | None = None  # a model that drafts, by name
    run: str = field(default_factory=lambda: uuid4().hex[:12])  # of this process, for the log

    def facts(self, device: str) -> MeasuredFacts:
        """What the program takes, and what earlier runs of this model took beyond their estimates."""
        past = run_log.measured_excess(
            run_log.read(self.data), run_log.Like(self.name, device.partition(":")[0], base_memory.build())
        )
        return MeasuredFacts(self.base, past or NOTHING, self.find)

    def plan(self, profile: Profile, context: int | None = None, *, as_is: bool = False) -> Plan:
        """What the profile needs for a context, or for its own window, with what fits a GPU where it leaves that open.

        `as_is`: with nothing chosen, as of what is loaded already.
        """
        room = choose(dict(self.found), profile.load.device)
        return (plan if as_is else plan_on)(self.subject, profile, room, context, self.facts(room.device))

    def fitted(
        self, profile: Profile, others: Callable[[], Mapping[str, Profile]], *, force: bool = False, whole: bool = False
    ) -> tuple[Plan, str]:
        """The plan of the run, with a window that fits, and a note if that is less than the model's limit.

        Raises DoesNotFit; what was asked for by name is never changed. `whole`: the model's limit was asked for.
        `force` takes everything.
        """
        limit, is_open = self.subject.shape.limit, profile.context.limit == "auto" and not whole
        asked = limit if profile.context.limit == "auto" else int(profile.context.limit)
        # a window beyond the limit is refused elsewhere, by its name
        found = self.plan(profile, None if is_open else min(asked, limit))
        if is_open and (force or not found.most):
            found = self.plan(found.profile, limit, as_is=True)
        if force or (found.fits and found.need.context == min(asked, limit)):
            return found, ""
        if not is_open:
            raise self.refusal(found, others())
        enough = min(profile.context.reserve + 1, limit)
        if found.most < enough:
            raise self.refusal(self.plan(found.profile, enough, as_is=True), others())
        note = f"context {found.most:,} of {limit:,} tokens: more does not fit on {found.room.device}"
        return found, note

    def refusal(self, wrong: Plan, others: Mapping[str, Profile]) -> DoesNotFit:
        """In numbers, with what would fit."""
        parts, room = wrong.need, wrong.room
        sizes = {
            "program": parts.base,
            "weights": parts.weights,
            "kv": parts.kv,
            "draft": parts.draft,
            "working": parts.working,
            "loading": wrong.least - parts.running,
        }
        listed = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
        second = wrong.profile.spec.second or wrong.profile.steps.second
        what = self.name if second is None else f"{self.name} and {second.model}, which drafts,"
        tried = changes(self.subject, wrong, others, self.found, wrong.facts)
        detail = {"needed": wrong.least, "available": room.available, "usable": wrong.usable, **sizes}
        try_ = [*(change.type for change in tried), f"kvcli fit {self.name} --all", "--force tries it anyway"]
        if parts.short and wrong.fits_card:
            always, most = (parts.budget + parts.short) / MIB, parts.budget / MIB
            return DoesNotFit(
                f"memory.budget = {wrong.profile.memory.budget} has no room for what always stays",
                lines=[f"{wrong.run.always} first and newest tokens in full take {always:,.2f} MiB of {most:,.2f} MiB"],
                detail=detail,
                try_=try_,
            )
        return DoesNotFit(
            f"not enough memory to load {what} with {parts.context:,} tokens",
            lines=[
                f"needs {gib(wrong.least)} GiB ({listed})",
                f"{gib(room.available)} GiB are available on {room.device}, of which "
                f"{gib(room.available - wrong.usable)} are kept free",
            ],
            detail=detail,
            try_=try_,
        )

    # the run itself

    def estimate_peak(self, profile: Profile, tokens: int) -> tuple[int, int]:
        """Estimated peak of this process after so many tokens in memory, and the memory there was at its start."""
        found = self.plan(profile, max(1, tokens), as_is=True)
        self.highest = max(self.highest, found.total)
        self.foretold = max(self.foretold, found.total - found.facts.beyond.middle)
        return self.highest, found.room.available

    def fits(self, profile: Profile) -> int:
        """Tokens for which memory has room under this profile."""
        return self.plan(profile, as_is=True).most

    def record(self, profile: Profile, stats: Stats) -> str:
        """Log a finished turn; returns a note if that did not work."""
        if not stats.peak or not self.foretold:
            return ""
        entry = RunEntry(
            kvcli=__version__,
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            run=self.run,
            model=self.name,
            profile=profile.name,
            profile_hash=profile.hash,
            device=choose(dict(self.found), profile.load.device).device,
            ctx=stats.context,
            build=base_memory.build(),
            predicted=self.foretold,
            measured=_taken(stats),
        )
        try:
            run_log.append(self.data, entry)
        except OSError as error:
            return f"what this run used could not be noted in {self.data / run_log.NAME}: {error.strerror}"
        return ""


def _taken(stats: Stats) -> int:
    """The peak; of a GPU what is gone since the run began, where its driver counts more than torch."""
    gone = stats.available - (stats.total - stats.used) if stats.used else 0
    return max(stats.peak, gone)


def gib(n: int) -> str:
    """Two figures behind the point where there is little, one elsewhere."""
    value = n / (1 << 30)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
