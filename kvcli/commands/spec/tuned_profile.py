"""The profile file of `kvcli spec tune`: its path and its content."""

from __future__ import annotations

from dataclasses import dataclass
from os import W_OK, access
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.common.run_setup import Setup, sources
from kvcli.commands.profiles import write_new
from kvcli.errors import BadInput, UsageError
from kvcli.settings.config import NAME, load_config
from kvcli.settings.small_file import toml_value

if TYPE_CHECKING:
    from kvcli.schemas.spec import SpecTuneDocument
    from kvcli.settings.profile import Profile


@dataclass(frozen=True)
class ProfileFile:
    """Name and file of a profile; no file = the profile is not written."""

    name: str
    path: Path | None


def place(setup: Setup, save: str | None, output: Path | None) -> ProfileFile:
    """Return name and file of the profile. Refuses a name or a file that exists."""
    world, where = setup.world, sources(setup.world)
    name = save or (output.stem if output is not None and output != Path("-") else "tuned")
    if not NAME.fullmatch(name):
        raise UsageError(f"{toml_value(name)} is not a profile name: use letters, digits, dots, - and _")
    if save is not None and output is None and name in load_config(where).profiles:
        raise BadInput(f"there is a profile {toml_value(name)} already", try_=[f"--save {name}-2", "-o FILE"])
    path = world.paths.config / "profiles" / f"{name}.toml" if save else None
    if output is not None:
        path = output if output == Path("-") else world.path(output)
    if path is not None and path != Path("-") and path.exists():
        raise BadInput(f"{where.shown(path)} exists already", try_=["another -o", "--save NAME"])
    folder = None if path is None or path == Path("-") else path.parent
    while folder is not None and not folder.exists():
        folder = folder.parent
    if folder is not None and not (folder.is_dir() and access(folder, W_OK)):
        raise BadInput(f"{where.shown(folder)} is not a writable folder", try_=["another -o", "--save NAME"])
    return ProfileFile(name, path)


def profile_text(base: Profile, found: SpecTuneDocument) -> str:
    """Return a profile that extends the one of the run, with settings of the command line and the environment."""
    from kvcli.bench.drafting import laid_over

    best = found.tried[0]
    about = f"tuned for {found.model}: {best.score:.2f}× plain decoding"
    lines = [
        f"# Written by kvcli spec tune: {best.name}, measured on {', '.join(found.workloads)} with "
        f"{found.context:,} tokens.",
        "schema = 1",
        f"extends = {toml_value(found.profile)}",
        f"description = {toml_value(about)}",
    ]
    tables = {"spec": laid_over(base, best.spec)}
    for dotted, origin in base.origins.items():
        table, _, key = dotted.partition(".")
        is_kept = table not in ("spec", "sample") or (table == "spec" and base.spec.method == best.spec["method"])
        if origin.startswith(("--", "env ")) and key and is_kept:
            tables.setdefault(table, {}).setdefault(key, base.values[dotted])
    for table, values in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {toml_value(list(v) if isinstance(v, tuple) else v)}" for key, v in values.items()]
    return "\n".join(lines) + "\n"


def write(setup: Setup, where: ProfileFile, found: SpecTuneDocument) -> SpecTuneDocument:
    """Write the profile if requested; returns the document with its path."""
    if where.path is None:
        return found
    text = profile_text(setup.profile, found)
    if where.path == Path("-"):
        setup.world.stdout.write(text)
        return found
    shown = sources(setup.world).shown(where.path)
    write_new(where.path, text, shown)
    return found.model_copy(update={"file": str(where.path)})
