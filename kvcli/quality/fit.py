"""Fit contexts to a length: find the largest size whose prompt and answer fit, with the model's tokenizer."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kvcli.errors import BadInput
from kvcli.quality.prompt import Prompts
from kvcli.quality.sample import Context, SampleSeed, Task

ROOM = 1.5  # an answer may be this much longer than a right one ...
SPARE = 16  # ... and this many tokens on top


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
