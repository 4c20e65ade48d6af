"""The context window: tokens that a prompt leaves for its answer, and advice when they are too few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, ContextOverflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """Limits of the context window, in tokens."""

    limit: int  # of prompt and answer, by the profile
    most: int  # by the model
    reserve: int  # for the answer, unless it is to be shorter
    fits: Callable[[], int] | None = None  # tokens that fit in memory, computed on demand; None = not estimated

    def room(self, prompt: int, new: int) -> int:
        """Return the tokens left for an answer of at most `new` tokens; refuses a prompt that leaves too few."""
        if not prompt:
            raise BadInput("there is nothing to ask", code="empty_prompt")
        if new < 1:
            raise BadInput(f"max_new_tokens = {new}: an answer has at least one token", code="bad_length")
        reserve = min(new, self.reserve)
        if prompt + reserve > self.limit:
            fits = "" if self.limit < self.most else " (the model's limit)"
            raise ContextOverflow(
                "the conversation is longer than the window",
                lines=[f"{prompt:,} tokens of text + {reserve:,} for the answer > {self.limit:,}{fits}"],
                detail={"prompt": prompt, "reserve": reserve, "limit": self.limit},
                try_=self._ways_out(prompt, reserve),
            )
        return min(new, self.limit - prompt)

    def _ways_out(self, prompt: int, reserve: int) -> list[str]:
        """Return options that make this prompt fit, within the model's limit and this machine's memory."""
        ways, most = [], self.most if self.fits is None else min(self.most, self.fits())
        if prompt + reserve <= most:
            ways.append(f"--ctx {prompt + reserve}")
        elif max(prompt, self.limit) < most:
            ways.append(f"--ctx {most} --max-new-tokens {most - prompt}")
        if prompt < self.limit:
            ways.append(f"--max-new-tokens {self.limit - prompt}")
        return [*ways, "attach a shorter document", "in a chat /drop or /undo, or --set context.on_overflow=drop"]


def refuse_longer(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    """Raise ContextOverflow, before tokenizing, for text that exceeds the window even in the longest tokens."""
    if len(text) <= 16 * limit or (least := len(text) // max(map(len, tokenizer.get_vocab()))) <= limit:
        return
    raise ContextOverflow(
        "the conversation is longer than the window",
        lines=[f"{len(text):,} characters are at least {least:,} tokens > {limit:,}"],
        detail={"prompt": least, "reserve": 0, "limit": limit},
        try_=["attach a shorter document", "kvcli summarize FILE, which reads it in parts"],
    )
