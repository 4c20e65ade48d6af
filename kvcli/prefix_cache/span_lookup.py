"""Find token spans of a prompt in saved sequences with another prefix, by content.

The first and the last tokens of each block are looked up in the prompt by rolling hashes. Only sequences with such a
block are compared token by token, and only a few of them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvcli.prefix_cache.block_tree import LENGTH, ROOT, BlockTree, load, name_of, read_tokens
from kvcli.prefix_cache.matching_spans import (
    Found,
    Held,
    MatchingSpan,
    SpanSource,
    SpanSourceGone,
    find_matching_spans,
    rolling_hashes,
)
from kvcli.prefix_cache.snapshot_file import ENDS, CorruptFile

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

# Disk quota of a prefix cache: the least recently used files are evicted before new ones are written.

LEFT = 0.9  # share of the quota to which files are evicted when it is exceeded
TICK = 0.001  # seconds


def evict_lru(folder: Path, most: int, fresh: int = 0) -> None:
    """Evict the least recently used files of a folder if `fresh` more bytes would exceed `most`."""
    stats = []
    for path in folder.glob(f"*/*{ENDS}"):
        with suppress(FileNotFoundError):  # evicted by another process
            stats.append((path, path.stat()))
    total = sum(stat.st_size for _, stat in stats) + fresh
    if total <= most:
        return
    for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns):
        if total <= max(fresh, int(most * LEFT)):
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


def mark_used(paths: Sequence[Path]) -> None:
    """Mark files as used now, later blocks slightly earlier, because they are useless without those before."""
    now = time.time()
    for i, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, (now - i * TICK, now - i * TICK))


MOST = 1 << 14  # blocks that are searched, those nearest to the beginning of their sequence first
TEXTS = 8  # sequences that one prompt is compared with


@dataclass(frozen=True, slots=True)
class BlockIndexEntry:
    """Index entry of a block. Its file may be replaced only by one with more KV."""

    path: Path
    parent: str
    ids: np.ndarray  # int32 [n]
    first: int  # first token with KV in all layers, also after it; n if a sliding window dropped all of a layer

    @property
    def shown(self) -> np.ndarray:
        """Tokens that may be reused, -1 in place of others."""
        return np.where(np.arange(len(self.ids)) < self.first, -1, self.ids)


@dataclass(frozen=True, eq=False)
class BlockChain:
    """Blocks of a sequence from its beginning on."""

    blocks: Sequence[BlockIndexEntry]
    lm: LM
    dtype: torch.dtype

    def held(self, first: int, n: int) -> Held:
        """Load KV of n tokens from `first` on. Earlier blocks are marked as used, too: they determine the positions."""
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        last = -(-(first + n) // LENGTH)
        for i in range(first // LENGTH, last):
            start, seen = i * LENGTH, self.blocks[i]
            mine = slice(max(0, first - start), min(len(seen.ids), first + n - start))
            try:
                parts = dict.fromkeys(self.lm.storing, mine)
                kv = load(seen.path, seen.ids.tolist(), parts, self.lm.shapes, self.dtype)
            except (CorruptFile, OSError) as error:
                raise SpanSourceGone from error
            for layer, part in kv.items():
                found.setdefault(layer, []).append(part)
        mark_used([seen.path for seen in self.blocks[:last]])
        each = {layer: zip(*parts, strict=True) for layer, parts in found.items()}
        device = self.lm.device
        return {layer: (torch.cat(k, 1).to(device), torch.cat(v, 1).to(device)) for layer, (k, v) in each.items()}


def find_spans(
    folder: Path,
    lm: LM,
    dtype: torch.dtype,
    ids: Sequence[int],
    start: int,
    least: int,
    known: dict[str, BlockIndexEntry],
) -> Iterator[Found]:
    """Yield the spans of at least `least` tokens of `ids` from `start` on, and the sequences that hold them.

    A span may occur more than once.

    `known`: index entries by block name, reused between calls. A span within one block is not found.
    """
    width = min(least, LENGTH)
    blocks = dict(_blocks(folder, lm, known)) if len(ids) - start >= least else {}
    if not (names := [name for name, block in blocks.items() if len(block.ids) - block.first >= width]):
        return
    held = [blocks[name].ids[blocks[name].first :] for name in names]
    edges = np.stack([[ids[:width], ids[-width:]] for ids in held]).astype(np.uint64)
    here = rolling_hashes(np.asarray(ids[start:], dtype=np.uint64), width)
    hits = {names[i]: None for i in np.flatnonzero(np.isin(rolling_hashes(edges, width)[..., 0], here).any(1))}
    for _ in range(TEXTS):
        if not hits:
            return
        way, at = list[BlockIndexEntry](), next(reversed(hits))  # the farthest from the beginning of its sequence
        there = list[int]()  # distances from there of the blocks found
        while at in blocks:
            if at in hits:
                del hits[at]
                there.append(len(way))
            way.append(blocks[at])
            at = blocks[at].parent
        way.reverse()
        first, last = len(way) - 1 - there[-1], len(way) - there[0]
        shown = [one.shown for one in way[first:last]]
        its_ids = np.concatenate([one.ids for one in way]).tolist()
        chain = SpanSource(its_ids, BlockChain(way, lm, dtype).held)
        for run in find_matching_spans(np.concatenate(shown).astype(np.int64), ids, start, least):
            yield MatchingSpan(first * LENGTH + run.old, run.new, run.n), chain


def _blocks(folder: Path, lm: LM, known: dict[str, BlockIndexEntry]) -> Iterator[tuple[str, BlockIndexEntry]]:
    """Yield the index entries of all blocks reachable from the root, by name, those of a sequence in order."""
    tree = BlockTree(folder)
    after, ahead, left = tree.children(), deque([ROOT]), MOST
    while ahead and left:
        parent = ahead.popleft()
        for name in islice(after.pop(parent, {}), left):
            left -= 1
            if name not in known:
                with suppress(CorruptFile, OSError):
                    path = tree.path(parent, name)
                    ids, its = read_tokens(path)
                    if name == name_of(parent, ids) and ids.min() >= 0 and ids.max() < lm.vocab:
                        known[name] = BlockIndexEntry(
                            path, parent, ids, max(its.get(layer, len(ids)) for layer in lm.storing)
                        )
            if name in known:
                yield name, known[name]
                if len(known[name].ids) == LENGTH:
                    ahead.append(name)
