"""One text tokenized in two vocabularies; the second token sequence is updated while the first grows.

Tokens of a text are not the tokens of its parts, so the newest text is tokenized again each time. The text is cut at
word beginnings far before its end, and tokens before a cut are final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from kvcli.models.retokenizer import TokenMapping

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
        both = min(len(self.ids), len(ids))
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), both)
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
