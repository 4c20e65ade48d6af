"""The conversations that a folder keeps: the latest, one by its name, and a list to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from os.path import expanduser
from pathlib import Path

from kvcli.chat.transcript import newest, open_chat
from kvcli.errors import BadInput
from kvcli.schemas.chat import ChatDocument

SHOWN = 10  # of a list


def recent(folder: Path) -> Iterator[tuple[Path, ChatDocument | None]]:
    """The latest ones with what they hold; None for a damaged one."""
    for path in islice(newest(folder), SHOWN):
        try:
            yield path, open_chat(path).saved
        except BadInput:
            yield path, None


def find(folder: Path, name: str | None, cwd: Path) -> Path:
    """The file of a conversation: a path, the beginning of a name, a number of the list; the latest for None."""
    if name and ("/" in name or name.endswith(".json")):
        return cwd / expanduser(name)
    files = newest(folder)
    if name and name.isdecimal() and len(name) < 3:
        found = files[int(name) - 1 : int(name)] if int(name) else []
    else:
        found = [path for path in files if path.stem.startswith(name)] if name else files[:1]
    if len(found) == 1:
        return found[0]
    if name is None or not files:
        raise BadInput(f"no conversation is kept in {folder}", code="no_chat", try_=["kvcli chat"])
    lines, try_ = [path.stem for path in (found or files)[:SHOWN]], ["kvcli chat --continue, for the latest"]
    if found:
        raise BadInput(f"several conversations begin with {name}", code="no_chat", lines=lines, try_=try_)
    raise BadInput(f"no conversation begins with {name}", code="no_chat", lines=lines, try_=try_)
