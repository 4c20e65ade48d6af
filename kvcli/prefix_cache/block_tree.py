"""Tree of blocks in a folder: sequences share the blocks of a common prefix (a radix tree over token ids).

A file name has the hash of the parent block, and the hash of the block's tokens and all before them. The folder itself
is the index, so no index can disagree with it. A file is never changed and at most replaced by one with more KV.
Processes need no locks, and a kill at any moment leaves a valid folder.
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

SIZE = 16  # bytes of a hash: enough to rule out collisions
ROOT = "0" * 2 * SIZE
ENDS = ".kv"


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """Block that holds the next tokens of a sequence."""

    path: Path
    start: int  # position in the sequence
    n: int  # first tokens of the block that match
    firsts: Mapping[int, int]  # by layer: the first position with KV

    @property
    def end(self) -> int:
        return self.start + self.n


class BlockTree:
    """Tree of the blocks of one model under one cache key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, parent: str, own: str) -> Path:
        """Return the file path of a block."""
        return self.folder / f"{parent}-{own}{ENDS}"

    def match_prefix(self, ids: Sequence[int]) -> Iterator[BlockMatch]:
        """Yield the blocks that hold a prefix of `ids`, in order."""
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
        """Yield the path and the tokens of each block of a sequence; the last block may be short."""
        text, parent = np.asarray(ids, np.int32), ROOT
        for at in range(0, len(text), LENGTH):
            mine = slice(at, min(at + LENGTH, len(text)))
            own = name_of(parent, text[mine])
            yield self.path(parent, own), mine
            parent = own

    def drop_shorter(self, path: Path, ids: Sequence[int]) -> None:
        """Remove the short blocks whose tokens are a prefix of this block's tokens `ids`."""
        parent, text = path.name.partition("-")[0], np.asarray(ids, np.int32)
        for own in self.children().get(parent, {}):
            other = self.path(parent, own)
            with suppress(CorruptFile, OSError):
                if other != path and len(its := read_tokens(other)[0]) < LENGTH and _alike(its, text) == len(its):
                    other.unlink()

    def children(self) -> dict[str, dict[str, None]]:
        """Return by block the blocks that follow it."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        with suppress(OSError):  # the folder does not exist
            for name in sorted(os.listdir(self.folder)):
                parent, _, own = name.removesuffix(ENDS).partition("-")
                if name.endswith(ENDS) and own:
                    found[parent][own] = None
        return found

    def _longest(self, after: dict[str, None], parent: str, text: np.ndarray, at: int) -> BlockMatch | None:
        """Return the block after `parent` with the most matching tokens from `at` on, summed over layers."""
        own = name_of(parent, mine := text[at : at + LENGTH])
        best, most = None, (0, 0)
        for name in [own] if own in after else after:
            path = self.path(parent, name)
            try:
                ids, firsts = read_tokens(path)
                if name != name_of(parent, ids):
                    raise CorruptFile("its name does not fit its tokens")
            except CorruptFile:  # a corrupt file must be deleted, else its block would never be written again
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
    """Return the name of a block with these tokens after `parent`."""
    return blake2b(ids.astype("<i4").tobytes(), digest_size=SIZE, key=parent.encode()).hexdigest()


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    return n if (same := a[:n] == b[:n]).all() else int(same.argmin())
