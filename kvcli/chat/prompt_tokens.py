"""Prompt tokens of a chat, as text and as ids. Beyond the context window, their beginning is condensed to fewer slots.

The chat keeps all messages, and their whole text is rendered. A condensed beginning has fewer ids than its text has
tokens. These ids are valid only in the text session that condensed it, so callers first check that the session still
has the condensed KV in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcli.models.text import decode, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.api import Cancel, Turn
    from kvcli.chat.text_session import TextSession

LEAST = 64  # slots per head; with fewer, the beginning is as good as dropped
NEWEST = 1 / 8  # share of the context window: newest tokens that are not condensed, if possible
FILLED = 7 / 8  # share of the context window filled afterwards, at most: evicting fewer slots at a time loses less


@dataclass(frozen=True, slots=True)
class PromptMark:
    """The end of one prompt of a chat."""

    text: int  # characters
    ids: int  # tokens


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The last prompt with its answer, as text and as the ids that were prefilled."""

    text: str = ""
    ids: Sequence[int] = ()
    marks: tuple[PromptMark, ...] = ()  # ends of prompts that are not condensed, rising
    begins: PromptMark = PromptMark(0, 0)  # end of the condensed beginning

    def after(self, before: PromptTokens, prompt: str, n: int) -> PromptTokens:
        """Add the marks of `before` that this prompt shares, and its own mark; it had n ids."""

        def shares(end: PromptMark) -> bool:
            alike = prompt.startswith(before.text[: end.text])
            return alike and list(self.ids[: end.ids]) == list(before.ids[: end.ids])

        marks = filter(shares, before.marks)
        begins = before.begins if shares(before.begins) else PromptMark(0, 0)
        return replace(self, marks=(*marks, PromptMark(len(prompt), n)), begins=begins)

    def of(self, text: str, model: TextSession) -> tuple[str, Sequence[int]]:
        """Return the known beginning of `text` and its ids."""
        if self.begins.ids and not model.is_compressed_prefix(self.ids[: self.begins.ids]):
            return "", ()  # the condensed KV is no longer in the cache
        if text.startswith(self.text):
            return self.text, self.ids
        return self.text[: self.begins.text], self.ids[: self.begins.ids]

    def condensed(self, model: TextSession, text: str, detail: dict[str, Any], cancel: Cancel) -> PromptTokens | None:
        """Condense more of the beginning, so that a prompt of this text fits the context window; None = impossible.

        `detail`: of the ContextOverflow error, with the lengths.
        """
        room = detail["limit"] - detail["reserve"]
        left = {mark: round(room * FILLED) - (detail["prompt"] - mark.ids) for mark in self.marks}
        shared = [m for m in self.marks if text.startswith(self.text[: m.text])]
        able = [m for m in shared if LEAST <= left[m] < m.ids and model.can_condense(self.ids[: m.ids])]
        newest = [m for m in able if detail["prompt"] - m.ids >= room * NEWEST]
        if not able:
            return None
        mark = newest[-1] if newest else able[0]
        n = left[mark]
        if (ids := model.condense(mark.ids, n, cancel)) is None:
            return None
        later = tuple(PromptMark(m.text, m.ids - mark.ids + n) for m in self.marks if m.ids > mark.ids)
        return replace(self, ids=[*ids, *self.ids[mark.ids :]], marks=later, begins=PromptMark(mark.text, n))


def tokens_of_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: Sequence[int], turn: Turn
) -> tuple[str, list[int]]:
    """Return prompt and answer as text and as ids, without the stop token, which the template rewrites."""
    answer = list(turn.ids)
    if turn.finish == "stop" and answer and answer[-1] in special_ids(tokenizer):
        answer.pop()
    if decode(tokenizer, answer) != turn.text:  # a stop string cut the text shorter than the ids
        return "", []
    return prompt + turn.text, [*ids, *answer]
