"""Loading of a model from settings, with a message on the screen meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import BadConfig, BadModel, DoesNotFit, KvcliError

if TYPE_CHECKING:
    from kvcli.api import Turn
    from kvcli.chat.model import TextSession
    from kvcli.commands.common.run_setup import Setup
    from kvcli.fit.preflight import Preflight
    from kvcli.models.source import Source
    from kvcli.render.terminal.screen import Screen
    from kvcli.settings.profile import Profile

# Memory check before a model is loaded: its estimated memory, and the context window that fits.


@dataclass(frozen=True, slots=True)
class MemoryWishes:
    """Options of the user about fitting into memory."""

    force: bool = False  # load even if the estimate does not fit
    whole: bool = False  # --ctx max: the model's own limit or nothing


@dataclass
class CheckedRun:
    """A run that fits into memory by the estimate, or has no estimate."""

    profile: Profile
    estimate: int = 0  # bytes with a full context window; 0 = no estimate
    notes: tuple[str, ...] = ()
    outlook: Preflight | None = None
    _is_noted: bool = False  # the note that the log cannot be written was shown

    @property
    def estimate_memory(self) -> Callable[[Profile, int], tuple[int, int]] | None:
        return self.outlook.estimate_peak if self.outlook is not None else None

    @property
    def fits(self) -> Callable[[Profile], int] | None:
        return self.outlook.fits if self.outlook is not None else None

    def record(self, profile: Profile, turn: Turn) -> str:
        """Log the memory of a turn with its estimate; returns a note the first time that logging fails."""
        if self.outlook is None:
            return ""
        note = self.outlook.record(profile, turn.stats)
        was, self._is_noted = self._is_noted, self._is_noted or bool(note)
        return "" if was else note


def outlook_of(setup: Setup, found: Source) -> Preflight:
    """Return the preflight of this model, for a command that loads nothing."""
    from kvcli.fit import memory
    from kvcli.fit.plan import subject_of
    from kvcli.fit.preflight import Preflight

    paths = setup.world.paths
    base = memory.elsewhere(paths.cache)
    return Preflight(subject_of(found), setup.name, paths.data, base=base, find=setup.sizes())


def prepare(setup: Setup, profile: Profile, wanted: MemoryWishes, tell: Callable[[str], None]) -> CheckedRun:
    """Check that the run fits. Raises BadModel for a missing model, DoesNotFit, and BadConfig for a too large window.

    A model of unknown size has no estimate; loading it reports the problem.
    """
    found = setup.fetch(profile, tell)
    from kvcli.commands.common.run_setup import refuse_beyond
    from kvcli.commands.fit import others_of
    from kvcli.fit import memory
    from kvcli.fit.plan import chosen, subject_of, told
    from kvcli.fit.preflight import Preflight

    try:
        its = setup.sizes(tell)
        outlook = Preflight(subject_of(found), setup.name, setup.world.paths.data, base=memory.here(), find=its)
        refuse_beyond(profile, outlook.subject.shape.limit, setup.name)
        plan, note = outlook.fitted(profile, lambda: others_of(setup), force=wanted.force, whole=wanted.whole)
    except BadModel:
        return CheckedRun(profile)
    except (DoesNotFit, BadConfig):
        raise
    except KvcliError as error:
        return CheckedRun(profile, notes=(f"no memory estimate: {error.message}",))
    setup.settled = dict(chosen(plan)) | ({"context.limit": plan.need.context} if note else {})
    notes = (*outlook.notes, *filter(None, (note, *told(plan))))
    return CheckedRun(setup.narrowed(profile), plan.total, notes, outlook)


def load_model(setup: Setup, profile: Profile, wanted: MemoryWishes, screen: Screen) -> tuple[CheckedRun, TextSession]:
    """Return the checked run, perhaps with a smaller context window, and a text session. Raises DoesNotFit."""
    from kvcli.commands.common.exits import insisting
    from kvcli.render.turn.turn_view import busy_word

    with insisting(), busy_word(screen, f"loading {setup.name}") as busy:

        def tell(text: str) -> None:  # for a download, which draws its own progress bars
            if busy is not None:
                busy.stop()
            screen.note(text)

        run = prepare(setup, profile, wanted, tell)
        model = setup.load(run.profile, tell)
    run.notes = (*setup.overruled(run.profile), *run.notes, *(model.info.details if screen.verbose else ()))
    run.profile = model.profile  # the profile adapted to this model
    model.foretell, model.fits = run.estimate_memory, run.fits
    return run, model.open()
