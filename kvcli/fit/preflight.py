"""Check a run before and after: refuse a plan that does not fit, choose the context window, log the memory used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from kvcli.engine.stats import Stats
from kvcli.errors import DoesNotFit
from kvcli.fit import memory, run_log
from kvcli.fit.advice import MIB, changes
from kvcli.fit.available_memory import AvailableMemory, choose, rooms
from kvcli.fit.memory import BASE
from kvcli.fit.plan import MeasuredFacts, Plan, PlannedModel, plan, plan_on
from kvcli.schemas.fit import RunEntry
from kvcli.settings.profile import Profile
from kvcli.version import __version__


@dataclass
class Preflight:
    """One model on this machine, with the measured excess of its earlier runs."""

    subject: PlannedModel
    name: str
    data: Path
    found: Mapping[str, AvailableMemory] = field(default_factory=rooms)
    base: int = BASE  # bytes of the program, by base_memory.here() or elsewhere()
    notes: list[str] = field(default_factory=list)  # about files that could not be used
    highest: int = 0  # highest estimate for this process so far
    foretold: int = 0  # the same without the correction by earlier runs
    find: Callable[[str], PlannedModel] | None = None  # finds a draft model by name
    run: str = field(default_factory=lambda: uuid4().hex[:12])  # id of this process in the log
    is_noted: bool = False  # the note that the log cannot be written was returned

    def facts(self, device: str) -> MeasuredFacts:
        """Return the program's memory, and the excess of this model's earlier runs over their estimates."""
        runs, kind = run_log.read(self.data), device.partition(":")[0]
        return MeasuredFacts(self.base, run_log.measured_excess(runs, self.name, kind, memory.build()), self.find)

    def plan(self, profile: Profile, context: int | None = None, *, as_is: bool = False) -> Plan:
        """Plan the profile for a context, or for its own window; open settings are chosen so that the model fits a GPU.

        `as_is`: choose nothing, because the model is loaded already.
        """
        room = choose(dict(self.found), profile.load.device)
        return (plan if as_is else plan_on)(self.subject, profile, room, context, self.facts(room.device))

    def fitted(
        self, profile: Profile, others: Callable[[], Mapping[str, Profile]], *, force: bool = False, whole: bool = False
    ) -> tuple[Plan, str]:
        """Return the plan of the run, with a window that fits, and a note if that is less than the model's limit.

        Raises DoesNotFit; a setting that the user gave is never changed. `whole`: the user requested the model's limit.
        `force` accepts any plan.
        """
        limit, is_open = self.subject.shape.limit, profile.context.limit == "auto" and not whole
        asked = limit if profile.context.limit == "auto" else int(profile.context.limit)
        # a window beyond the model's limit is refused elsewhere, with the name of the setting
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
        """Return the error with its figures and with changes that would fit."""
        parts, room = wrong.need, wrong.room
        sizes = {
            "runtime": parts.base,
            "weights": parts.weights,
            "kv": parts.kv,
            "draft": parts.draft,
            "activations": parts.working,
            "loading": wrong.least - parts.running,
        }
        listed = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
        second = wrong.profile.second
        what = self.name if second is None else f"{self.name} and draft model {second.model}"
        tried = changes(self.subject, wrong, others, self.found, wrong.facts)
        detail = {"needed": wrong.least, "available": room.available, "usable": wrong.usable, **sizes}
        try_ = [*(change.type for change in tried), f"kvcli fit {self.name} --all", "--force tries it anyway"]
        if parts.short and wrong.fits_card:
            always, most = (parts.budget + parts.short) / MIB, parts.budget / MIB
            return DoesNotFit(
                f"memory.budget = {wrong.profile.memory.budget} is smaller than the protected tokens",
                lines=[f"{wrong.run.always} first and newest tokens take {always:,.2f} MiB, more than {most:,.2f} MiB"],
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

    # during and after the run

    def estimate_peak(self, profile: Profile, tokens: int) -> tuple[int, int]:
        """Return this process's estimated peak with `tokens` in the KV cache, and the memory available at its start."""
        found = self.plan(profile, max(1, tokens), as_is=True)
        self.highest = max(self.highest, found.total)
        self.foretold = max(self.foretold, found.total - found.facts.beyond.middle)
        return self.highest, found.room.available

    def fits(self, profile: Profile) -> int:
        """Return the most tokens that fit under this profile."""
        return self.plan(profile, as_is=True).most

    def record(self, profile: Profile, stats: Stats) -> str:
        """Log a finished turn; return a note the first time that this fails."""
        if not stats.peak or not self.foretold:
            return ""
        entry = RunEntry(
            kvcli=__version__, date=datetime.now().astimezone().isoformat(timespec="seconds"), run=self.run,
            model=self.name, profile=profile.name, profile_hash=profile.hash,
            device=choose(dict(self.found), profile.load.device).device, ctx=stats.context, build=memory.build(),
            predicted=self.foretold, measured=_taken(stats),
        )  # fmt: skip
        try:
            run_log.append(self.data, entry)
        except OSError as error:
            was, self.is_noted = self.is_noted, True
            if was:
                return ""
            return f"the memory use of this run could not be saved in {self.data / run_log.NAME}: {error.strerror}"
        return ""


def _taken(stats: Stats) -> int:
    """Return the peak; on a GPU the drop of free memory since the run began, if the driver counts more than torch."""
    gone = stats.available - (stats.total - stats.used) if stats.used else 0
    return max(stats.peak, gone)


def gib(n: int) -> str:
    """Format bytes as GiB: two decimals below 10, one above."""
    value = n / (1 << 30)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
