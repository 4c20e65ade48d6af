"""Prompts in two pieces: what is read before the question is known, and what comes behind it.

The pieces are cut before they become ids, so the context has the same ids whatever is asked about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.models.text import encode, render_text
from kvcli.quality.sample import Context, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = "\ufdd2"  # a noncharacter, which no text holds and no template touches


class Prompts:
    """The model's chat template around contexts and questions; plain text for a tokenizer without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        whole, self.has_template = render_text(tokenizer, [{"role": "user", "content": CUT}])
        self._suffix = whole.partition(CUT)[2]
        self._between = self._turn() if self.has_template else "\n\n"

    def context(self, text: str) -> list[int]:
        """Ids of everything in front of the first question."""
        whole, _ = render_text(self.tokenizer, [{"role": "user", "content": f"{text.replace(CUT, '')}\n\n{CUT}"}])
        return encode(self.tokenizer, whole.partition(CUT)[0], special=not self.has_template)

    def question(self, question: Question) -> list[int]:
        """Ids of a question and of how its answer begins."""
        if not self.has_template:
            return self._encode(f"{question.text}\nAnswer: {question.prefix}".rstrip())
        return self._encode(self._letters(question.text) + self._suffix + question.prefix)

    def next_question(self, question: Question, last: int) -> list[int]:
        """Ids of a further question in a conversation whose last answer ended with the token `last`."""
        ids = self._encode(self._between)
        return ids[ids[:1] == [last] :] + self.question(question)

    def longest(self, context: Context) -> int:
        """Tokens of the context with its longest question and answer, or with all of them in a dialogue."""
        parts = [len(self.question(q)) + q.max_new for q in context.questions]
        between = len(self._encode(self._between)) * (len(parts) - 1)
        return len(self.context(context.text)) + (sum(parts) + between if context.is_dialogue else max(parts))

    def tokens(self, text: str) -> int:
        """How many tokens a text is."""
        return len(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text) if text else []

    def _letters(self, text: str) -> str:
        """The question as the template would write it, with what spells a control token fenced."""
        whole, _ = render_text(self.tokenizer, [{"role": "user", "content": f"{CUT}{text}{CUT}"}])
        return whole.split(CUT)[1]

    def _turn(self) -> str:
        """What stands between an answer and the question after it."""
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": CUT},
            {"role": "user", "content": CUT},
        ]
        return render_text(self.tokenizer, messages)[0].split(CUT)[1]
