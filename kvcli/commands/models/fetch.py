"""Download and removal of models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.run_setup import config_of, entry_of, find
from kvcli.environment import Environment
from kvcli.errors import BadModel, UsageError
from kvcli.files import check_room
from kvcli.models.catalog import BY_NAME, CatalogModel, Fetching, PackagedFile, file_of, is_whole, terms_of
from kvcli.models.hub_names import hub_id
from kvcli.models.source import cached_folder, cached_ids, may_fetch, verify
from kvcli.render.terminal.terminal import long_size


def ensure_model(world: Environment, name: str, *, accepts: bool = False) -> Path:
    """Download a model if it is missing, and return its folder or file. Raises KvcliError."""
    if not name:
        raise UsageError("no model is named", try_=["kvcli models suggest"])
    known = BY_NAME.get(name)
    if known is not None:
        known.refuse_unread()
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
    name = known.source if known else name  # names of the list override those of a config
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
        check_room(cached_folder(known.source.partition(":")[0]), known.download, f"downloading {name}")
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
    whence = "as pip packages" if known.package else f"{known.source} from huggingface.co"
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
        id = (known.source if known else hub_id(name)).partition(":")[0]  # without the name of one of several files
        found = [cached_folder(id)] if id in cached_ids() else []
    return [path for path in found if path.exists()]
