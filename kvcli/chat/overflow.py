"""Selection of the messages that the model is shown of a chat that is longer than the context window.

The oldest questions are left out first, each with its answer. Documents are kept, before the first question shown. The
chat itself keeps all messages, and edits that make it shorter show again the messages that fit. A quarter of the window
is freed at once, because the shown part then begins differently and needs a new prefill.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from shlex import quote
from typing import TYPE_CHECKING, Any

from kvcli.chat.transcript import Message
from kvcli.documents import Document, split_pages
from kvcli.errors import BadInput, ContextOverflow
from kvcli.models.catalog import CATALOG
from kvcli.models.text import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The context window: tokens that a prompt leaves for its answer, and advice when they are too few.


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
        """Return options that make this prompt fit, within the model's limit and this machine's memory."""
        ways, most = [], self.most if self.fits is None else min(self.most, self.fits())
        if prompt + reserve <= most:
            ways.append(f"--ctx {prompt + reserve}")
        elif max(prompt, self.limit) < most:
            ways.append(f"--ctx {most} --max-new-tokens {most - prompt}")
        if prompt < self.limit:
            ways.append(f"--max-new-tokens {self.limit - prompt}")
        if prompt + reserve > self.most:
            ways += with_longer_windows(prompt + reserve)
        return [*ways, "attach a shorter document", "in a chat /drop or /undo, or --set context.on_overflow=drop"]


def with_longer_windows(tokens: int) -> list[str]:
    """Return the option for the smallest models of the list whose context window has room for `tokens`."""
    fits = [one for one in CATALOG if one.shape.limit >= tokens and not one.terms]
    names = [one.name for one in sorted(fits, key=lambda one: one.parameters)[:3]]
    return [f"-m {' or -m '.join(names)}: a longer context window"] if names else []


def refuse_longer(text: str, tokenizer: PreTrainedTokenizerBase, limit: int, *, is_here: bool = True) -> None:
    """Raise ContextOverflow, before tokenizing, for text that exceeds the window even in the longest tokens.
    `is_here`: this program runs the model, and may run another instead."""
    if len(text) <= 16 * limit or (least := len(text) // max(map(len, tokenizer.get_vocab()))) <= limit:
        return
    raise ContextOverflow(
        "the chat is longer than the context window",
        lines=[f"{len(text):,} characters, at least {least:,} tokens > {limit:,}"],
        detail={"prompt": least, "reserve": 0, "limit": limit},
        try_=[
            "kvcli summarize FILE, which reads it in parts",
            *(with_longer_windows(least) if is_here else ()),
            "attach a shorter document",
        ],
    )


KEPT = 3 / 4  # share of the context window that a shortened chat fills, at most
PAGE_MARK = 16  # tokens of the line before a page
NOTES = 1 / 8  # share of the context window for notes on the messages left out, at most
ASKED = (
    "Write notes for yourself on our conversation so far, in at most 120 words: facts, names, numbers, what was "
    "decided and what is open. Only the notes."
)
HEAD = "[What was said before this, in short]"


@dataclass(frozen=True, slots=True)
class VisibleMessages:
    """Messages that the model is shown: all of a chat except its beginning."""

    left: int = 0  # number of messages from the first on that are not shown
    notes: str = ""  # text in their place

    def of(self, messages: Sequence[Message]) -> list[Message]:
        """Return the shown part of messages that end with a question."""
        gone, rest = messages[: self.left], list(messages[self.left :])
        if not gone or not rest:
            return rest
        first = rest[0]
        text = f"{HEAD}\n{self.notes}\n\n{first.text}" if self.notes else first.text
        documents = (*(d for message in gone for d in message.documents), *first.documents)
        return [replace(first, text=text, documents=documents), *rest[1:]]


def shorter(
    shown: VisibleMessages, n: int, size: Callable[[VisibleMessages], int], room: int
) -> VisibleMessages | None:
    """Leave out more of n messages, as few as a window of `room` tokens needs; None if leaving out all is not enough.

    `size`: returns the tokens of the prompt for a selection.
    """
    choices = [VisibleMessages(left) for left in range(shown.left + 2, n + 1, 2)]
    for most in (int(room * KEPT), room):
        if (at := bisect_left(choices, True, key=lambda choice: size(choice) <= most)) < len(choices):
            return choices[at]
    return None


def fitting(
    documents: Sequence[Document], detail: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model: str, where: str
) -> list[str]:
    """Return commands against documents too long: pages that fit, or `kvcli summarize` with the options `where`."""
    tokens = {d.name: d.tokens(tokenizer) for d in documents}
    if not tokens or (over := detail["prompt"] + detail["reserve"] - detail["limit"]) <= 0:
        return []
    longest = max(documents, key=lambda d: tokens[d.name])
    name, room, pages = quote(split_pages(longest.name)[0]), tokens[longest.name] - over, longest.sections
    sizes = accumulate(len(encode(tokenizer, section.text)) + PAGE_MARK for section in pages)
    n = bisect_right([*sizes], room) if longest.unit == "page" else 0
    ways = [f"-f {name}:{pages[0].number}-{pages[n - 1].number}, pages that fit"] if n else []
    return [*ways, f"kvcli summarize {name} -m {quote(model)}{where}, which reads it in parts"]
