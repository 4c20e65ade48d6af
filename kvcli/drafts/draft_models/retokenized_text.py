"""One text in the ids of two vocabularies, the second kept in step while the first grows.

A piece of text has other tokens than its parts have, so what stands at the end is spelled anew each time; far behind
it, where a word begins, the text is cut, and what stands before a cut stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from kvcli.models.retokenizer import TokenMapping

PIECE = 48  # tokens between two cuts, or fewer
OPEN = 24  # newest tokens that are spelled anew, at least


class RetokenizedText:
    """`ids`, and `its`: the same text in the draft's. It is torn while it ends within a character."""

    def __init__(self, spelling: TokenMapping) -> None:
        self._to = spelling
        self.ids: list[int] = []
        self.its: list[int] = list(spelling.draft.opening)
        self.is_torn = False
        self._cuts = [(0, len(self.its))]  # tokens of either at which both part

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""
        both = min(len(self.ids), len(ids))
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), both)
        while (
            len(self._cuts) > 1 and self._cuts[-2][0] + PIECE + OPEN > same
        ):  # it was made with an eye on what is gone
            self._cuts.pop()
        self.ids = list(ids)
        self._spell()

    def extend(self, new: Sequence[int]) -> None:
        """These joined it."""
        self.ids += new
        self._spell()

    @property
    def at(self) -> tuple[int, int]:
        """Tokens of either before the newest cut: what stands behind it may still be spelled otherwise."""
        return self._cuts[-1]

    def ends(self, n: int, n_its: int) -> list[tuple[int, int]]:
        """Behind the newest cut, of the last n tokens and the last `n_its` of its: how many of either there are up to
        where a token of both ends."""
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
        """The next place to cut: before a control token, or far behind the end where a word begins."""
        far = self.ids[at : at + PIECE + OPEN]
        if (mark := next((i for i, token in enumerate(far) if token in self._to.marks), None)) is not None:
            return at + mark
        if len(far) < PIECE + OPEN:
            return None
        places = range(at + PIECE, at + PIECE // 2, -1)
        begins = next((i for i in places if self._begins_word(i)), None)
        return begins or next((i for i in places if not self._text(at, i).endswith(BROKEN)), at + PIECE)

    def _begins_word(self, at: int) -> bool:
        """Does a space begin here? Between two of them there is no seam."""
        before, both = self._text(at - 1, at), self._text(at - 1, at + 1)
        return both[len(before) :].startswith(" ") and not before.endswith(" ")

    def _put(self, at: int, end: int) -> bool:
        """Spell what stands between; True where it ends within a character, which is left out."""
        if at == end:
            return False
        text = self._text(at, end)
        whole = text.rstrip(BROKEN)
        self.its += self._to.draft.ids(whole, is_first=not at)
        return whole != text

    def _text(self, at: int, end: int) -> str:
        befores = (self.ids[max(0, at - n) : at] for n in range(1, 5))
        found = (self._to.target.text(self.ids[at:end], before) for before in befores)
        # the last byte of a character alone spoils all bytes that follow it, the whole character does not
        text = next(found)
        return text if BROKEN not in text else max([text, *found], key=lambda text: len(text.rstrip(BROKEN)))
