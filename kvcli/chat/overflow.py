"""What the model is shown of a conversation that is longer than its window.

The oldest questions go first, each with its answer; documents stay, before the first question that is left. Nothing
leaves the conversation itself, and whatever makes it shorter brings back what then fits. A quarter of the window is
made free at once: what is shown begins otherwise then, and is read again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from shlex import quote
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Event, Text, Thought
from kvcli.chat.transcript import Message
from kvcli.documents import split_pages
from kvcli.errors import ContextOverflow
from kvcli.models.text import encode

if TYPE_CHECKING:
    from kvcli.chat.conversation import Chat
    from kvcli.schemas.chat import LeftOut

KEPT = 3 / 4  # of the window, that a shortened conversation fills at most
PAGE_MARK = 16  # tokens of the line that stands before a page
NOTES = 1 / 8  # of the window at most, for what is written of what goes
ASKED = (
    "Write notes for yourself on our conversation so far, in at most 120 words: facts, names, numbers, what was "
    "decided and what is open. Only the notes."
)
HEAD = "[What was said before this, in short]"


@dataclass(frozen=True, slots=True)
class VisibleMessages:
    """All of a conversation but its beginning."""

    left: int = 0  # messages from the first on that are not shown
    notes: str = ""  # what stands in their place

    def of(self, messages: Sequence[Message]) -> list[Message]:
        """What is shown of these messages, the last of which is a question."""
        gone, rest = messages[: self.left], list(messages[self.left :])
        if not gone or not rest:
            return rest
        first = rest[0]
        text = f"{HEAD}\n{self.notes}\n\n{first.text}" if self.notes else first.text
        documents = (*(d for message in gone for d in message.documents), *first.documents)
        return [replace(first, text=text, documents=documents), *rest[1:]]


def shown_of(chat: Chat, saved: LeftOut | None) -> VisibleMessages:
    """What the model was shown of a conversation when it was kept; all of it where that fits the window now."""
    if saved is None:
        return VisibleMessages()
    if chat.messages and len(chat.rendered(chat.messages, VisibleMessages()).ids) <= KEPT * chat.model.limit:
        return VisibleMessages()
    kept = "it has its notes on them" if saved.notes else "it does not know them"
    chat.note(f"the chat exceeds the context window; questions 1–{saved.messages // 2} are not sent; {kept}")
    return VisibleMessages(saved.messages, saved.notes)


def shorter(
    shown: VisibleMessages, n: int, size: Callable[[VisibleMessages], int], room: int
) -> VisibleMessages | None:
    """With more of n messages left out, as few as the window of `room` tokens asks for; None where all are too few.

    `size`: tokens of the prompt then.
    """
    choices = [VisibleMessages(left) for left in range(shown.left + 2, n + 1, 2)]
    for most in (int(room * KEPT), room):
        if (at := bisect_left(choices, True, key=lambda choice: size(choice) <= most)) < len(choices):
            return choices[at]
    return None


def fitting(chat: Chat, question: Message, detail: dict[str, Any]) -> list[str]:
    """What to type in place of the question's longest document, if that is what is too long: pages of it that fit."""
    tokens = {d.name: d.tokens(chat.model.tokenizer) for d in question.documents}
    if not tokens or (over := detail["prompt"] + detail["reserve"] - detail["limit"]) <= 0:
        return []
    longest = max(question.documents, key=lambda d: tokens[d.name])
    name, room, pages = quote(split_pages(longest.name)[0]), tokens[longest.name] - over, longest.sections
    sizes = accumulate(len(encode(chat.model.tokenizer, section.text)) + PAGE_MARK for section in pages)
    n = bisect_right([*sizes], room) if longest.unit == "page" else 0
    ways = [f"-f {name}:{pages[0].number}-{pages[n - 1].number}, pages that fit"] if n else []
    return [*ways, f"kvcli summarize {name} -m {quote(chat.called or chat.model.info.id)}, which reads it in parts"]


def leave_out(
    chat: Chat, question: Message, detail: dict[str, Any], options: dict[str, Any]
) -> Generator[Event, None, bool]:
    """Show the model less of a conversation from here on; whether that is any help.

    `detail`: of the error that said how far it is too long; `options`: those that the question is asked with.
    """
    if (how := chat.model.on_overflow) == "error":
        return False
    asked = [*chat.messages, question]
    cancel: Cancel = options.get("cancel") or (lambda: False)
    if how == "compress":
        heard = chat.heard.condensed(chat.model, chat.rendered(asked).text, detail, cancel)
        if heard is not None:
            n, fewer = heard.begins.ids, len(chat.heard.ids) - len(heard.ids)
            chat.heard = heard
            chat.note(f"the chat exceeds the context window; {n + fewer:,} tokens shrink to {n:,}; facts may be lost")
            return True
    of_notes = int(detail["limit"] * NOTES) if how == "summarize" else 0
    room = detail["limit"] - detail["reserve"] - of_notes
    now = shorter(chat.shown, len(chat.messages), lambda shown: len(chat.rendered(asked, shown).ids), room)
    if now is None:
        return False
    notes = (yield from _notes(chat, now.left, of_notes, options)) if of_notes else ""
    chat.shown = replace(now, notes=notes)
    kept = "it wrote notes on them" if notes else "it does not know them any more"
    if how == "compress":
        kept += ", because their KV cache could not be compressed"
    if not cancel():  # then nothing is answered, and all is as before
        chat.note(f"the chat exceeds the context window; questions 1–{now.left // 2} are not sent; {kept}")
    return True


def _notes(chat: Chat, left: int, n: int, options: dict[str, Any]) -> Generator[Event, None, str]:
    """What the model writes on the first messages, in n tokens, behind what it has read of them already."""
    asked = chat.rendered([*chat.messages[:left], Message("user", ASKED)])
    own = {"max_new_tokens": n, "cancel": options.get("cancel")}
    with suppress(ContextOverflow):  # what goes fills the window itself
        for event in chat.model.stream(asked.ids, messages=asked.contents, **own):
            if isinstance(event, End):
                return "" if event.turn.finish == "interrupted" else event.turn.text.strip()
            if not isinstance(event, Text | Thought):
                yield event
    return ""
