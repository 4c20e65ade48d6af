"""Which layers guesses of the model itself leave out: found while it writes, or known of an earlier text.

Layers that share slots go together, and the first never goes. A chooser is asked before each draft, and may ask for
passes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.rows import Rows
from kvcli.kv.slots import Slots, compact, spans
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import CacheReader, KVCache

SEEN = 32  # tokens by which a set is judged
_BEFORE = 256  # tokens before them that its rows read
_ENOUGH, _TRIES = 0.93, 300  # share that keeps the text's token, and sets, after which the search ends
_NEAR = 0.9  # cosine of texts that are alike: in SmolLM2-135M 0.87 to 0.97 within a kind, 0.59 to 0.87 across, mostly
_SHARE = 0.05  # of the time since the text began, for searching


class LayerSkip(Protocol):
    """Says which layers guesses go through."""

    @property
    def runs(self) -> Sequence[range]:
        """Of neighbours among them; () = all."""

    @property
    def about(self) -> str:
        """What is left out, and how it was chosen, in words; "" = nothing is."""

    def start(self) -> None:
        """Another text, or an earlier point of this one."""

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        """Before a draft. `past`: how guesses read `kv`; `newest`: of `length` tokens, the pending one last."""


class AllLayers:
    """All layers."""

    runs: Sequence[range] = ()
    about = ""

    def start(self) -> None:
        return

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        yield from ()


class _Chosen:
    """A number of the units between the first and the last."""

    def __init__(self, lm: LM, share: float) -> None:
        """`share`: of those, how many are left out."""
        if lm.straight is None:
            lm.check_layer_gates()  # raises BadModel where rows cannot be stopped between layers
        self._lm, self._units = lm, spans(lm.shapes)
        self._n = min(len(self._units) - 2, round(share * (len(self._units) - 2)))
        self._random = Random(0)
        self.runs: Sequence[range] = self._without(range(1, 1 + self._n))
        self.start()

    def start(self) -> None:
        return

    @property
    def about(self) -> str:
        return f"without {self._lm.n_layers - sum(map(len, self.runs))} of {self._lm.n_layers} layers"

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


class Early(_Chosen):
    """The first layers, then norm and head (LayerSkip, arXiv 2404.16710): what others leave out between the first and
    the last goes at the end. Checkpoints that were trained with early exits guess well so."""

    def __init__(self, lm: LM, share: float) -> None:
        super().__init__(lm, share)
        if self._n > 0:
            self.runs = [range(self._units[-self._n].start), range(lm.n_layers, lm.n_layers)]

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        yield from ()


class Swift(_Chosen):
    """Tries sets by chance and keeps the best (SWIFT, arXiv 2410.06916): that by which most of the newest tokens would
    have been guessed, which one pass over all of them shows."""

    def start(self) -> None:
        """What was found for one text is as good a start as any for the next."""
        self._began, self._spent, self._tries, self._best = perf_counter(), 0.0, 0, -1.0

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        """Try another set, while there is time."""
        began = perf_counter()
        is_over = self._best >= _ENOUGH or self._tries >= _TRIES or self._n < 1
        if is_over or len(newest) <= SEEN or self._spent > _SHARE * (began - self._began):
            return
        runs = self.runs
        if self._best >= 0:  # the first is the one in use
            runs = self._without(self._random.sample(range(1, len(self._units) - 1), self._n))
        score = yield from self._score(runs, kv, newest[-SEEN - 1 :], length - SEEN - 1)
        self._tries += 1
        if score > self._best:
            self._best, self.runs = score, runs
        self._spent += perf_counter() - began

    def _score(self, runs: Sequence[range], kv: KVCache, ids: Sequence[int], at: int) -> Steps[float]:
        """Of tokens `ids`, the first at position `at`, the share that the one before it would have led to."""
        before = newest_before(self._lm, kv, at, chain.from_iterable(runs))
        rows, hidden = Rows.chain(ids[:-1], at), None
        for run in runs[:-1]:
            hidden = (yield ForwardRequest(self._lm, rows, before, layers=run, hidden=hidden)).hidden
        made = yield ForwardRequest(
            self._lm, rows, before, want=range(SEEN), logits_hook=top, layers=runs[-1], hidden=hidden
        )
        return sum(int(made.hook_output(i)[0]) == token for i, token in enumerate(ids[1:])) / SEEN


def newest_before(lm: LM, kv: KVCache, at: int, layers: Iterable[int]) -> Dense:
    """A copy of what SEEN rows or fewer from position `at` on read in these layers, as far back as it matters most."""
    before = Dense(lm.shapes, kv.dtype, lm.device)
    for layer in (layer for layer in layers if lm.shapes[layer].shared_from is None):
        s = kv.newest(layer, _BEFORE + SEEN)
        s = compact(s, s.pos < at)
        before.put(layer, Slots(s.k.clone(), s.v.clone(), s.pos))
    return before


class Knn(Swift):
    """Begins with what was found for the earlier text that is most like this one (KNN-SSD, arXiv 2505.16162), and
    searches on where that search had not come to its end; from scratch where no text was near."""

    def __init__(self, lm: LM, share: float, known: SavedLayerSets) -> None:
        """`known`: of this model's texts, each with as many layers left out."""
        self._known = known
        super().__init__(lm, share)

    def start(self) -> None:
        super().start()
        self._found: LayerSet | None = None  # for this text
        self._how = ""

    @property
    def about(self) -> str:
        return super().about + self._how

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        """Before the first draft one pass says where the text is, among others."""
        if self._n < 1 or len(newest) < 2:
            return
        if self._found is None:
            began = perf_counter()
            seen = newest[-SEEN - 1 : -1]
            like = yield from self._place(kv, seen, length - 1 - len(seen))
            self._found, near = self._known.near(like)
            self._how = f", as for an earlier text like this one (cosine {near:.2f})"
            if self._found is None:
                self._how = ", by search: no text that is known is like this one"
                self._found = LayerSet(like, self.runs)
            self.runs, self._tries = self._found.runs, self._found.tries
            self._best = self._found.best if self._found.best >= _ENOUGH else -1.0  # what a text says of another's
            self._spent += perf_counter() - began
        yield from super().improve(kv, cache, newest, length)
        if self._best >= 0:
            self._found.runs, self._found.best, self._found.tries = self.runs, self._best, self._tries
            self._known.keep(self._found)

    def _place(self, kv: KVCache, ids: Sequence[int], at: int) -> Steps[Tensor]:
        """[E] of length 1: the mean of what tokens `ids`, the first at position `at`, bring to the last layer."""
        below = range(self._units[-1].start)
        made = yield ForwardRequest(self._lm, Rows.chain(ids, at), newest_before(self._lm, kv, at, below), layers=below)
        assert made.hidden is not None
        return torch.nn.functional.normalize(made.hidden.float().mean(0), dim=0)


@dataclass(slots=True, eq=False)
class LayerSet:
    """What a search found for a text."""

    like: Tensor  # [E] of length 1: where the text is
    runs: Sequence[range]
    best: float = -1.0  # share of tokens that would have been guessed; -1 = nobody looked
    tries: int = 0  # sets


class SavedLayerSets:
    """What was found for earlier texts of one model, the one asked for last at the end."""

    MOST = 32

    def __init__(self) -> None:
        self._found: list[LayerSet] = []

    def __deepcopy__(self, memo: object) -> SavedLayerSets:
        """Itself: texts that are copied share it."""
        return self

    def near(self, like: Tensor) -> tuple[LayerSet | None, float]:
        """That of the text most like one at `like`, None where none is near; and the cosine."""
        if not self._found:
            return None, 0.0
        cosines = torch.stack([found.like for found in self._found]) @ like
        best = int(cosines.argmax())
        near = float(cosines[best])
        return (self._found[best] if near >= _NEAR else None), near

    def keep(self, found: LayerSet) -> None:
        """Remember it, and forget what was not asked for the longest time."""
        self._found = [*(one for one in self._found if one is not found), found][-self.MOST :]


class Clasp(_Chosen):
    """Layers without which a token's hidden state stays closest to what all of them make of it (CLaSp, arXiv
    2505.24196): a dynamic programme over layers and how many were left out, a row for each number."""

    EVERY = 16  # drafts

    def start(self) -> None:
        """Anew."""
        self._drafts = 0

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Steps[None]:
        """One pass of the pending token, layer by layer: its state with j of the layers left out is row j."""
        self._drafts += 1
        if self._drafts % self.EVERY != 1 or self._n < 1:
            return
        n = self._n + 1
        rows = Rows([newest[-1]] * n, [length - 1] * n, torch.eye(n, dtype=torch.bool), tree=n, parent=(-1,) * n)
        hidden, sets = None, [frozenset[int]()] * n
        for i, unit in enumerate(self._units[:-1]):
            made = yield ForwardRequest(self._lm, rows, cache, layers=unit, hidden=hidden)
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
