"""`kvcli models check`: check if and how a model runs here, and its memory, from the headers of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import Setup, at_hand, find
from kvcli.commands.models.draft_candidates import drafted, siblings
from kvcli.errors import BadModel, ExitStatus, UsageError

if TYPE_CHECKING:
    from kvcli.environment import Environment
    from kvcli.models.source import Source
    from kvcli.schemas.listings import CheckDocument

Online = Annotated[bool, o.option("--online", help="Download missing file headers from the Hugging Face hub.")]

CONTEXTS = (8192, 32768)  # tokens


def check(
    context: typer.Context,
    model: o.ModelName = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    allow_pickle: o.Pickle = False,
    online: Online = False,
) -> int:
    """Check whether a model runs here: precision, drafting and memory.

    Reads only config.json, the headers of the weight files and the names of
    the tokenizer. Uses the network only with --online, for these files. Exit
    code 4: the model is not supported; 5: it is supported, but does not fit.
    """
    world: Environment = context.obj
    if online and world.options.offline:
        raise UsageError("--online and --offline exclude each other", try_=["only one of them"])
    document = checked(Setup(world, model, o.load_flags(context.params)), online)
    if world.options.json:
        print_json(world, document)
    else:
        print_table(world, rows(document))
    return ExitStatus.OK if any(one.fits for one in document.memory) else ExitStatus.DOES_NOT_FIT


def checked(setup: Setup, online: bool) -> CheckDocument:
    """Check the model. Raises BadModel if it would not load."""
    from kvcli.commands.common.load_model import outlook_of
    from kvcli.engine.hf.meta_check import check_on_meta_device
    from kvcli.fit.available_memory import choose
    from kvcli.fit.plan import torch_dtype
    from kvcli.fit.report import notes_of
    from kvcli.models.draft_heads import found_in
    from kvcli.models.tokenizer import refuse_wordless
    from kvcli.schemas.listings import CheckDocument, CheckMemory

    profile = setup.profile()
    found = _found(setup, profile.load.allow_pickle, online)
    refuse_wordless(found)
    outlook = outlook_of(setup, found)
    kind = choose(dict(outlook.found), profile.load.device).kind
    said = check_on_meta_device(found, kind, profile.load.trust_remote_code)
    subject = outlook.subject
    limit = subject.shape.limit
    plans = [outlook.plan(profile, n) for n in sorted({min(n, limit) for n in CONTEXTS})]
    return CheckDocument(
        model=setup.name,
        path=str(found.path),
        family=found.family,
        is_decided=not said,
        context=None if subject.shape.is_endless else limit,
        numbers=torch_dtype(subject, profile),
        quant=plans[0].profile.load.quant,
        packed=subject.packing.method or None,
        unpacks=subject.packing.unpacks(kind),
        file_bytes=found.nbytes,
        weight_bytes=plans[0].run.weights.memory,
        device=plans[0].room.device,
        available_bytes=plans[0].room.available,
        profile=profile.name,
        memory=[CheckMemory(ctx=p.need.context, bytes=p.least, fits=p.fits) for p in plans],
        drafts=siblings(found, at_hand(setup.world)),
        heads=found_in(found),
        notes=[note for note in (said, *notes_of(outlook.subject, plans[0]), *dict.fromkeys(outlook.notes)) if note],
    )


def _found(setup: Setup, allow_pickle: bool, online: bool) -> Source:
    """Return the files of the model on this machine, or else with `online` those of the hub."""
    from kvcli.models import source
    from kvcli.models import source as hub

    try:
        return find(setup.world, setup.name, allow_pickle)
    except BadModel as error:
        if not hub.may_fetch(setup.entry.path, error):
            raise
        if not online:
            error.try_ = (f"kvcli models check {setup.name} --online downloads the headers", *error.try_)
            raise
    return source.look_up(setup.entry.path, setup.entry.revision or None)


def rows(document: CheckDocument) -> list[list[str]]:
    from kvcli.render.terminal.terminal import count, long_size

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
    from kvcli.render.terminal.terminal import long_size

    numbers = document.numbers if document.quant == "none" else f"{document.quant} and {document.numbers}"
    if document.packed and not document.unpacks:
        return f"{document.packed}, as in the file, and {numbers}"
    return f"{numbers}, from {long_size(document.file_bytes)} of {document.packed}" if document.packed else numbers
