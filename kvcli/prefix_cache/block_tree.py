"""A tree of blocks in a folder: texts that begin alike share the blocks of their beginning (a radix tree over ids).

A block's file is named after the block before it and after its own tokens with all that came before them, so the
folder itself says what follows what: there is no index that could disagree with it. A file is never changed, and at
most replaced by one that has more, so processes need no locks, and a kill at any moment leaves what was there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvcli.prefix_cache.block_file import LENGTH, CorruptFile, read_tokens

SIZE = 16  # bytes of a name: too many for anybody to find two texts with one
ROOT = "0" * 2 * SIZE
ENDS = ".kv"


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """A block that has the next tokens of a text."""

    path: Path
    start: int  # in the text
    n: int  # tokens that are the text's, of its first
    firsts: Mapping[int, int]  # by layer: the position from which on it has keys and values

    @property
    def end(self) -> int:
        return self.start + self.n


class BlockTree:
    """The blocks of one model as it is loaded now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, parent: str, own: str) -> Path:
        """Where a block lies."""
        return self.folder / f"{parent}-{own}{ENDS}"

    def match_prefix(self, ids: Sequence[int]) -> Iterator[BlockMatch]:
        """Blocks that hold the beginning of a text, in order."""
        text, after, parent = np.asarray(ids, np.int32), self.children(), ROOT
        for at in range(0, len(text), LENGTH):
            found = self._longest(after.get(parent, {}), parent, text, at)
            if found is None:
                return
            yield found
            if found.n < LENGTH:
                return
            parent = name_of(parent, text[at : found.end])

    def places(self, ids: Sequence[int]) -> Iterator[tuple[Path, slice]]:
        """Where the blocks of a text belong, the last of which may be a short one, and which tokens are theirs."""
        text, parent = np.asarray(ids, np.int32), ROOT
        for at in range(0, len(text), LENGTH):
            mine = slice(at, min(at + LENGTH, len(text)))
            own = name_of(parent, text[mine])
            yield self.path(parent, own), mine
            parent = own

    def drop_shorter(self, path: Path, ids: Sequence[int]) -> None:
        """Remove the short blocks that this one, of these tokens, goes on from."""
        parent, text = path.name.partition("-")[0], np.asarray(ids, np.int32)
        for own in self.children().get(parent, {}):
            other = self.path(parent, own)
            with suppress(CorruptFile, OSError):
                if other != path and len(its := read_tokens(other)[0]) < LENGTH and _alike(its, text) == len(its):
                    other.unlink()

    def children(self) -> dict[str, dict[str, None]]:
        """By block: those that follow it."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        with suppress(OSError):  # there is none
            for name in sorted(os.listdir(self.folder)):
                parent, _, own = name.removesuffix(ENDS).partition("-")
                if name.endswith(ENDS) and own:
                    found[parent][own] = None
        return found

    def _longest(self, after: dict[str, None], parent: str, text: np.ndarray, at: int) -> BlockMatch | None:
        """The block behind `parent` that has most of the text's tokens from `at` on, in all layers together."""
        own = name_of(parent, mine := text[at : at + LENGTH])
        best, most = None, (0, 0)
        for name in [own] if own in after else after:
            path = self.path(parent, name)
            try:
                ids, firsts = read_tokens(path)
                if name != name_of(parent, ids):
                    raise CorruptFile("it is named after other tokens")
            except CorruptFile:  # if it stayed, it would be taken for one that need not be written
                with suppress(OSError):
                    path.unlink()
                continue
            except OSError:
                continue
            n = _alike(ids, mine)
            if n and (its := (sum(max(0, n - first) for first in firsts.values()), n)) > most:
                best, most = BlockMatch(path, at, n, {layer: at + first for layer, first in firsts.items()}), its
        return best


def name_of(parent: str, ids: np.ndarray) -> str:
    """Of a block with these tokens behind `parent`."""
    return blake2b(ids.astype("<i4").tobytes(), digest_size=SIZE, key=parent.encode()).hexdigest()


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    return n if (same := a[:n] == b[:n]).all() else int(same.argmin())
