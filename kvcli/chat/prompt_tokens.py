"""What a model has read of a chat, as text and as ids; beyond its window the beginning of that in fewer slots.

What was said stays in the conversation, and its text is rendered whole. But the ids of its beginning are others: those
that stand for it in the text that was read. They mean nothing to a text that did not read it, so whoever holds them
asks first whether they still stand for anything.
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

LEAST = 64  # slots a head below which the beginning is as good as dropped
NEWEST = 1 / 8  # of the window, of the newest tokens, at least: they stay as they are
FILLED = 7 / 8  # of the window at most, then: the less is let go at once, the less is lost


@dataclass(frozen=True, slots=True)
class PromptMark:
    """How far a prompt of a conversation went."""

    text: int  # characters
    ids: int  # tokens


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The last prompt with its answer, as text and as the ids that were read for it."""

    text: str = ""
    ids: Sequence[int] = ()
    marks: tuple[PromptMark, ...] = ()  # ends of the prompts in it that are not condensed, rising
    begins: PromptMark = PromptMark(0, 0)  # what is

    def after(self, before: PromptTokens, prompt: str, n: int) -> PromptTokens:
        """The same, where it goes on from `before`; its last prompt had n ids."""

        def shares(end: PromptMark) -> bool:
            alike = prompt.startswith(before.text[: end.text])
            return alike and list(self.ids[: end.ids]) == list(before.ids[: end.ids])

        marks = filter(shares, before.marks)
        begins = before.begins if shares(before.begins) else PromptMark(0, 0)
        return replace(self, marks=(*marks, PromptMark(len(prompt), n)), begins=begins)

    def of(self, text: str, model: TextSession) -> tuple[str, Sequence[int]]:
        """What of it `text` begins with, and the ids for that."""
        if self.begins.ids and not model.is_compressed_prefix(self.ids[: self.begins.ids]):
            return "", ()  # what was read is gone
        if text.startswith(self.text):
            return self.text, self.ids
        return self.text[: self.begins.text], self.ids[: self.begins.ids]

    def condensed(self, model: TextSession, text: str, detail: dict[str, Any], cancel: Cancel) -> PromptTokens | None:
        """With more of its beginning in fewer slots, so that a prompt of this text fits its window; None = nothing
        helps.

        `detail`: of the error that said how far the prompt is too long.
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
    """Prompt and answer as text and as the ids the model saw, without the stop token, which the template rewrites."""
    answer = list(turn.ids)
    if turn.finish == "stop" and answer and answer[-1] in special_ids(tokenizer):
        answer.pop()
    if decode(tokenizer, answer) != turn.text:  # a stop string cut the text shorter than the ids
        return "", []
    return prompt + turn.text, [*ids, *answer]
