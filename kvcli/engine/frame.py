"""Frames: passes of a fixed shape that a device records once and replays, with one wait of the host in each.

A frame is as many rows as its size, unused ones included, over places of texts in memory: what changes from pass to
pass (ids, positions, the tree, how long a past is) lies in buffers that the device reads. A pass is one copy there, one
call, and one copy back. Where the next one is known to be a single row behind it, it is under way before the host has
read this one: the device feeds itself what it drew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

import torch
from torch import Tensor

from kvcli.engine.engine import call
from kvcli.engine.feed import Feed, Fresh, Made
from kvcli.engine.forward import SideBySide
from kvcli.engine.readback import Readback, fetch
from kvcli.engine.stated import fixed_ropes
from kvcli.engine.trial import Trial
from kvcli.kernels.attend_fixed import Storing, attend_fixed, storing
from kvcli.kernels.attend_rows.tables import Tree
from kvcli.kernels.gumbel.reference import signed
from kvcli.kv.fixed import Fixed

if TYPE_CHECKING:
    from kvcli.engine.feed import Glean
    from kvcli.engine.graphs import Graphs
    from kvcli.engine.lm import LM
    from kvcli.engine.sample import Sampler
    from kvcli.kv.slots import Sight

SIZES = (1, 8, 16, 32, 64)  # rows
MOST = 12  # frames of a model that are kept
NONE = -1  # in place of a row or a path

T = TypeVar("T")
log = logging.getLogger("kvcli.engine")


class Frames:
    """Of one model. What they cannot serve runs one operation at a time; `eager` counts such passes, by why."""

    def __init__(self, graphs: Graphs, sizes: Sequence[int] = SIZES) -> None:
        """`sizes`: rows of a frame, rising."""
        self.graphs, self._sizes = graphs, sizes
        self._frames: dict[tuple[object, ...], Frame] = {}  # the latest last
        self.eager: Counter[str] = Counter()
        self.why = ""  # nothing of this model can be recorded

    def run(self, feeds: Sequence[Feed]) -> list[Made] | None:
        """One pass, the rows of all feeds side by side; None where it has to run otherwise."""
        if any(feed.is_prompt or feed.layers is not None or feed.only_kv for feed in feeds):
            return None  # meant to run otherwise
        made = self.why or next(filter(None, map(self._why_not, feeds)), "") or self._try(feeds)
        if not isinstance(made, str):
            return made
        if not self.eager[made]:
            log.info("passes run one operation at a time: %s", made)
        self.eager[made] += 1
        return None

    def _try(self, feeds: Sequence[Feed]) -> list[Made] | str:
        sizes, pasts = [self._size(feed) for feed in feeds], list[Fixed]()
        most = feeds[0].lm.most_rows
        if most is not None and sum(rows for rows, _ in sizes) > most:
            return f"with the unused ones more than {most} rows, beyond which they would lose their bits"
        try:
            for feed, (rows, _) in zip(feeds, sizes, strict=True):
                if isinstance(past := feed.past.fixed(rows), str):
                    return past
                pasts.append(past)
            return self._frame(feeds, sizes, pasts).run(feeds, pasts)
        except torch.OutOfMemoryError:
            return "no memory to record them"
        except Unrecorded as no:
            lm = feeds[0].lm
            self.why = f"{lm.info.family} cannot be recorded: {no}"
            lm.info = replace(lm.info, notes=(*lm.info.notes, f"passes run one operation at a time: {self.why}"))
            return self.why

    def _why_not(self, feed: Feed) -> str:
        rows, hear = feed.rows, feed.hear
        if rows.tree < rows.n_rows:
            return "scouts run beside the tree (spec.method)"
        if rows.n_rows > self._sizes[-1]:
            return f"more than {self._sizes[-1]} rows"
        if len(rows.parent) < rows.n_rows or list(feed.want) != list(range(rows.n_rows)) or feed.draw is None:
            return "not a step of a text"
        return "" if list(hear) == list(range(len(hear))) else "some rows of a tree are heard"

    def _size(self, feed: Feed) -> tuple[int, int]:
        """Rows and paths."""
        rows = next(size for size in self._sizes if size >= feed.rows.n_rows)
        return rows, 1 if feed.rows.sees is None else rows

    def _frame(self, feeds: Sequence[Feed], sizes: Sequence[tuple[int, int]], pasts: Sequence[Fixed]) -> Frame:
        key = (*sizes, *(bool(feed.hear) for feed in feeds), *(id(lying) for its in pasts for lying in its.layers))
        frame = self._frames.pop(key, None)
        if frame is None or not frame.is_alive:
            self._frames = {k: f for k, f in self._frames.items() if f.is_alive}
            while len(self._frames) >= MOST:
                del self._frames[next(iter(self._frames))]
            frame = Frame(feeds[0].lm, self.graphs, sizes, feeds, pasts)
        self._frames[key] = frame
        return frame


class Unrecorded(Exception):
    """A model asks for the host where nobody may: in words, for what."""


class Numbers:
    """Numbers of one text's rows, side by side in a block of int32, on the host or on the device."""

    def __init__(self, block: Tensor, rows: int, paths: int) -> None:
        """`block`: of `words(rows, paths)` numbers."""
        seed, self.ids, self.pos, self.depth, self.path_of, path, self.kept, self.count = (
            block[a : a + n] for a, n in zip(_starts(rows, paths), _lengths(rows, paths), strict=False)
        )
        self.seed, self.path = seed.view(torch.int64)[0], path.view(paths, rows)
        self.accepted = block[_starts(rows, paths)[-3] :]  # `kept` and `count`

    @property
    def tree(self) -> Tree:
        return Tree(self.path, self.path_of, self.depth, self.pos)

    def fill(self, feed: Feed) -> None:
        """On the host. Unused rows repeat the first one, and lie on no path."""
        rows, n = feed.rows, feed.rows.n_rows
        for to, given in ((self.ids, rows.ids), (self.pos, rows.pos)):
            numbers = to.numpy()
            numbers[:n], numbers[n:] = given, given[0]
        lines: list[list[int]] = []
        for row, parent in enumerate(rows.parent):
            lines.append([*(lines[parent] if parent >= 0 else ()), row])
        inner, path = set(rows.parent), self.path.numpy()
        path.fill(NONE)
        self.path_of.fill_(NONE)
        self.depth.zero_()
        for i, line in enumerate(line for row, line in enumerate(lines) if row not in inner):
            path[i, : len(line)] = line
            self.path_of.numpy()[line], self.depth.numpy()[line] = i, range(len(line))
        assert feed.draw is not None
        self.seed.fill_(signed(feed.draw.sampler.seed))


def _lengths(rows: int, paths: int) -> list[int]:
    return [2, rows, rows, rows, rows, paths * rows, rows, 1]


def _starts(rows: int, paths: int) -> list[int]:
    """Each at a multiple of 16 bytes; the last is the end."""
    return list(accumulate((-(-n // 4) * 4 for n in _lengths(rows, paths)), initial=0))


class FixedPass:
    """Stands where a pass does while a frame is recorded: one text's rows, all that they read on the device."""

    last, hidden = -1, None

    def __init__(self, feed: Feed, rows: Numbers, past: Fixed) -> None:
        self.layers, self.n_rows = range(feed.lm.n_layers), len(rows.ids)
        self.trial = Trial(feed.lm.latents)
        self._shapes, self._dtype, self._hears = feed.lm.shapes, feed.past.dtype, bool(feed.hear)
        self._tree, self._past = rows.tree, past
        self.fresh: dict[int, Fresh] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, N, D]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sink: Tensor | None) -> Tensor:
        """As a pass does (forward.py)."""
        q, k, v = q.to(self._dtype), k.to(self._dtype), v.to(self._dtype)
        if k.stride()[:2] != v.stride()[:2]:  # one table says where both lie
            k, v = (t.contiguous().flatten().view(t.shape) for t in (k, v))  # a row alone may have any stride
        if (source := self._shapes[layer].shares) is not None:
            k, v = self.fresh[source].k, self.fresh[source].v
        else:
            self.fresh[layer] = Fresh(k, v)
        if self._hears:
            self.queries.append(q)
        lying, bent, window = self._past.layers[layer], sight.softcap, sight.window
        of = q, lying.table, k, v, self._tree, sight.scale
        return attend_fixed(*of, capacity=lying.room, softcap=bent, window=window, sink=sink)


@dataclass(slots=True)
class Drawing:
    """What the host reads of a pass, and how the device goes on by itself."""

    numbers: Tensor  # float64, which holds ids exactly: of each text the drawn ids, then what is gleaned
    start: Callable[[], None]
    here: list[Tensor]  # on the host, in turn: one is read while the other is written
    wide: Sequence[int]  # by text: numbers that are gleaned of a row
    go_on: Callable[[], None] | None = None  # stores the row that was run, and makes what was drawn the next one


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A pass that nobody has asked for yet."""

    drawing: Drawing
    here: Tensor
    wait: Callable[[], None]
    rows: Sequence[tuple[int, int, int]]  # of each text: id, position, seed
    told: Sequence[int]  # as it was when this began

    def serves(self, feeds: Sequence[Feed], drawing: Drawing | None, told: Sequence[int]) -> bool:
        """Whether it is the pass of these feeds, over pasts of which nobody but the device has changed anything."""
        return drawing is self.drawing and [_row(feed) for feed in feeds] == self.rows and told == self.told


class Frame:
    """Some texts' rows over where their pasts lie, of which it holds nothing itself."""

    def __init__(
        self, lm: LM, graphs: Graphs, sizes: Sequence[tuple[int, int]], feeds: Sequence[Feed], pasts: Sequence[Fixed]
    ) -> None:
        """`sizes`: rows and paths of each text. Raises Unrecorded."""
        self._graphs = graphs = graphs.apart()  # other frames run between this one's pass and what is stored of it
        self._over = [ref(lying) for its in pasts for lying in its.layers]
        ends = [0, *accumulate(_starts(*size)[-1] for size in sizes)]
        self._here = graphs.host(ends[-1], torch.int32)
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=lm.device)
        self._of_host, self._rows = (
            [Numbers(block[a:b], *size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]
            for block in (self._here, self._there)
        )
        for rows in self._of_host:  # of which `count` are stored while it is recorded: none
            rows.path_of.fill_(NONE)
        graphs.send(self._here, self._there)
        # the first row and its number, which is none while that is recorded
        self._first, self._one = (torch.zeros(1, dtype=torch.int32, device=lm.device) for _ in range(2))
        self._alive: list[Tensor] = []  # what is read by what was recorded
        self._drawings: dict[tuple[Hashable, ...], Drawing] = {}
        self._keep: list[Callable[[], None]] = []  # by text: stores the accepted rows
        self._under_way: UnderWay | None = None
        self._none = torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)  # logits

        def work() -> tuple[Tensor, list[FixedPass]]:
            passes = [FixedPass(feed, rows, its) for feed, rows, its in zip(feeds, self._rows, pasts, strict=True)]
            return self._through(lm, passes), passes

        with fixed_ropes(lm.model):
            (logits, passes), self._pass = self._recorded(work)
        self._logits = torch.split(logits, [rows for rows, _ in sizes])
        self._fresh, self._queries = [p.fresh for p in passes], [p.queries for p in passes]
        for i, (past, rows) in enumerate(zip(pasts, self._rows, strict=True)):
            store = self._storing(i, past)
            self._keep.append(self._recorded(partial(store, rows.kept, rows.count, rows.pos))[1])

    @property
    def is_alive(self) -> bool:
        """Whether all lies where it did."""
        return all(lying() is not None for lying in self._over)

    def run(self, feeds: Sequence[Feed], pasts: Sequence[Fixed]) -> list[Made]:
        """One pass of feeds of these sizes. Raises Unrecorded."""
        drawing, told = self._drawing(feeds, pasts), [lying.told for its in pasts for lying in its.layers]
        under_way, self._under_way = self._under_way, None
        if under_way is None or not under_way.serves(feeds, drawing, told):
            under_way = None
            for rows, feed in zip(self._of_host, feeds, strict=True):
                rows.fill(feed)
            self._graphs.send(self._here, self._there)
            self._pass()
        if drawing is None:
            return self._drawn_apart(feeds, pasts)
        here, wait = self._read(drawing) if under_way is None else (under_way.here, under_way.wait)
        if drawing.go_on is None or not all(map(_goes_on, feeds)):
            wait()
            return self._made(feeds, pasts, self._backs(feeds, drawing, here))
        drawing.go_on()
        for its in pasts:
            its.ran(1)
        self._pass()
        ahead = self._read(drawing)
        wait()
        backs = self._backs(feeds, drawing, here)
        next_rows = [(back.ids[0], at + 1, seed) for back, (_, at, seed) in zip(backs, map(_row, feeds), strict=True)]
        self._under_way = UnderWay(drawing, *ahead, next_rows, told)
        return self._made(feeds, pasts, backs, is_stored=True)

    def _read(self, drawing: Drawing) -> tuple[Tensor, Callable[[], None]]:
        """What is drawn on its way to the host."""
        drawing.start()
        drawing.here.reverse()
        return drawing.here[0], self._graphs.fetch(drawing.numbers, drawing.here[0])

    def _drawn_apart(self, feeds: Sequence[Feed], pasts: Sequence[Fixed]) -> list[Made]:
        """By operations that run one at a time."""
        each = zip(feeds, self._logits, strict=True)
        backs = [Readback(feed, logits[: feed.rows.n_rows]) for feed, logits in each]
        fetch(backs)
        return self._made(feeds, pasts, backs)

    def _backs(self, feeds: Sequence[Feed], drawing: Drawing, here: Tensor) -> list[Readback]:
        """What the host reads of each text, from the numbers of all."""
        numbers: list[float] = here.tolist()
        backs = []
        for feed, rows, logits, wide in zip(feeds, self._rows, self._logits, drawing.wide, strict=True):
            size, n, back = len(rows.ids), feed.rows.n_rows, Readback(feed, logits)
            back.fill([*numbers[:n], *numbers[size : size + n * wide]])
            numbers = numbers[size * (1 + wide) :]
            backs.append(back)
        return backs

    def _made(
        self, feeds: Sequence[Feed], pasts: Sequence[Fixed], backs: Sequence[Readback], is_stored: bool = False
    ) -> list[Made]:
        made = []
        for i, (feed, back) in enumerate(zip(feeds, backs, strict=True)):
            logits = self._none if is_stored else self._logits[i][: feed.rows.n_rows]  # else they are the next pass's
            queries = [q[:, : len(feed.hear)] for q in self._queries[i]] if feed.hear else []
            keep = partial(self._kept, i, feed, pasts[i], is_stored)
            made.append(Made(logits, back.drawn, back.gleaned, {}, queries, keep=keep))
        return made

    def _kept(self, i: int, feed: Feed, past: Fixed, is_stored: bool, path: Sequence[int]) -> None:
        """These rows are part of the text."""
        if not is_stored:
            here, there = self._of_host[i], self._rows[i]
            here.kept.numpy()[: len(path)], here.count.numpy()[0] = path, len(path)
            self._graphs.send(here.accepted, there.accepted)
            past.ran(len(path))
            self._keep[i]()
        past.grew(len(path), feed.rows.pos[path[0]])

    # ---- what is recorded ----

    def _through(self, lm: LM, passes: Sequence[FixedPass]) -> Tensor:
        """Logits [N, V] of all rows."""
        ids, pos = (torch.cat(of).long() for of in zip(*((rows.ids, rows.pos) for rows in self._rows), strict=True))
        way = passes[0] if len(passes) == 1 else SideBySide(passes)
        return call(lm.model, ids, pos, device=lm.device, its_pass=way, trial=way.trial)

    def _storing(self, i: int, past: Fixed) -> Storing:
        """What makes rows of a text slots."""
        fresh = [(self._fresh[i][layer].k, self._fresh[i][layer].v) for layer in past.owners]
        store, alive = storing([past.layers[layer].table for layer in past.owners], fresh)
        self._alive += alive
        return store

    def _drawing(self, feeds: Sequence[Feed], pasts: Sequence[Fixed]) -> Drawing | None:
        """How their tokens are drawn; None where more than the pass decides."""
        draws = [feed.draw for feed in feeds if feed.draw is not None]
        if any(draw.constraint is not None or draw.sampler.needs_text for draw in draws):
            return None
        how = [(replace(draw.sampler, seed=0), feed.glean) for draw, feed in zip(draws, feeds, strict=True)]
        if (drawing := self._drawings.get(tuple(how))) is None:
            (numbers, wide), start = self._recorded(partial(self._draw, how))
            here = [self._graphs.host(len(numbers), numbers.dtype) for _ in range(2)]
            drawing = Drawing(numbers, start, here, wide)
            self._drawings[tuple(how)] = drawing
        if drawing.go_on is None and all(map(_goes_on, feeds)):
            self._one.zero_()
            stores = [self._storing(i, past) for i, past in enumerate(pasts)]
            drawing.go_on = self._recorded(partial(self._feed_back, drawing.numbers, stores))[1]
            self._one.fill_(1)
        return drawing

    def _draw(self, how: Sequence[tuple[Sampler, Glean | None]]) -> tuple[Tensor, list[int]]:
        """The numbers of a drawing, and how many are gleaned of each row of a text."""
        parts, wide = [], []
        for rows, logits, (sampler, glean) in zip(self._rows, self._logits, how, strict=True):
            parts.append(sampler.on_device(logits, rows.pos.long(), seed=rows.seed).double())
            wide.append(0)
            if glean is not None:
                parts.append(glean(logits).double().flatten())
                wide[-1] = len(parts[-1]) // len(logits)
        return torch.cat(parts), wide

    def _feed_back(self, numbers: Tensor, stores: Sequence[Storing]) -> None:
        at = 0
        for rows, store in zip(self._rows, stores, strict=True):
            store(self._first, self._one, rows.pos)
            rows.ids.copy_(numbers[at : at + 1].clamp(min=0).expand_as(rows.ids))  # where nothing could be drawn: any
            rows.pos.add_(1)
            at += len(rows.ids)

    def _recorded(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        try:
            with torch.inference_mode():
                return self._graphs.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unrecorded(str(error).partition("\n")[0]) from error


def _goes_on(feed: Feed) -> bool:
    """Whether the row that it draws is the next pass, of which nothing else is wanted."""
    return bool(feed.rows.ahead) and not feed.hear and feed.glean is None


def _row(feed: Feed) -> tuple[int, int, int]:
    """The first one."""
    assert feed.draw is not None
    return feed.rows.ids[0], feed.rows.pos[0], feed.draw.sampler.seed
