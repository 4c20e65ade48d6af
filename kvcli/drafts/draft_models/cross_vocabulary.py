"""Draft model with another vocabulary: the sequence is tokenized for it, and its tokens are converted back.

This is universal assisted generation in transformers, which is limited to greedy decoding. Here tokens are sampled from
the target model and compared with draft tokens afterwards. A draft token that is tokenized differently costs a row and
changes no answer, at any temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.engine.sequence.state import shared_length
from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import Passes
    from kvcli.kv.slots import Usage
    from kvcli.models.retokenizer import TokenMapping

# One text tokenized in two vocabularies; the second token sequence is updated while the first grows.
#
# Tokens of a text are not the tokens of its parts, so the newest text is tokenized again each time. The text is cut at
# word beginnings far before its end, and tokens before a cut are final.

PIECE = 48  # maximum tokens between two cuts
OPEN = 24  # minimum newest tokens that are tokenized again


class RetokenizedText:
    """Text as `ids` of the target model and `its` ids of the draft model. Torn: it ends within a character."""

    def __init__(self, spelling: TokenMapping) -> None:
        self._to = spelling
        self.ids: list[int] = []
        self.its: list[int] = list(spelling.draft.opening)
        self.is_torn = False
        self._cuts = [(0, len(self.its))]  # token counts (target, draft) at cuts of both sequences

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""
        same = shared_length(self.ids, ids)
        # a cut depends on the PIECE + OPEN tokens after the cut before it, so one that read changed tokens is dropped
        while len(self._cuts) > 1 and self._cuts[-2][0] + PIECE + OPEN > same:
            self._cuts.pop()
        self.ids = list(ids)
        self._spell()

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence."""
        self.ids += new
        self._spell()

    @property
    def at(self) -> tuple[int, int]:
        """Token counts (target, draft) before the newest cut; tokens after it may still change."""
        return self._cuts[-1]

    def ends(self, n: int, n_its: int) -> list[tuple[int, int]]:
        """Return the pairs (target tokens, draft tokens) after the newest cut at which a token ends in both
        vocabularies, among the last n target tokens and the last `n_its` draft tokens."""
        (at, its_at), to = self._cuts[-1], self._to
        mine, other = self.ids[at:], self.its[its_at:]
        before, its_before = self.ids[max(0, at - 1) : at], self.its[max(0, its_at - 1) : its_at]
        newest = range(max(0, len(mine) - n) + 1, len(mine) + 1)
        its_newest = range(max(0, len(other) - n_its) + 1, len(other) + 1)
        lengths = {len(to.draft.text(other[:end], its_before)): its_at + end for end in its_newest}
        found = ((at + end, to.target.text(mine[:end], before)) for end in newest)
        return [(end, lengths[len(text)]) for end, text in found if len(text) in lengths and not text.endswith(BROKEN)]

    def _spell(self) -> None:
        at, its_at = self._cuts[-1]
        del self.its[its_at:]
        while (end := self._next(at)) is not None:
            self._put(at, end)
            if end < len(self.ids) and self.ids[end] in self._to.marks:
                mark, end = self._to.marks[self.ids[end]], end + 1
                if mark is not None and self.its[-1:] != [mark]:
                    self.its.append(mark)
            self._cuts.append((end, len(self.its)))
            at = end
        self.is_torn = self._put(at, len(self.ids))

    def _next(self, at: int) -> int | None:
        """Return the next cut: before a control token, or at a word beginning far before the end."""
        far = self.ids[at : at + PIECE + OPEN]
        if (mark := next((i for i, token in enumerate(far) if token in self._to.marks), None)) is not None:
            return at + mark
        if len(far) < PIECE + OPEN:
            return None
        places = range(at + PIECE, at + PIECE // 2, -1)
        begins = next((i for i in places if self._begins_word(i)), None)
        return begins or next((i for i in places if not self._text(at, i).endswith(BROKEN)), at + PIECE)

    def _begins_word(self, at: int) -> bool:
        """True if a word begins here: a space that follows no space, because spaces may be merged into one token."""
        before, both = self._text(at - 1, at), self._text(at - 1, at + 1)
        return both[len(before) :].startswith(" ") and not before.endswith(" ")

    def _put(self, at: int, end: int) -> bool:
        """Tokenize the text of these ids. Returns True if it ends within a character, which is left out."""
        if at == end:
            return False
        text = self._text(at, end)
        whole = text.rstrip(BROKEN)
        self.its += self._to.draft.ids(whole, is_first=not at)
        return whole != text

    def _text(self, at: int, end: int) -> str:
        befores = (self.ids[max(0, at - n) : at] for n in range(1, 5))
        found = (self._to.target.text(self.ids[at:end], before) for before in befores)
        # a character's last byte, decoded alone, makes the bytes after it undecodable; the whole character does not
        text = next(found)
        return text if BROKEN not in text else max([text, *found], key=lambda text: len(text.rstrip(BROKEN)))


FEW = 8  # candidates of a row that are converted
AHEAD = 4  # maximum draft model tokens until a word is whole
KEPT = 1 << 16  # cached conversions


class Candidate(NamedTuple):
    """Candidate: one token of the draft model, converted."""

    ids: tuple[int, ...]  # in the target vocabulary; empty = ends within a character
    its: int
    score: float


class CrossVocabularyModel(DraftModel):
    """Draft model of another vocabulary. One of its tokens becomes several draft tokens without a pass between, or none
    before its next token if it is a part of a word that is one token of the target model."""

    def __init__(self, draft_model: DraftModel, spelling: TokenMapping) -> None:
        self._it, self._to = draft_model, spelling
        self._text = RetokenizedText(spelling)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._parts: Counter[int] = Counter()  # draft model tokens that were parts of words lately
        self._forget_draft_tokens()

    def _forget_draft_tokens(self) -> None:
        self._row: list[Candidate] = []  # candidates of the last pass, the likeliest first
        self._path: list[int] = []  # draft tokens since then
        self._stem: list[int] = []  # draft model tokens that have been through a pass and are no draft token yet
        self._n_read = 0  # draft model tokens after the sequence that have been through a pass

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
        """Uncovered tokens, in tokens of the draft model."""
        return self._it.n_uncovered

    @property
    def max_depth(self) -> int:
        """Maximum depth in draft model tokens. A draft token may need several, so `_go_on` checks the limit."""
        return self._it.max_depth

    def newest(self, n: int) -> list[int]:
        at, whole = self._text.at[0], len(self._text.ids)
        return self._text.ids[max(min(at, whole - 1), whole - n) :]

    def usage(self) -> list[Usage]:
        return self._it.usage()

    # ---- the sequence ----

    def start(self, ids: Sequence[int]) -> None:
        self._text.start(ids)
        self._it.start(self._text.its)
        self._forget_draft_tokens()

    def extend(self, new: Sequence[int]) -> None:
        _, cut = self._text.at
        before = self._text.its[cut:]
        self._text.extend(new)
        now = self._text.its[cut:]
        if now[: len(before)] == before:
            self._it.extend(now[len(before) :])
        else:
            self._it.start(self._text.its)
        self._forget_draft_tokens()

    def discard_cache(self) -> None:
        self._it.discard_cache()
        self._forget_draft_tokens()

    def bind(self, context: DraftContext | None) -> None:
        self._it.bind(context)

    # ---- passes ----

    def prefill(self) -> Passes[None]:
        yield from self._it.prefill()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        self._forget_draft_tokens()
        if not self._text.its:  # only control tokens that the draft model lacks
            return [[]] * want
        if want > 1 or most < math.inf:
            return (yield from self._look(want))
        (row,) = yield from self._it.catch_up()
        if self._text.is_torn:  # the draft model cannot continue within a character
            return [[]]
        return [(yield from self._named(row))]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Return the hook output after one more draft token; the draft is a chain."""
        (token,) = ids
        self._path.append(token)
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
        if is_part:  # both tokens together are another target token, so the draft token is wrong
            self._row = []
            return [[]]
        return [(yield from self._named(row))]

    def _look(self, want: int) -> Passes[list[list[float]]]:
        """Run a trial pass: return the predictions after those of the last `want` tokens at which a draft model token
        ends as well. Tokens before the newest cut and tokens covered before have none."""
        n_its = len(self._text.its)
        most = len(self._it.newest(max(1, min(self._it.n_uncovered, n_its - self._text.at[1]))))
        ends = self._text.ends(want, most)
        n = n_its - min((its for _, its in ends), default=n_its) + 1
        rows = yield from self._it.catch_up(n, most=n)
        at = {end: n - n_its + its - 1 for end, its in ends}  # end of a target token -> row
        found: list[list[float]] = []
        for end in range(len(self._text.ids) - want + 1, len(self._text.ids) + 1):
            self._row = self._candidates(rows[at[end]]) if end in at else []
            found.append(self._hook_output())
        self._row = []
        return found

    def _go_on(self, its: int) -> Passes[list[float] | None]:
        """Return the hook output after one more draft model token; None if it exceeds the maximum depth."""
        if self._n_read >= self._it.max_depth:
            return None
        (row,) = yield from self._it.continue_from([its], [self._n_read - 1])
        self._n_read += 1
        return row

    def _named(self, row: Sequence[float]) -> Passes[list[float]]:
        """Return the hook output for the next token. If the best candidate is a part of a word or of a character, the
        draft model continues until it is whole."""
        self._row = self._candidates(row)
        while len(self._stem) < AHEAD and self._row and (not self._row[0].ids or self._parts[self._row[0].its] > 0):
            part = self._row[0].its
            if (more := (yield from self._go_on(part))) is None:
                break
            self._stem.append(part)
            self._row = self._candidates(more)
        return self._hook_output()

    # ---- conversion ----

    def _candidates(self, row: Sequence[float]) -> list[Candidate]:
        wide = len(row) // 2
        pairs = zip(row[: min(FEW, wide)], row[wide:], strict=False)
        return [Candidate(self._spelled((*self._stem, int(i))), int(i), score) for i, score in pairs]

    def _spelled(self, its: tuple[int, ...]) -> tuple[int, ...]:
        """Return the target tokens of these draft model tokens; empty if they end within a character."""
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
        """Return the next token of each candidate that agrees with the path, with the best score for that token."""
        n, best = len(self._path), dict[int, float]()
        for c in self._alive():
            if len(c.ids) > n:
                best.setdefault(c.ids[n], c.score)
        return [*map(float, best), *best.values()]
