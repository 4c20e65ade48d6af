"""A model that drafts in a vocabulary of its own: the text is spelled anew for it, and what it says spelled back.

As transformers does for greedy text (universal assisted generation). Here tokens are drawn from the model that writes
and compared with guesses afterwards, so a guess spelled otherwise than it would have been costs a row and no more, and
that holds at any temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcli.drafts.draft_models.retokenized_text import RetokenizedText
from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from kvcli.drafts.draft_models.draft_model import DraftModel
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.rows import Hears
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage
    from kvcli.models.retokenizer import TokenMapping

FEW = 8  # candidates of a row that are spelled
AHEAD = 4  # tokens that it may take until a word is whole
KEPT = 1 << 16  # spelled candidates that are remembered


class Candidate(NamedTuple):
    """What one of its tokens would be."""

    ids: tuple[int, ...]  # in the vocabulary of the model that writes; none = it spells no whole character
    its: int
    score: float


class CrossVocabularyModel:
    """A guesser in another vocabulary. Of one of its tokens come several guesses, without a pass between, or none
    before the next: where it spells a part of a word that the other has in one token."""

    needs: Hears = ""  # rows of the one are no rows of the other

    def __init__(self, guesser: DraftModel, spelling: TokenMapping) -> None:
        self._it, self._to = guesser, spelling
        self._text = RetokenizedText(spelling)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._parts: Counter[int] = Counter()  # tokens of its that were parts of words lately
        self._forget_guesses()

    def _forget_guesses(self) -> None:
        self._row: list[Candidate] = []  # of the pass behind, the likeliest first
        self._path: list[int] = []  # guesses since then
        self._stem: list[int] = []  # its tokens that were read and are no guess yet
        self._n_read = 0  # its tokens that were read behind the text

    @property
    def name(self) -> str:
        return self._it.name

    @property
    def limit(self) -> int:
        return self._it.limit

    @property
    def length(self) -> int:
        return len(self._text.ids)

    @property
    def n_uncovered(self) -> int:
        """In its tokens."""
        return self._it.n_uncovered

    @property
    def max_depth(self) -> int:
        """In its tokens, of which a guess may take several; `_go_on` sees to that."""
        return self._it.max_depth

    def newest(self, n: int) -> list[int]:
        at, whole = self._text.at[0], len(self._text.ids)
        return self._text.ids[max(min(at, whole - 1), whole - n) :]

    def usage(self) -> list[Usage]:
        return self._it.usage()

    # ---- what the text is ----

    def start(self, ids: Sequence[int]) -> None:
        self._text.start(ids)
        self._it.start(self._text.its)
        self._forget_guesses()

    def extend(self, new: Sequence[int]) -> None:
        _, cut = self._text.at
        before = self._text.its[cut:]
        self._text.extend(new)
        now = self._text.its[cut:]
        if now[: len(before)] == before:
            self._it.extend(now[len(before) :])
        else:
            self._it.start(self._text.its)
        self._forget_guesses()

    def discard_cache(self) -> None:
        self._it.discard_cache()
        self._forget_guesses()

    def bind(self, past: DraftContext | None) -> None:
        self._it.bind(past)

    def observe(self, step: Step) -> None:
        """Of rows that are not its own there is nothing to learn."""

    # ---- passes ----

    def prefill(self) -> Steps[None]:
        yield from self._it.prefill()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        self._forget_guesses()
        if not self._text.its:  # nothing but marks that it does not have
            return [[]] * want
        if want > 1 or most < math.inf:
            return (yield from self._look(want))
        (row,) = yield from self._it.catch_up()
        if self._text.is_torn:  # of a character that has begun it knows nothing
            return [[]]
        return [(yield from self._named(row))]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """One behind the other."""
        (guess,) = ids
        self._path.append(guess)
        alive = self._alive()
        if not alive:
            return [[]]
        if len(alive[0].ids) > len(self._path):
            return [self._hook_output()]
        taken, word = alive[0], [*self._stem, alive[0].its]
        if (row := (yield from self._go_on(taken.its))) is None:
            return [[]]
        self._path, self._stem = [], []
        is_part = self._spelled((*word, int(row[0])))[: len(taken.ids)] != taken.ids
        self._parts[taken.its] = min(4, self._parts[taken.its] + 1) if is_part else max(0, self._parts[taken.its] - 1)
        if is_part:  # the two together are another token: what was guessed is wrong
            self._row = []
            return [[]]
        return [(yield from self._named(row))]

    def _look(self, want: int) -> Steps[list[list[float]]]:
        """What it would have said behind the last `want` tokens, where one of its own ends there as well: as far as
        that is behind the newest cut, and was not read before."""
        n_its = len(self._text.its)
        most = len(self._it.newest(max(1, min(self._it.n_uncovered, n_its - self._text.at[1]))))
        ends = self._text.ends(want, most)
        n = n_its - min((its for _, its in ends), default=n_its) + 1
        rows = yield from self._it.catch_up(n, most=n)
        at = {end: n - n_its + its - 1 for end, its in ends}  # a token's end -> its row
        found: list[list[float]] = []
        for end in range(len(self._text.ids) - want + 1, len(self._text.ids) + 1):
            self._row = self._candidates(rows[at[end]]) if end in at else []
            found.append(self._hook_output())
        self._row = []
        return found

    def _go_on(self, its: int) -> Steps[list[float] | None]:
        """The hook output behind one more of its tokens; None where it has no room for it."""
        if self._n_read >= self._it.max_depth:
            return None
        (row,) = yield from self._it.continue_from([its], [self._n_read - 1])
        self._n_read += 1
        return row

    def _named(self, row: Sequence[float]) -> Steps[list[float]]:
        """What it names next; where that is a part of a word, or of a character, once it has said the rest."""
        self._row = self._candidates(row)
        while len(self._stem) < AHEAD and self._row and (not self._row[0].ids or self._parts[self._row[0].its] > 0):
            part = self._row[0].its
            if (more := (yield from self._go_on(part))) is None:
                break
            self._stem.append(part)
            self._row = self._candidates(more)
        return self._hook_output()

    # ---- words ----

    def _candidates(self, row: Sequence[float]) -> list[Candidate]:
        wide = len(row) // 2
        pairs = zip(row[: min(FEW, wide)], row[wide:], strict=False)
        return [Candidate(self._spelled((*self._stem, int(i))), int(i), score) for i, score in pairs]

    def _spelled(self, its: tuple[int, ...]) -> tuple[int, ...]:
        """What such tokens are to the model that writes; nothing where they end within a character."""
        if (found := self._known.get(its)) is None:
            found = self._spell(its)
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[its] = found
        return found

    def _spell(self, its: tuple[int, ...]) -> tuple[int, ...]:
        *words, last = its
        if last in self._to.draft.special:
            mark = self._to.marks_back.get(last)
            end = () if mark is None else (mark,)
            return (*self._spelled(tuple(words)), *end) if words and end else end
        text = self._to.draft.text(its)
        return () if text.endswith(BROKEN) else tuple(self._to.target.ids(text))

    def _alive(self) -> list[Candidate]:
        path = tuple(self._path)
        return [c for c in self._row if c.ids[: len(path)] == path and c.ids]

    def _hook_output(self) -> list[float]:
        """The next token of each candidate that agrees with the path, with the score of the best that has it."""
        n, best = len(self._path), dict[int, float]()
        for c in self._alive():
            if len(c.ids) > n:
                best.setdefault(c.ids[n], c.score)
        return [*map(float, best), *best.values()]
