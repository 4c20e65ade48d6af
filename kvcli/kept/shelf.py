"""The shelf: where sessions put what they have read, and look before they read.

One folder for each way of loading a model (identity.py), a tree of blocks in it (tree.py). It is a cache: all of it
can be made again, so what is damaged, foreign or cannot be written costs time and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.files import SPARE, private_folder, write_private
from kvcli.kept.block import Block, Damaged, read
from kvcli.kept.identity import identity
from kvcli.kept.tree import ENDS, Found, Tree
from kvcli.settings.small_file import Unfit, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.engine.lm import LM
    from kvcli.engine.session import Session

FEW = 32  # tokens: as many are read as fast as they are found
WORTH = 1 << 35  # weights times tokens: less is read in a moment, and not worth writing to a disk
FULL, LEFT = 1.0, 0.9  # of the room: what was not used for longest goes until so much is left
FIELDS, MODEL = "identity.json", "model"  # the file, and what a model is called in it
TICK = 0.001  # seconds
STOPPED = "what was read is not kept: stopped"


@dataclass(frozen=True, slots=True)
class Kept:
    """What keeping a text came to."""

    nbytes: int = 0  # newly written
    why_not: str = ""
    shelf: Shelf | None = None  # where there was none before


class Shelf:
    """What texts over one model have read, in a folder with room for `most` bytes."""

    def __init__(self, folder: Path, most: int, lm: LM, *, worth: int = WORTH) -> None:
        """`worth`: weights times tokens from which on a text is kept."""
        self.folder, self.most, self._lm, self._worth = folder, most, lm, worth
        self._fields = identity(lm)

    def fetch(self, session: Session, ids: Sequence[int]) -> int:
        """Give a session that is to read `ids` what lies here of their beginning; returns how many need no reading."""
        have = session.committed
        while self._fields and len(ids) - 1 - have >= FEW:
            found = list(self._tree(session).along(ids[:-1]))
            n = max((one.end for one in found if self._is_whole(found, have, one.end)), default=0)
            if n - have < FEW:
                if not have or not any(one.end - have >= FEW and self._is_whole(found, 0, one.end) for one in found):
                    break
                have = session.rewind(0)  # what a window has there ends before what lies here of it begins
                continue
            try:
                session.adopt(ids, n, self._past(session, found, have, n, ids))
            except Damaged:
                continue  # its file is gone: to what comes before it
            except OSError:  # it stays, and would be found again
                break
            _touch([one.path for one in found])
            break
        return session.committed

    def keep(self, session: Session, cancel: Callable[[], bool] = lambda: False) -> Kept:
        """Write what a session has stored and is not here yet, until `cancel()` says so between blocks."""
        n, tree = session.committed, self._tree(session)
        if not self._fields or n < FEW or n * self._lm.info.parameters < self._worth:
            return Kept()
        places = list(tree.places(session.ids[:n]))
        new = [(path, mine) for path, mine in places if not path.exists()]
        held, written = _held(session) if new else {}, 0
        size = sum(t[:, :n].nbytes for _, k, v in held.values() for t in (k, v))
        is_first = not self.folder.exists()
        try:
            private_folder(tree.folder)
            fresh = size * sum(mine.stop - mine.start for _, mine in new) // n
            if size > self.most or fresh > shutil.disk_usage(tree.folder).free - SPARE:
                return Kept(0, f"{size >> 20:,} MiB of keys and values have no room in {self.folder}")
            if not (tree.folder / FIELDS).exists():
                about = {MODEL: self._lm.info.id, **self._of(session)}
                write_private(tree.folder / FIELDS, json.dumps(about, indent=1) + "\n")
            for path, mine in new:
                if cancel():
                    return Kept(written, STOPPED)
                written += Block(session.ids[mine], dict(_cut(held, mine))).write(path)
                tree.drop_shorter(path, session.ids[mine])
            _touch([path for path, _ in places])
            self._make_room()
        except OSError as error:
            return Kept(written, f"what was read is not kept: {error.strerror or error}")
        return Kept(written, shelf=self if is_first else None)

    def differs(self, session: Session) -> list[str]:
        """Why nothing that was kept of a model so called serves it as it is loaded: in what the nearest differs."""
        mine, found = self._of(session), list[list[str]]()
        for other in self.folder.glob(f"*/{FIELDS}") if self._fields else ():
            with suppress(Unfit):
                its = parse_object(read_small(other, 1 << 20))
                other_than = {key: its.get(key) for key in mine if its.get(key) != mine[key]}
                if its.get(MODEL) == self._lm.info.id:
                    found.append([f"{key} was {value}, is {mine[key]}" for key, value in other_than.items()])
        return min(found, key=len, default=[])

    def _of(self, session: Session) -> dict[str, str]:
        return self._fields | {"kv.dtype": str(session.kv.dtype).removeprefix("torch.")}

    def _tree(self, session: Session) -> Tree:
        name = blake2b(json.dumps(self._of(session)).encode(), digest_size=12).hexdigest()
        return Tree(self.folder / name)

    def _is_whole(self, found: Sequence[Found], have: int, n: int) -> bool:
        """Whether these hold all that rows behind the first n tokens read, of which `have` are there."""
        return all(
            layer in one.layers
            for layer, first in self._firsts(have, n).items()
            for one in found
            if first < one.end and one.start < n
        )

    def _firsts(self, have: int, n: int) -> dict[int, int]:
        """By layer: the position from which on rows behind n tokens need what is kept. Behind `have` tokens there is no
        gap, whatever a window hides: a sum over slots that lie otherwise has other bits.
        """
        sees = zip(self._lm.shapes, self._lm.windows, strict=True)
        return {
            layer: have if have or window is None else max(0, n - window + 1)
            for layer, (shape, window) in enumerate(sees)
            if shape.shares is None
        }

    def _past(
        self, session: Session, found: Sequence[Found], have: int, n: int, ids: Sequence[int]
    ) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Layers, keys and values of tokens from `have` to n, and where these begin: a block at a time, as all of them
        would take the room of the past once more. Raises Damaged, OSError.
        """
        firsts = self._firsts(have, n)
        for one in found:
            first, last = max(one.start, have), min(one.end, n)
            if first >= last:
                continue
            try:
                block = read(one.path, self._lm.shapes, session.kv.dtype)
                if not one.layers <= block.kv.keys() or list(block.ids[: one.n]) != list(ids[one.start : one.end]):
                    raise Damaged("it is another one by now")
            except Damaged:
                one.path.unlink(missing_ok=True)
                raise
            mine = slice(first - one.start, last - one.start)
            for layer, (k, v) in block.kv.items():
                if one.end > firsts[layer]:
                    yield layer, k[:, mine], v[:, mine], first

    def _make_room(self) -> None:
        """Have what was not used for longest go, where there is too much."""
        stats = []
        for path in self.folder.glob(f"*/*{ENDS}"):
            with suppress(FileNotFoundError):  # another run made room
                stats.append((path, path.stat()))
        total = sum(stat.st_size for _, stat in stats)
        if total <= self.most * FULL:
            return
        for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns):
            path.unlink(missing_ok=True)
            total -= stat.st_size
            if total <= self.most * LEFT:
                return


Held = Mapping[int, tuple[int, Tensor, Tensor]]  # by layer: its first position, k [K, S, D], v [K, S, E]


def _held(session: Session) -> Held:
    """What lies in the store, where that is a run of positions."""
    found = {}
    for layer, shape in enumerate(session.lm.shapes):
        if shape.shares is None:
            slots = session.kv.slots(layer)
            first = int(slots.pos[0, 0])
            assert int(slots.pos[0, -1]) - first + 1 == slots.n_slots, "something was let go"
            found[layer] = first, slots.k, slots.v
    return found


def _cut(held: Held, mine: slice) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """The layers that still have all of these tokens."""
    for layer, (first, k, v) in held.items():
        if first <= mine.start:
            at = slice(mine.start - first, mine.stop - first)
            yield layer, (k[:, at], v[:, at])


def _touch(paths: Sequence[Path]) -> None:
    """As used now, those further on a little earlier: without what comes before it, a block serves nobody."""
    now = time.time()
    for i, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, (now - i * TICK, now - i * TICK))
