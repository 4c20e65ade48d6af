"""Inputs of a captured pass: its fixed sizes, and the numbers of a request, in one block for one copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest
from kvcli.kernels.attend_invariant.tables import Tree
from kvcli.kernels.gumbel_noise.reference import signed
from kvcli.kv.recurrent_state import DeviceStates
from kvcli.kv.tiers.device_tables import MOST_ROWS, DeviceCache

NONE = -1  # fills unused entries of rows and paths


@dataclass(frozen=True, slots=True)
class PassShape:
    """The fixed sizes of one sequence's rows in a captured pass, and which inputs and results it has."""

    rows: int
    paths: int  # most paths through the rows that rows see
    earlier: int  # capacity for rows of earlier passes that these may see: that of the draft tree
    wanted: int | None  # rows whose logits are computed; None = all
    glances: bool  # lookahead rows read a cache view
    queries: bool  # queries are recorded
    shows: tuple[int, ...]  # layers whose inputs are recorded
    width: int  # size of the given hidden states; 0 = the embedded tokens are the input
    has_states: bool = False  # rows update recurrent states, which cannot be cropped

    def sizes(self) -> list[int]:
        """Return the size of each input of `PassInputs`."""
        n, seen = self.rows, self.earlier + self.rows
        of_rows = [2, n, seen, n, n, n * self.glances, self.paths * seen, 1, 1, self.wanted or 0]
        return [*of_rows, min(seen, MOST_ROWS), 1]

    def starts(self) -> list[int]:
        """Return the start of each input, at multiples of 16 bytes; the last entry is the end."""
        return list(accumulate((-(-n // 4) * 4 for n in self.sizes()), initial=0))


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """One sequence in a captured pass: its request, and what that reads on the device."""

    request: ForwardRequest
    shape: PassShape
    reads: tuple[DeviceCache, DeviceCache]  # KV cache, and the view of lookahead rows, which is kept up to date
    states: DeviceStates | None = None  # recurrent states; None = the model has none

    @property
    def first(self) -> int:
        """Place of the first row in the draft tree."""
        return max(0, len(self.reads[0].tree_pos) - self.request.rows.n_rows)

    @property
    def lying(self) -> list[object]:
        """Objects that exist as long as the captured pass is valid."""
        cache, view = self.reads
        return [*cache.tables(), *view.tables(), *(of for of in (cache.tree, self.states) if of is not None)]

    def uploads(self) -> list[int]:
        """Return the counts of changes to what lies on the device that no captured pass made."""
        its = [] if self.states is None else [self.states]
        return [of.synced_length for of in (*self.reads[0].tables(), *self.reads[1].tables(), *its)]

    def ran(self) -> Callable[[int], None]:
        """Note that the device is about to store rows. The result is to be called with their number; until then the
        lengths on the device are unknown."""
        owners = [of.layers[layer] for of in self.reads for layer in of.owners]
        was = [lying.lengths for lying in owners]
        for lying in owners:
            lying.lengths = []
        if self.states is not None:
            self.states.ran()

        def know(n: int) -> None:
            for lying, lengths in zip(owners, was, strict=True):
                lying.lengths = [length + n for length in lengths]

        return know


class PassInputs:
    """The input numbers of one sequence's rows, in a block of int32, on the host or on the device."""

    def __init__(self, block: Tensor, shape: PassShape) -> None:
        """`block`: as many numbers as the last entry of `shape.starts()`."""
        starts, sizes = shape.starts(), shape.sizes()
        seed, self.ids, self.all_pos, self.depth, self.path_of, self.beside, path, *rest = (
            block[a : a + n] for a, n in zip(starts, sizes, strict=False)
        )
        # place of the first row among all, number of rows of the draft tree
        self.first, self.n_tree, want, self.kept, self.count = rest
        self.seed, self.path, self.want = seed.view(torch.int64)[0], path.view(shape.paths, -1), want
        self.pos = self.all_pos[shape.earlier :]  # of the rows; before, those of rows of earlier passes
        self.accepted = block[starts[-3] :]  # covers `kept` and `count`
        self.wants_all = shape.wanted is None
        # the device commits accepted rows, perhaps rows behind a stop token, by which no state may be updated
        self.has_draft = shape.rows > 1 and not shape.earlier and not shape.has_states

    def tree(self, path_of: Tensor) -> Tree:
        """Return what the rows see, those with a path."""
        return Tree(self.path, path_of, self.depth, self.all_pos)

    @property
    def wanted_pos(self) -> Tensor:
        return self.pos if self.wants_all else self.pos.index_select(0, self.want)

    def accepted_path(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose tokens were accepted, in order, and their number [1]; ids [n] were sampled after the
        first n rows. As `accepted_path` (commit.py), without stop tokens."""
        path, line = self.path[:, 1:], self.path.clamp(min=0).long()
        before = ids[line[:, :-1].clamp(max=len(ids) - 1)]
        is_next = (self.ids[line[:, 1:]] == before) & (path >= 0) & (path < self.n_tree)
        n = is_next.long().cumprod(1).sum(1)  # [P]
        best = n.argmax(0, keepdim=True)
        return line.index_select(0, best)[0].int(), 1 + n.index_select(0, best).int()

    def fill(self, part: CapturedPart) -> None:
        """Fill in a request, on the host. Unused rows repeat the first one and are on no path."""
        rows, n, cache = part.request.rows, part.request.rows.n_rows, part.reads[0]
        self.all_pos.numpy()[: len(cache.tree_pos)] = cache.tree_pos
        # ids that the host need not read come from the device, behind this copy
        n_read = n - len(rows.choices)
        ids = [rows.ids[row] if row < n_read else 0 for row in range(n)] if n_read < n else rows.ids
        for to, given in ((self.ids, ids), (self.pos, rows.pos)):
            numbers = to.numpy()
            numbers[:n], numbers[n:] = given, given[0]
        path, path_of, depth = self.path.numpy(), self.path_of.numpy(), self.depth.numpy()
        path.fill(NONE)
        path_of.fill(NONE)
        sees: Any = cache.sees
        if sees is None and rows.tree_mask is not None:
            mask = rows.tree_mask.numpy()
            seen, ends = mask.nonzero()[1].tolist(), mask.sum(1).cumsum().tolist()
            sees = [seen[a:b] for a, b in pairwise([0, *ends])]
        if sees is None:
            path[0, :n], path_of[:n], depth[:n] = range(n), 0, range(n)
        else:
            path_of[:n], depth[:n] = _paths(sees, path), [len(mine) - 1 for mine in sees]
        if part.shape.glances:
            self.beside.fill_(NONE)
            self.beside.numpy()[rows.tree : n] = path_of[rows.tree : n]
            path_of[rows.tree :] = NONE
        if not self.wants_all:
            self.want.zero_()
            self.want.numpy()[: len(part.request.want)] = part.request.want
        self.first.fill_(part.first)
        self.n_tree.fill_(rows.tree)
        self.seed.fill_(0 if part.request.draw is None else signed(part.request.draw.sampler.seed))


def _paths(sees: Sequence[Sequence[int]], path: Any) -> list[int]:
    """Write paths that begin with what each row sees to `path` [P, N], the longest first. Return that of each row."""
    found, written, through = [0] * len(sees), list[Sequence[int]](), dict[int, int]()
    for row in sorted(range(len(sees)), key=lambda row: -len(sees[row])):
        mine = sees[row]
        at = through.get(mine[-1], len(written)) if mine else 0  # the first path through the last of them
        if at == len(written) or written[at][: len(mine)] != mine:
            at = len(written)
            path[at, : len(mine)] = mine
            written.append(mine)
            through = dict.fromkeys(mine, at) | through
        found[row] = at
    return found
