"""Where `kvcli spec tune` writes its profile, and what stands in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.profiles import write_new
from kvcli.commands.setup import sources
from kvcli.config import NAME, load_config
from kvcli.errors import BadInput, UsageError
from kvcli.toml_places import toml_value

if TYPE_CHECKING:
    from kvcli.bench.drafting import Rival
    from kvcli.commands.setup import Setup
    from kvcli.schemas.spec import SpecTuneDocument


@dataclass(frozen=True)
class Place:
    """A profile's name and file; no file = it is not written."""

    name: str
    path: Path | None


def place(setup: Setup, save: str | None, output: Path | None) -> Place:
    """Refuses a name or a file that is taken."""
    world, where = setup.world, sources(setup.world)
    name = save or (output.stem if output is not None and output != Path("-") else "tuned")
    if not NAME.fullmatch(name):
        raise UsageError(f"{toml_value(name)} is not a profile name: use letters, digits, dots, - and _")
    if save is not None and output is None and name in load_config(where).profiles:
        raise BadInput(f"there is a profile {toml_value(name)} already", try_=[f"--save {name}-2", "-o FILE"])
    path = output if output is not None else world.paths.config / "profiles" / f"{name}.toml" if save else None
    if path is not None and path != Path("-") and (world.cwd / path).exists():
        raise BadInput(f"{where.shown(path)} exists already", try_=["another -o", "--save NAME"])
    return Place(name, path if path is None or path == Path("-") else world.cwd / path)


def profile_text(name: str, base: str, best: Rival, found: SpecTuneDocument) -> str:
    """A profile that extends the one it was tuned under."""
    about = f"tuned for {found.model}: {best.score:.2f} times plain decoding"
    lines = [
        f"# Written by kvcli spec tune: {best.name}, measured on {', '.join(found.workloads)} with "
        f"{found.context:,} tokens.",
        "schema = 1",
        f"extends = {toml_value(base)}",
        f"description = {toml_value(about)}",
        "",
        "[spec]",
        *(f"{key} = {toml_value(list(v) if isinstance(v, tuple) else v)}" for key, v in best.spec.items()),
    ]
    return "\n".join(lines) + "\n"


def write(setup: Setup, where: Place, best: Rival, found: SpecTuneDocument) -> SpecTuneDocument:
    """Write the profile if that was asked for; the document says where."""
    if where.path is None:
        return found
    text = profile_text(where.name, found.profile, best, found)
    if where.path == Path("-"):
        setup.world.stdout.write(text)
        return found
    shown = replace(sources(setup.world)).shown(where.path)
    where.path.parent.mkdir(parents=True, exist_ok=True)
    write_new(where.path, text, shown)
    return found.model_copy(update={"file": str(where.path)})
