"""The window: how many tokens a prompt leaves to its answer, and the ways out when they are too few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, ContextOverflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """Tokens."""

    limit: int  # of prompt and answer, by the profile
    most: int  # by the model
    reserve: int  # left to an answer, unless it is to be shorter
    fits: Callable[[], int] | None = None  # for which memory has room, asked when needed; None = nobody looked

    def room(self, prompt: int, new: int) -> int:
        """How long an answer to be of `new` tokens may get; refuses a prompt that leaves too little."""
        if not prompt:
            raise BadInput("the question is empty", code="empty_prompt")
        if new < 1:
            raise BadInput(f"max_new_tokens = {new}: an answer has at least one token", code="bad_length")
        reserve = min(new, self.reserve)
        if prompt + reserve > self.limit:
            fits = "" if self.limit < self.most else " (the limit of the model)"
            raise ContextOverflow(
                "the chat is longer than the context window",
                lines=[f"prompt {prompt:,} tokens + answer {reserve:,} tokens > {self.limit:,}{fits}"],
                detail={"prompt": prompt, "reserve": reserve, "limit": self.limit},
                try_=self._ways_out(prompt, reserve),
            )
        return min(new, self.limit - prompt)

    def _ways_out(self, prompt: int, reserve: int) -> list[str]:
        """What is enough when it is typed: for this prompt, in this model and in this machine's memory."""
        ways, most = [], self.most if self.fits is None else min(self.most, self.fits())
        if prompt + reserve <= most:
            ways.append(f"--ctx {prompt + reserve}")
        elif max(prompt, self.limit) < most:
            ways.append(f"--ctx {most} --max-new-tokens {most - prompt}")
        if prompt < self.limit:
            ways.append(f"--max-new-tokens {self.limit - prompt}")
        return [*ways, "attach a shorter document", "in a chat /drop or /undo, or --set context.on_overflow=drop"]


def refuse_longer(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    """Raises ContextOverflow for text that a window cannot hold in the longest tokens there are, before it is cut."""
    if len(text) <= 16 * limit or (least := len(text) // max(map(len, tokenizer.get_vocab()))) <= limit:
        return
    raise ContextOverflow(
        "the chat is longer than the context window",
        lines=[f"{len(text):,} characters, at least {least:,} tokens > {limit:,}"],
        detail={"prompt": least, "reserve": 0, "limit": limit},
        try_=["attach a shorter document", "kvcli summarize FILE, which reads it in parts"],
    )
