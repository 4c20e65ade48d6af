"""Loading of a model from settings, with a message on the screen meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcli.commands.common.run_setup import Setup, refuse_beyond
from kvcli.errors import BadConfig, BadModel, DoesNotFit, KvcliError
from kvcli.settings.values import BY, DEFAULT

if TYPE_CHECKING:
    from kvcli.api import Turn
    from kvcli.chat.text_session import TextSession
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


@dataclass(frozen=True)
class CheckedRun:
    """Findings about a run: the profile with values that fit into memory, and the estimate, if there is one."""

    setup: Setup
    profile: Profile
    settled: Mapping[str, object] = field(default_factory=dict)  # key -> value that fits, if nothing sets the key
    limit: int = 0  # context limit of the loaded model in tokens; 0 before it is loaded
    estimate: int = 0  # bytes with a full context window; 0 = no estimate
    notes: tuple[str, ...] = ()  # for the user, once the model is loaded
    outlook: Preflight | None = None

    def record(self, profile: Profile, turn: Turn) -> str:
        """Log the memory of a turn with its estimate; returns a note the first time that logging fails."""
        world = self.setup.world  # the peak of shared weights is another, and of split ones
        if self.outlook is None or world.shared is not None or not world.keeps:
            return ""
        return self.outlook.record(profile, turn.stats)

    # for an interactive chat, whose settings may change; files may have changed since it began

    def names(self) -> list[str]:
        """Return the names of profiles."""
        return replace(self.setup).config.names()

    def models(self) -> list[str]:
        """Return the names of models."""
        from kvcli.commands.models.model_names import known

        return [name for name, _ in known(self.setup.config, self.setup.world.paths.data)]

    def keys(self) -> list[str]:
        """Return the keys that /set can complete."""
        return list(self.setup.profile.values)

    def resolve(self, name: str, sets: Sequence[str]) -> Profile:
        """Return another profile, with values that fit. Settings of the chat override the flags that it began with."""
        profile = replace(self.setup).resolve(name, sets)
        refuse_beyond(profile, self.limit, self.setup.name)
        return narrowed(profile, self.settled)


def narrowed(profile: Profile, settled: Mapping[str, object]) -> Profile:
    """Return the profile with values that fit (window, prefill order, chunks, weights) for keys not set."""
    changes: dict[str, object] = {}
    judges = {"evicts", "prunes"} & profile.effects.keys()
    for key, value in settled.items():
        is_open = profile.values[key] == "auto" or profile.origins[key] == DEFAULT.name
        packs_anew = key == "load.quant" and profile.origins[key].startswith("built-in ")
        is_open = is_open or (packs_anew and value == "none")  # weights that are quantized in the file
        if is_open and not (judges and key == "prefill.order"):
            changes[key] = value
    return profile.changed(changes, BY) if changes else profile


def outlook_of(setup: Setup, found: Source, tell: Callable[[str], None] | None = None) -> Preflight:
    """Return the preflight of this model. `tell`: the command will load it, in this process, and may download a draft
    model."""
    from kvcli.fit import memory
    from kvcli.fit.plan import subject_of
    from kvcli.fit.preflight import Preflight

    paths = setup.world.paths
    base = memory.elsewhere(paths.cache) if tell is None else memory.here()
    outlook = Preflight(subject_of(found), setup.name, paths.data, base=base, find=setup.sizes(tell))
    if (shared := setup.world.shared) is not None:  # weights are counted once, as if this process had loaded them
        outlook.base = shared.base
        if shared.given.path == found.path:
            room = outlook.found["cpu"]
            outlook.found = {**outlook.found, "cpu": replace(room, available=room.available + shared.nbytes)}
    return outlook


def prepare(setup: Setup, profile: Profile, wanted: MemoryWishes, tell: Callable[[str], None]) -> CheckedRun:
    """Check that the run fits. Raises BadModel for a missing model, DoesNotFit, and BadConfig for a too large window.

    A model of unknown size has no estimate; loading it reports the problem.
    """
    found = setup.fetch(profile, tell)
    from kvcli.commands.fit import others_of
    from kvcli.fit.plan import chosen, told

    try:
        outlook = outlook_of(setup, found, tell)
        refuse_beyond(profile, outlook.subject.shape.limit, setup.name)
        plan, note = outlook.fitted(profile, lambda: others_of(setup), force=wanted.force, whole=wanted.whole)
    except BadModel:
        return CheckedRun(setup, profile)
    except (DoesNotFit, BadConfig):
        raise
    except KvcliError as error:
        return CheckedRun(setup, profile, notes=(f"no memory estimate: {error.message}",))
    settled = dict(chosen(plan)) | ({"context.limit": plan.need.context} if note else {})
    if not setup.world.keeps:  # one of several processes: each has measured the free memory
        from kvcli.engine.ranks import from_first

        settled = from_first(settled)
    notes = (*outlook.notes, *filter(None, (note, *told(plan))))
    return CheckedRun(setup, narrowed(profile, settled), settled, 0, plan.total, notes, outlook)


def load_model(setup: Setup, profile: Profile, wanted: MemoryWishes, screen: Screen) -> tuple[CheckedRun, TextSession]:
    """Return the checked run, perhaps with a smaller context window, and a text session. Raises DoesNotFit."""
    from kvcli.commands.common.exits import insisting
    from kvcli.render.turn.turn_view import busy_word

    if (elsewhere := setup.open_elsewhere(profile)) is not None:
        return CheckedRun(setup, profile, limit=elsewhere.limit, notes=tuple(elsewhere.cautions)), elsewhere
    with insisting(), busy_word(screen, f"loading {setup.name}") as busy:

        def tell(text: str) -> None:  # for a download, which draws its own progress bars
            if busy is not None:
                busy.stop()
            screen.note(text)

        run = prepare(setup, profile, wanted, tell)
        model = setup.load(run.profile, tell)
    notes = (*setup.overruled(run.profile), *run.notes, *(model.info.details if screen.verbose else ()))
    if run.outlook is not None:
        model.foretell, model.fits = run.outlook.estimate_peak, run.outlook.fits
    text_session = model.open()
    notes += (*text_session.cautions, *model.info.notes)
    # the profile as it was adapted to this model
    return replace(run, profile=model.profile, notes=notes, limit=model.info.limit), text_session
