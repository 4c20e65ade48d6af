"""Suggestion of a model for a document if none is named: the bundled demo knows only its own reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcli.commands.common.inputs import STDIN, agrees, answer_to, tell
from kvcli.commands.common.run_setup import Setup, config_of, find
from kvcli.demo import BUNDLED as DEMO_MODELS
from kvcli.documents import BUNDLED, split_pages
from kvcli.errors import KvcliError, UsageError, writing
from kvcli.files import private_folder, write_output
from kvcli.models import catalog
from kvcli.models.shape import shape_of
from kvcli.render.terminal.terminal import Terminal, count, folded, long_size
from kvcli.settings.problems import bad_config
from kvcli.settings.small_file import parse_document, read_document, toml_value

if TYPE_CHECKING:
    from kvcli.environment import Environment
    from kvcli.fit.available_memory import AvailableMemory

# Writing of `default_model` to the user's config file, with the rest of it unchanged.

KEY = "default_model"


def offer_default(world: Environment, name: str, wanted: bool) -> None:
    """Make the model the default, if `wanted` or after a yes of the user."""
    if config_of(world).default_model == name:
        if wanted:
            tell(world, f"{KEY} is {name} already")
        return
    if not wanted and not agrees(world, "make it the default model?"):
        return
    file = world.paths.config / "config.toml"
    with writing(file):
        private_folder(file.parent)
        old = read_document(file, str(file)) if file.exists() else parse_document("", str(file))
        if old.problems:
            raise bad_config(old.problems)
        write_output(file, with_default(old.text, name))
    after = config_of(world).default_model
    tell(world, f"set {KEY} = {name} in {file}" + ("" if after == name else f", but another file sets {after}"))


def with_default(text: str, name: str) -> str:
    """Return the text of a config file with another default model."""
    mark = parse_document(text, "").marks.get((KEY,))
    if mark is None:  # a new key is the first line, which is in no table
        return f"{KEY} = {toml_value(name)}\n{text}"
    lines = text.split("\n")
    (first, start), (last, end) = mark.value, mark.end
    lines[first - 1 : last] = [lines[first - 1][: start - 1] + toml_value(name) + lines[last - 1][end - 1 :]]
    return "\n".join(lines)


FEW = 3  # models of this machine in a suggestion


@dataclass(frozen=True, slots=True)
class ModelSuggestion:
    """A suggested model."""

    model: str
    quant: str = "none"
    about: str = ""
    is_here: bool = True

    @property
    def typed(self) -> str:
        return f"-m {self.model}" + (f" --quant {self.quant}" if self.quant != "none" else "")

    @property
    def line(self) -> str:
        """One line: the option or the command to type, and the model's size."""
        if self.is_here:
            return f"  {self.typed}  {self.about}"
        return f"  kvcli models get {self.model}  {self.about}" + (f", --quant {self.quant}" * (self.quant != "none"))


def find_model(setup: Setup, names: Sequence[str], *, may_ask: bool = True) -> Setup:
    """Prevent the demo model from answering about other documents, unless the user named the demo; return the setup.

    A user who named the demo gets a note. Otherwise this raises, or on a terminal asks for a model and returns a setup
    with it. Reads no document, and imports nothing heavy. `names`: the documents as typed.
    """
    foreign = [name for name in names if split_pages(name)[0] not in BUNDLED]
    if not foreign or setup.entry.path != "demo":
        return setup
    if setup.is_named:
        tell(setup.world, f"the demo model knows only its own reports; it invents answers about {_called(foreign)}")
        return setup
    room, offers = suggest_models(setup)
    if not (may_ask and setup.world.may_ask and setup.world.is_tty("stderr") and not setup.world.options.json):
        raise _refusal(foreign, room, offers)
    chosen = _ask(foreign, room, offers, setup.world)
    if not chosen.is_here:
        from kvcli.commands.models.fetch import ensure_model

        ensure_model(setup.world, chosen.model)
    quant = {"load.quant": (chosen.quant, "--quant")} if chosen.quant != "none" else {}
    return replace(setup, model=chosen.model, is_typed=True, flags={**setup.flags, **quant})


def tell_toy(setup: Setup) -> None:
    """Tell a user without a document that the demo answers, unless the user named it."""
    if not setup.is_named and setup.entry.path == "demo":
        tell(setup.world, "the bundled demo model answers; it knows only its own reports (-m MODEL for another)")


def suggest_models(setup: Setup) -> tuple[AvailableMemory, list[ModelSuggestion]]:
    """Return the memory of this machine and models that fit: models on it first, then downloads in several sizes."""
    from kvcli.fit import available_memory

    found = available_memory.look()
    usable = found.usable
    here = _here(setup, usable)
    typed = setup.flags.get("load.quant")
    quants = (str(typed[0]),) if typed and typed[0] in catalog.PACKED else ("none", "int8")
    offers = here[:FEW]
    for known, quant in catalog.choices(usable, quants, found.kind):
        if not {known.id, known.source, known.name} & {offer.model for offer in here}:
            size = f"{long_size(known.download)}, needs {long_size(known.needs(quant))}"
            offers.append(
                ModelSuggestion(known.name, "none" if typed else quant, f"{size}, {known.licence}", is_here=False)
            )
    return found, offers


def _here(setup: Setup, usable: int) -> list[ModelSuggestion]:
    """Return models of the config files and the cache that are complete and fit, the largest first."""
    from kvcli.commands.models.model_names import known

    found = list[tuple[int, ModelSuggestion]]()
    for name, _ in known(setup.config, setup.world.paths.data):
        try:
            if setup.config.model(name).path in DEMO_MODELS:
                continue
            source = find(setup.world, name, allow_pickle=False)
            needs = catalog.needs(source.nbytes, shape_of(source.text_config, name))
        except KvcliError:  # the model is incomplete or unusable
            continue
        if needs <= usable:
            found.append((needs, ModelSuggestion(name, about=f"is on this machine, needs {long_size(needs)}")))
    return [offer for _, offer in sorted(found, key=lambda one: -one[0])]


def _called(names: Sequence[str]) -> str:
    return (STDIN if names[0] == "-" else names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _toy(names: Sequence[str]) -> str:
    return f"no model is named for {_called(names)}, and the bundled demo model knows only its own reports"


def _fitting(room: AvailableMemory, offers: Sequence[ModelSuggestion]) -> str:
    here = f"{long_size(room.available)} are available on {room.device}"
    return (
        f"{here}; models that fit, with download size and memory for {count(catalog.TOKENS)} tokens:"
        if offers
        else here
    )


def _refusal(names: Sequence[str], room: AvailableMemory, offers: Sequence[ModelSuggestion]) -> UsageError:
    middle = [offers[len(offers) // 2]] if offers else []
    then = [one.typed if one.is_here else f"kvcli models get {one.model}, then {one.typed}" for one in middle]
    return UsageError(
        _toy(names),
        code="no_model",
        lines=[_fitting(room, offers), *(offer.line for offer in offers)],
        detail={"available": room.available, "device": room.device, "models": [offer.typed for offer in offers]},
        try_=[
            *then,
            "kvcli models suggest",
            "-m FOLDER",
            "default_model in your config",
            "-m demo, to use the demo model anyway",
        ],
    )


def _ask(
    names: Sequence[str], room: AvailableMemory, offers: Sequence[ModelSuggestion], world: Environment
) -> ModelSuggestion:
    """Ask for a choice on the terminal; raises UsageError for any other answer."""

    err = Terminal.of(world, "stderr")
    rows = [_toy(names), _fitting(room, offers)]
    rows += [f"  {i}{offer.line}" for i, offer in enumerate(offers, 1)]
    err.lines(line for row in [*rows, "  d  use the demo model anyway"] for line in folded(row, err.width))
    said = answer_to(world, f"{f'1 to {len(offers)}, ' if offers else ''}d, or Enter to quit: ")
    if said == "d":
        return ModelSuggestion("demo")
    if said.isdecimal() and 1 <= int(said) <= len(offers):
        return offers[int(said) - 1]
    raise UsageError(_toy(names), code="no_model", try_=["-m MODEL", "kvcli models list"])
