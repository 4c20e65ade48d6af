"""`kvcli cache`: show the size of cached files, and remove them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcli.commands.common.options import command, option
from kvcli.commands.common.output import print_json, print_table
from kvcli.environment import Environment
from kvcli.errors import BadInput, UsageError
from kvcli.models.catalog import NAME
from kvcli.render.terminal.terminal import long_size

app = typer.Typer(add_completion=False, help="Cached files: show their size, and remove them.")

KINDS = {
    "summaries": "results of document parts, to continue an interrupted summary",
    "kv": "prefix cache: KV cache of earlier prompts, so that they are not computed again",
    "calibration": "measured speed of this machine and of models on it",
    "quality": "answers of bench --quality, to continue an interrupted run",
    "gguf": "models converted from GGUF files, and GGUF files for bench --baseline llama.cpp",
    "hashes": "hashes of model files",
    "ocr": "text recognized on scanned pages, so that it is not recognized again",
    "kvpress": "Python environment of kvpress, for tests/recipes/bench.py",
}  # name of a folder -> its content
BY_NAME = {  # in the data folder; they do more than speed up later runs
    "chats": "chat files that /save writes (kvcli chats manages the saved chats themselves)",
    "models": "models that `kvcli models get` downloaded from packages",
}
DAY = 86_400.0  # seconds

Kinds = Annotated[
    list[str] | None, typer.Argument(metavar="KIND", help="summaries, gguf, ... Default: all except chats and models.")
]
Days = Annotated[int, option("--older-than", metavar="DAYS", help="Only files not used for DAYS days. Default 30.")]
Dry = Annotated[bool, option("--dry-run", help="List the files, and remove none.")]


@dataclass(frozen=True, slots=True)
class RemovableEntry:
    """A file or a whole environment that can be removed."""

    path: Path
    kind: str
    nbytes: int
    used: float  # time of the last use, seconds since 1970


@command(app)
def info(world: Environment) -> None:
    """Show number and size of the cached files of each kind."""
    _show(world, list(KINDS), _kept(world.paths.cache))


@command(app)
def prune(world: Environment, kinds: Kinds = None, older_than: Days = 30, dry_run: Dry = False) -> None:
    """Remove cached files not used for 30 days. kvcli makes them again if needed; chats and models only if named."""
    if unknown := [kind for kind in kinds or [] if kind not in KINDS | BY_NAME]:
        try_ = [f"kvcli cache prune {kind}" for kind in KINDS | BY_NAME]
        raise UsageError(f"the cache has no kind {unknown[0]!r}", try_=try_)
    kept = _kept(world.paths.cache)
    if "chats" in (kinds or ()):
        kept += [look(path, "chats") for path in world.paths.chats.glob("*.json")]
    if NAME in (kinds or ()):
        kept += [look(path, NAME) for path in (world.paths.data / NAME).glob("[!.]*")]
    ages = {one: max(0.0, time.time() - one.used) for one in kept if one.kind in (kinds or KINDS)}
    old = [one for one, age in ages.items() if age >= older_than * DAY]
    for one in () if dry_run else old:
        remove_path(one.path)
    _show(world, kinds or list(KINDS), kept, old, "would be removed" if dry_run else "removed")


def _kept(cache: Path) -> list[RemovableEntry]:
    found = []
    for kind in KINDS:
        folder = cache / kind
        entries = [folder] if kind == "kvpress" and folder.is_dir() else sorted(folder.glob("[!.]*"))
        for path in entries:
            with suppress(FileNotFoundError):  # another kvcli removed the file
                found.append(look(path, kind))
    return found


def look(path: Path, kind: str) -> RemovableEntry:
    # files only, because listing a folder updates its access time
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    stats = [p.lstat() for p in files]
    used = max((max(s.st_mtime, s.st_atime) for s in stats), default=0.0)
    return RemovableEntry(path, kind, sum(s.st_size for s in stats), used)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError):  # another process was faster
                path.unlink()
    except OSError as error:
        raise BadInput(f"cannot remove {path}: {error.strerror or error}", code="file_unwritable") from None


def _show(
    world: Environment,
    kinds: Sequence[str],
    kept: list[RemovableEntry],
    gone: Sequence[RemovableEntry] = (),
    goes: str = "",
) -> None:
    """Print the entries by kind, with those that `goes` names: removed, or to be removed."""
    from kvcli.schemas.listings import CacheDocument, CacheKind

    def of(kind: str) -> CacheKind:
        own, freed = [one for one in kept if one.kind == kind], [one for one in gone if one.kind == kind]
        return CacheKind(
            kind=kind,
            about=(KINDS | BY_NAME)[kind],
            entries=len(own),
            bytes=sum(one.nbytes for one in own),
            freed_entries=len(freed),
            freed_bytes=sum(one.nbytes for one in freed),
        )

    document = CacheDocument(folder=str(world.paths.cache), removed=goes == "removed", kinds=[of(k) for k in kinds])
    if world.options.json:
        print_json(world, document)
        return
    rows = [["kind", "entries", "size", goes, "content"]]
    rows += [[k.kind, str(k.entries), long_size(k.bytes), long_size(k.freed_bytes), k.about] for k in document.kinds]
    print_table(world, rows if goes else [[*row[:3], row[4]] for row in rows])
