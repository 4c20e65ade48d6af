"""Choose the layers that self-drafting skips: by a search while decoding, or from an earlier sequence.

Layers that share slots are skipped together, and the first layer never is. A chooser is asked before each draft and may
run passes for its search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

import torch

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.forward_request import ForwardRequest, Passes, Rows
from kvcli.kv.slots import CacheReader, KVCache, Slots, compact, layer_groups
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM

SEEN = 32  # tokens by which a layer set is scored
_BEFORE = 256  # earlier tokens that the scored rows attend to
_ENOUGH, _TRIES = 0.93, 300  # the search ends at this share of right tokens, or after this many layer sets
_NEAR = 0.9  # cosine of similar texts: in SmolLM2-135M mostly 0.87 to 0.97 within a kind, 0.59 to 0.87 across kinds
_SHARE = 0.05  # share of the time since the sequence began that is spent on the search


class LayerSkip:
    """Layer chooser for self-drafting. This one skips no layer."""

    runs: Sequence[range] = ()  # ranges of consecutive layers that drafts run; () = all

    @property
    def about(self) -> str:
        """Number of skipped layers and how they were chosen, in words; "" = none."""
        return ""

    def start(self) -> None:
        """Start another sequence, or rewind this one."""

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Passes[None]:
        """Improve the choice before a draft. `cache`: how drafts read `kv`; `newest`: newest of `length` tokens, the
        pending one last."""
        yield from ()


class _Chosen(LayerSkip):
    """Base of choosers that skip a fixed number of the units between the first and the last."""

    def __init__(self, lm: LM, share: float) -> None:
        """`share`: of those units, the share that is skipped."""
        if lm.direct_forward is None:
            lm.check_layer_gates()  # raises BadModel if rows cannot be stopped between layers
        self._lm, self._units = lm, layer_groups(lm.shapes)
        self._n = min(len(self._units) - 2, round(share * (len(self._units) - 2)))
        self._random = Random(0)
        self.runs = self._without(range(1, 1 + self._n))
        self.start()

    @property
    def about(self) -> str:
        return f"without {self._lm.n_layers - sum(map(len, self.runs))} of {self._lm.n_layers} layers"

    def _without(self, skipped: Iterable[int]) -> list[range]:
        """Return the layers of all other units, as ranges of consecutive layers."""
        left, found = set(skipped), list[range]()
        for i, unit in enumerate(self._units):
            if i in left:
                continue
            if found and found[-1].stop == unit.start:
                unit = range(found.pop().start, unit.stop)
            found.append(unit)
        return found


class Early(_Chosen):
    """Early exit: run the first layers, then norm and head (LayerSkip, arXiv 2404.16710). The skipped layers are the
    last ones instead of ones in the middle. Checkpoints trained with early exits draft well this way."""

    def __init__(self, lm: LM, share: float) -> None:
        super().__init__(lm, share)
        if self._n > 0:
            self.runs = [range(self._units[-self._n].start), range(lm.n_layers, lm.n_layers)]


class Swift(_Chosen):
    """Random search that keeps the best layer set (SWIFT, arXiv 2410.06916): the one that predicts most of the newest
    tokens, tested by one pass over all of them."""

    def start(self) -> None:
        """Reset the search; the layers of the last sequence are the first candidate."""
        self._began, self._spent, self._tries, self._best = self._lm.clock(), 0.0, 0, -1.0

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Passes[None]:
        """Score another layer set, while time is left."""
        began = self._lm.clock()
        is_over = self._best >= _ENOUGH or self._tries >= _TRIES or self._n < 1
        if is_over or len(newest) <= SEEN or self._spent > _SHARE * (began - self._began):
            return
        runs = self.runs
        if self._best >= 0:  # the first candidate is the set in use
            runs = self._without(self._random.sample(range(1, len(self._units) - 1), self._n))
        score = yield from self._score(runs, kv, newest[-SEEN - 1 :], length - SEEN - 1)
        self._tries += 1
        if score > self._best:
            self._best, self.runs = score, runs
        self._spent += self._lm.clock() - began

    def _score(self, runs: Sequence[range], kv: KVCache, ids: Sequence[int], at: int) -> Passes[float]:
        """Return the share of `ids`, the first at position `at`, that these layers predict from the token before."""
        before = newest_before(self._lm, kv, at, chain.from_iterable(runs))
        rows, hidden = Rows.chain(ids[:-1], at), None
        for run in runs[:-1]:
            hidden = (yield ForwardRequest(self._lm, rows, before, layers=run, hidden=hidden)).hidden
        result = yield ForwardRequest(
            self._lm, rows, before, want=range(SEEN), logits_hook=top, layers=runs[-1], hidden=hidden
        )
        return sum(int(result.hook_output(i)[0]) == token for i, token in enumerate(ids[1:])) / SEEN


def newest_before(lm: LM, kv: KVCache, at: int, layers: Iterable[int]) -> Dense:
    """Return a copy of the newest slots before position `at` that SEEN rows or fewer attend to in these layers."""
    before = Dense(lm.shapes, kv.dtype, lm.device)
    for layer in (layer for layer in layers if lm.shapes[layer].shared_from is None):
        s = kv.newest(layer, _BEFORE + SEEN)
        s = compact(s, s.pos < at)
        before.put(layer, Slots(s.k.clone(), s.v.clone(), s.pos))
    return before


class Knn(Swift):
    """Layer search that starts from the set of the most similar earlier sequence (KNN-SSD, arXiv 2505.16162). An
    unfinished search is continued; without a similar sequence the search starts from scratch."""

    def __init__(self, lm: LM, share: float, known: SavedLayerSets) -> None:
        """`known`: layer sets of this model's earlier sequences, with the same number of skipped layers."""
        self._known = known
        super().__init__(lm, share)

    def start(self) -> None:
        super().start()
        self._found: LayerSet | None = None  # layer set of this sequence
        self._how = ""

    @property
    def about(self) -> str:
        return super().about + self._how

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Passes[None]:
        """Embed the sequence by one pass before the first draft and look up the nearest earlier one."""
        if self._n < 1 or len(newest) < 2:
            return
        if self._found is None:
            began = self._lm.clock()
            seen = newest[-SEEN - 1 : -1]
            like = yield from self._place(kv, seen, length - 1 - len(seen))
            self._found, near = self._known.near(like)
            self._how = f", as for an earlier text that is similar (cosine {near:.2f})"
            if self._found is None:
                self._how = ", by search: no earlier text is similar"
                self._found = LayerSet(like, self.runs)
            self.runs, self._tries = self._found.runs, self._found.tries
            # a score below _ENOUGH is discarded, because it was measured on another sequence
            self._best = self._found.best if self._found.best >= _ENOUGH else -1.0
            self._spent += self._lm.clock() - began
        yield from super().improve(kv, cache, newest, length)
        if self._best >= 0:
            self._found.runs, self._found.best, self._found.tries = self.runs, self._best, self._tries
            self._known.keep(self._found)

    def _place(self, kv: KVCache, ids: Sequence[int], at: int) -> Passes[Tensor]:
        """Return the normalized mean hidden state [E] before the last layers of `ids`, the first at position `at`."""
        below = range(self._units[-1].start)
        out = yield ForwardRequest(self._lm, Rows.chain(ids, at), newest_before(self._lm, kv, at, below), layers=below)
        assert out.hidden is not None
        return torch.nn.functional.normalize(out.hidden.float().mean(0), dim=0)


@dataclass(slots=True, eq=False)
class LayerSet:
    """Layer set found for one sequence."""

    like: Tensor  # [E] of length 1: embedding of the sequence
    runs: Sequence[range]
    best: float = -1.0  # share of tokens predicted; -1 = not scored
    tries: int = 0  # layer sets scored


class SavedLayerSets:
    """Layer sets of earlier sequences of one model, the most recently used last."""

    MOST = 32

    def __init__(self) -> None:
        self._found: list[LayerSet] = []

    def __deepcopy__(self, memo: object) -> SavedLayerSets:
        """Return itself, because copies of a sequence share it."""
        return self

    def near(self, like: Tensor) -> tuple[LayerSet | None, float]:
        """Return the layer set of the sequence nearest to embedding `like`, None if none is near; and the cosine."""
        if not self._found:
            return None, 0.0
        cosines = torch.stack([found.like for found in self._found]) @ like
        best = int(cosines.argmax())
        near = float(cosines[best])
        return (self._found[best] if near >= _NEAR else None), near

    def keep(self, found: LayerSet) -> None:
        """Add a layer set, and drop the least recently used one if there are too many."""
        self._found = [*(one for one in self._found if one is not found), found][-self.MOST :]


class Clasp(_Chosen):
    """Layer search by dynamic programming (CLaSp, arXiv 2505.24196): skips the layers without which a token's hidden
    state stays closest to the full model's. The programme runs over layers; each row has one number of skipped
    layers."""

    EVERY = 16  # drafts between two searches

    def start(self) -> None:
        """Restart the draft count."""
        self._drafts = 0

    def improve(self, kv: KVCache, cache: CacheReader, newest: Sequence[int], length: int) -> Passes[None]:
        """Run the pending token layer by layer in one pass; row j is its hidden state with j layers skipped."""
        self._drafts += 1
        if self._drafts % self.EVERY != 1 or self._n < 1:
            return
        n = self._n + 1
        rows = Rows([newest[-1]] * n, [length - 1] * n, torch.eye(n, dtype=torch.bool), tree=n, parent=(-1,) * n)
        hidden, sets = None, [frozenset[int]()] * n
        for i, unit in enumerate(self._units[:-1]):
            result = yield ForwardRequest(self._lm, rows, cache, layers=unit, hidden=hidden)
            assert result.hidden is not None
            through, whole = result.hidden, result.hidden[:1].float()
            if i and hidden is not None:
                kept, gone = (torch.cosine_similarity(t.float(), whole) for t in (through[1:], hidden[:-1]))
                # if j of j layers were skipped so far, there is no choice
                skips = ((gone > kept) | (torch.arange(1, n, device=gone.device) >= i)).tolist()
                takes = [False, *(skip and j < i for j, skip in enumerate(skips))]
                hidden = torch.stack([hidden[j - 1] if take else through[j] for j, take in enumerate(takes)])
                sets = [sets[j - 1] | {i} if take else sets[j] for j, take in enumerate(takes)]
            else:
                hidden = through
        self.runs = self._without(sets[-1])
