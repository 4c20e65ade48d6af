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
import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import BLOCK
from kvcli.kv.slots import LayerShape
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State, tree_of
from kvcli.prefix_cache import snapshot_file
from kvcli.prefix_cache.codec import Codec
from kvcli.prefix_cache.snapshot_file import ENDS, CorruptFile
from kvcli.prefix_cache.tensor_codec import coded_state, decoded_state
from kvcli.settings.small_file import open_regular

SIZE = 16  # bytes of a hash: enough to rule out collisions
ROOT = "0" * 2 * SIZE
HEADER = 1 << 20  # most bytes of a block besides its numbers


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
                seen = path.stat()
                ids, firsts = read_tokens(path)
                if name != name_of(parent, ids):
                    raise CorruptFile("its name does not fit its tokens")
            except CorruptFile:  # a corrupt file must be deleted, else its block would never be written again
                _delete(path, seen)
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


# Block: KV of consecutive tokens in one file, which is valid as a whole or rejected.
#
# It is a snapshot (kv/snapshot.py): the tokens, and by layer that stores KV "k", "v", and in "gone" how many blocks of
# batch-invariant kernels a sliding window dropped before them. It is used only if its sizes are those of the loaded
# model, and only under the name it was written for: the folder name is a hash of the cache key, and the file name
# begins with the parent block's hash, because the same tokens after another parent have other KV.

LENGTH = 256  # tokens of a full block
GONE = "gone"


@dataclass(frozen=True, slots=True)
class Block:
    """Block of consecutive tokens, with their KV by layer."""

    ids: Sequence[int]  # n
    # by layer: k [K, m, D], v [K, m, E] of the last m tokens; a sliding window dropped the others
    kv: Mapping[int, tuple[Tensor, Tensor]]

    def part(self, layer: int, at: slice) -> tuple[Tensor, Tensor]:
        """Return KV of a part of the tokens, as views. Raises CorruptFile for tokens without KV."""
        k, v = self.kv.get(layer, (None, None))
        if k is None or v is None or (first := at.start - len(self.ids) + k.shape[1]) < 0:
            raise CorruptFile("it was replaced since it was found")
        return cut(k, v, slice(first, first + at.stop - at.start))

    def write(self, path: Path, codec: Codec) -> int:
        """Write a private file atomically; return its bytes. No fsync: a file damaged by a power cut is recomputed."""
        tree: dict[str, Tensor | State] = {_ids_of(path): torch.tensor(self.ids, dtype=torch.int32)}  # the first
        for layer, (k, v) in self.kv.items():
            gone = (len(self.ids) - k.shape[1]) // BLOCK
            tree[str(layer)] = {GONE: gone, "k": k, **({} if v is k else {"v": v})}
        return snapshot_file.write(path, coded_state(tree, codec))


def read(path: Path, shapes: Sequence[LayerShape], dtype: torch.dtype) -> Block:
    """Read the block of a model with layers of these shapes and this dtype. Raises CorruptFile, OSError."""
    own = [(i, shape) for i, shape in enumerate(shapes) if shape.shared_from is None]
    most = LENGTH * sum(s.numbers for _, s in own) * dtype.itemsize + 4 * LENGTH + HEADER
    try:
        found = SnapshotReader(decoded_state(snapshot_file.read(path, most=most)), LENGTH)
        ids, kv = found.tensor(_ids_of(path), torch.int32, None), {}
        for layer, shape in ((i, shape) for i, shape in own if str(i) in found):
            part = found.part(str(layer))
            sizes = shape.n_kv_heads, len(ids) - part.number(GONE, (len(ids) - 1) // BLOCK) * BLOCK
            k = part.tensor("k", dtype, *sizes, shape.k_dim)
            kv[layer] = k, k if shape.rank else part.tensor("v", dtype, *sizes, shape.v_dim)
    except SnapshotMismatch as error:
        raise CorruptFile(str(error)) from None
    return Block(ids.tolist(), kv)


def load(
    path: Path, ids: Sequence[int], parts: Mapping[int, slice], shapes: Sequence[LayerShape], dtype: torch.dtype
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read KV of these parts, by layer, of a block that begins with tokens `ids`; delete it if it is corrupt.

    Raises CorruptFile, also if it lacks these parts and is whole, or OSError, after which the file remains."""
    seen = path.stat()
    try:
        block = read(path, shapes, dtype)
        if list(block.ids[: len(ids)]) != list(ids):
            raise CorruptFile("it was replaced since it was found")
    except CorruptFile:
        _delete(path, seen)
        raise
    return {layer: block.part(layer, part) for layer, part in parts.items()}


def _delete(path: Path, seen: os.stat_result) -> None:
    """Delete a corrupt file, unless another process has replaced it since it was `seen`."""
    with suppress(OSError):
        if (now := path.stat()).st_ino == seen.st_ino and now.st_mtime_ns == seen.st_mtime_ns:
            path.unlink()


def read_tokens(path: Path) -> tuple[np.ndarray, Mapping[int, int]]:
    """Read tokens, int32 [n], and by layer the first one with KV, without the KV. Raises CorruptFile, OSError."""
    try:
        with open_regular(path) as file:
            (own, *_), numbers, _ = snapshot_file.header_of(file)
            if own.name != _ids_of(path) or own.dtype != torch.int32 or not 0 < own.nbytes <= 4 * LENGTH:
                raise CorruptFile("its token ids are invalid")
            ids = np.frombuffer(file.read(own.nbytes), "<i4")
            gone = SnapshotReader(tree_of(numbers), LENGTH)
            firsts = {int(i): gone.part(i).number(GONE, (len(ids) - 1) // BLOCK) * BLOCK for i in gone.tree}
    except snapshot_file.UNREADABLE as error:
        raise snapshot_file.blamed(error) from None
    return ids, firsts


def cut(k: Tensor, v: Tensor, at: slice) -> tuple[Tensor, Tensor]:
    """Return a part of the tokens of k [K, n, D] and v [K, n, E]: views, one if they are equal (MLA)."""
    its = k[:, at]
    return its, its if v is k else v[:, at]


def _ids_of(path: Path) -> str:
    """Return the name of the tokens of this file's block in the snapshot."""
    return f"ids of {path.parent.name}:{path.name}"
