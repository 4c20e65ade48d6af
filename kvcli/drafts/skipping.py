"""Which layers guesses of the model itself leave out: found while it writes, never the first nor the last.

Layers that share slots go together. A chooser is asked before each draft, and may ask for passes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from kvcli.drafts.successors import top
from kvcli.engine.feed import Feed
from kvcli.engine.rows import Rows
from kvcli.kv.dense import Dense
from kvcli.kv.slots import Slots, compact, spans

if TYPE_CHECKING:
    from kvcli.engine.feed import Asks
    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Reader, Store

_SEEN = 32  # tokens by which a set is judged
_BEFORE = 256  # tokens before them that its rows read
_ENOUGH, _TRIES = 0.93, 300  # share that keeps the text's token, and sets, after which the search ends
_SHARE = 0.05  # of the time since the text began, for searching


class Skipping(Protocol):
    """Says which layers guesses go through."""

    @property
    def runs(self) -> Sequence[range]:
        """Of neighbours among them; () = all."""

    def start(self) -> None:
        """Another text, or an earlier point of this one."""

    def improve(self, kv: Store, past: Reader, newest: Sequence[int], length: int) -> Asks[None]:
        """Before a draft. `past`: how guesses read `kv`; `newest`: of `length` tokens, the pending one last."""


class Nothing:
    """All layers."""

    runs: Sequence[range] = ()

    def start(self) -> None:
        return

    def improve(self, kv: Store, past: Reader, newest: Sequence[int], length: int) -> Asks[None]:
        yield from ()


class _Chosen:
    """A number of the units between the first and the last."""

    def __init__(self, lm: LM, share: float) -> None:
        """`share`: of those, how many are left out."""
        if lm.straight is None:
            lm.meet_gates()  # raises BadModel where rows cannot be stopped between layers
        self._lm, self._units = lm, spans(lm.shapes)
        self._n = min(len(self._units) - 2, round(share * (len(self._units) - 2)))
        self._random = Random(0)
        self.runs: Sequence[range] = self._without(range(1, 1 + self._n))
        self.start()

    def start(self) -> None:
        return

    def _without(self, skipped: Iterable[int]) -> list[range]:
        """The layers of all other units, in runs."""
        left, found = set(skipped), list[range]()
        for i, unit in enumerate(self._units):
            if i in left:
                continue
            if found and found[-1].stop == unit.start:
                unit = range(found.pop().start, unit.stop)
            found.append(unit)
        return found


class Swift(_Chosen):
    """Tries sets by chance and keeps the best (SWIFT, arXiv 2410.06916): that by which most of the newest tokens would
    have been guessed, which one pass over all of them shows."""

    def start(self) -> None:
        """What was found for one text is as good a start as any for the next."""
        self._began, self._spent, self._tries, self._best = perf_counter(), 0.0, 0, -1.0

    def improve(self, kv: Store, past: Reader, newest: Sequence[int], length: int) -> Asks[None]:
        """Try another set, while there is time."""
        began = perf_counter()
        is_over = self._best >= _ENOUGH or self._tries >= _TRIES or self._n < 1
        if is_over or len(newest) <= _SEEN or self._spent > _SHARE * (began - self._began):
            return
        runs = self.runs
        if self._tries:  # the first is the one in use
            runs = self._without(self._random.sample(range(1, len(self._units) - 1), self._n))
        score = yield from self._score(runs, kv, newest[-_SEEN - 1 :], length - _SEEN - 1)
        self._tries += 1
        if score > self._best:
            self._best, self.runs = score, runs
        self._spent += perf_counter() - began

    def _score(self, runs: Sequence[range], kv: Store, ids: Sequence[int], at: int) -> Asks[float]:
        """Of tokens `ids`, the first at position `at`, the share that the one before it would have led to."""
        before = Dense(self._lm.shapes, kv.dtype, self._lm.device)
        for layer in (layer for run in runs for layer in run if self._lm.shapes[layer].shares is None):
            s = kv.newest(layer, _BEFORE + _SEEN)
            s = compact(s, s.pos < at)
            before.put(layer, Slots(s.k.clone(), s.v.clone(), s.pos))
        rows, hidden = Rows.chain(ids[:-1], at), None
        for run in runs[:-1]:
            hidden = (yield Feed(self._lm, rows, before, layers=run, hidden=hidden)).hidden
        made = yield Feed(self._lm, rows, before, want=range(_SEEN), glean=top, layers=runs[-1], hidden=hidden)
        return sum(int(made.gleaned(i)[0]) == token for i, token in enumerate(ids[1:])) / _SEEN


class Clasp(_Chosen):
    """Layers without which a token's hidden state stays closest to what all of them make of it (CLaSp, arXiv
    2505.24196): a dynamic programme over layers and how many were left out, a row for each number."""

    EVERY = 16  # drafts

    def start(self) -> None:
        """Anew."""
        self._drafts = 0

    def improve(self, kv: Store, past: Reader, newest: Sequence[int], length: int) -> Asks[None]:
        """One pass of the pending token, layer by layer: its state with j of the layers left out is row j."""
        self._drafts += 1
        if self._drafts % self.EVERY != 1 or self._n < 1:
            return
        n = self._n + 1
        rows = Rows([newest[-1]] * n, [length - 1] * n, torch.eye(n, dtype=torch.bool), tree=n, parent=(-1,) * n)
        hidden, sets = None, [frozenset[int]()] * n
        for i, unit in enumerate(self._units[:-1]):
            made = yield Feed(self._lm, rows, past, layers=unit, hidden=hidden)
            assert made.hidden is not None
            through, whole = made.hidden, made.hidden[:1].float()
            if i and hidden is not None:
                kept, gone = (torch.cosine_similarity(t.float(), whole) for t in (through[1:], hidden[:-1]))
                # with j of j layers left out so far there is no choice
                skips = ((gone > kept) | (torch.arange(1, n, device=gone.device) >= i)).tolist()
                takes = [False, *(skip and j < i for j, skip in enumerate(skips))]
                hidden = torch.stack([hidden[j - 1] if take else through[j] for j, take in enumerate(takes)])
                sets = [sets[j - 1] | {i} if take else sets[j] for j, take in enumerate(takes)]
            else:
                hidden = through
        self.runs = self._without(sets[-1])
