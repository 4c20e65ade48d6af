"""Prompts in two pieces: the context, which is prefilled before the question is known, and the question.

The pieces are split before tokenization, so the context has the same ids for every question. Contexts are fitted to a
length by the model's tokenizer: the largest size whose prompt and answer fit.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from kvcli.errors import BadInput
from kvcli.models.text import encode, render_text
from kvcli.quality.sample import Context, Question, SampleSeed, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 1.5  # an answer may be this much longer than a right one ...
SPARE = 16  # ... and this many tokens on top
CUT = "\ufdd2"  # a noncharacter, which no text contains and no template changes


class Prompts:
    """Prompt builder with the model's chat template; plain text for a tokenizer without a template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        whole, self.has_template = render_text(tokenizer, [{"role": "user", "content": CUT}])
        self._suffix = whole.partition(CUT)[2]
        self._between = self._turn() if self.has_template else "\n\n"

    def context(self, text: str) -> list[int]:
        """Return the ids of the prompt before the first question."""
        whole, _ = render_text(self.tokenizer, [{"role": "user", "content": f"{text.replace(CUT, '')}\n\n{CUT}"}])
        return encode(self.tokenizer, whole.partition(CUT)[0], special=not self.has_template)

    def question(self, question: Question) -> list[int]:
        """Return the ids of a question and of the prefix of its answer."""
        if not self.has_template:
            return self._encode(f"{question.text}\nAnswer: {question.prefix}".rstrip())
        return self._encode(self._letters(question.text) + self._suffix + question.prefix)

    def next_question(self, question: Question, last: int) -> list[int]:
        """Return the ids of a further question in a chat whose last answer ended with the token `last`."""
        ids = self._encode(self._between)
        return ids[ids[:1] == [last] :] + self.question(question)

    def longest(self, context: Context) -> int:
        """Return the tokens of the context with its longest question and answer, or with all of them in a dialogue."""
        parts = [len(self.question(q)) + q.max_new for q in context.questions]
        between = len(self._encode(self._between)) * (len(parts) - 1)
        return len(self.context(context.text)) + (sum(parts) + between if context.is_dialogue else max(parts))

    def tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text) if text else []

    def _letters(self, text: str) -> str:
        """Return the question as the template renders it, with text that spells control tokens escaped."""
        whole, _ = render_text(self.tokenizer, [{"role": "user", "content": f"{CUT}{text}{CUT}"}])
        return whole.split(CUT)[1]

    def _turn(self) -> str:
        """Return the template's text between an answer and the next question."""
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": CUT},
            {"role": "user", "content": CUT},
        ]
        return render_text(self.tokenizer, messages)[0].split(CUT)[1]


# ---- length ----


def fitted(task: Task, draw: SampleSeed, prompts: Prompts) -> Context:
    """Return the longest context of this draw with at most `draw.length` tokens.

    Raises BadInput if even the smallest form of the task is longer.
    """

    def written(size: int) -> tuple[Context, int]:
        context = _with_room(task.make(draw, size), prompts)
        return context, prompts.longest(context)

    best, n = written(task.least)
    if n > draw.length:
        raise BadInput(
            f"{task.name} does not fit into {draw.length:,} tokens",
            code="task_too_long",
            lines=[f"its shortest version takes about {n:,} tokens of this model, answer included"],
            detail={"task": task.name, "length": draw.length, "smallest": n},
            try_=["longer contexts", f"the tasks without {task.name}"],
        )
    low, high = task.least, task.least + draw.length + 1  # a unit of size is at least one token
    guess = 2 * task.least
    while high - low > 1:
        size = min(guess, high - 1)
        context, n = written(size)
        if n <= draw.length:
            low, best = size, context
            guess = min(2 * size, (low + high) // 2) if high > draw.length else (low + high) // 2
        else:
            high = size
            guess = (low + high) // 2
        guess = max(guess, low + 1)
    return best


def _with_room(context: Context, prompts: Prompts) -> Context:
    """Return the context with the token limit of each answer, which depends on the tokenizer."""
    asked = [replace(q, max_new=ceil(ROOM * prompts.tokens(q.expected)) + SPARE) for q in context.questions]
    return replace(context, questions=tuple(asked))
