"""Blocks of an answer: runs of thoughts and of text, and calls, for protocols that name and number them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcli.api import End, Event, Text, Thought, ToolCall, Turn

Step = tuple[Literal["begin", "add", "end"], "AnswerBlock", str]  # what happens to a block; with "add", its new text


@dataclass(slots=True)
class AnswerBlock:
    """One block. `id`: of a call, the one that its result names. `name`: of the function that a call names."""

    kind: Literal["thought", "text", "call"]
    index: int  # number in the answer
    id: str
    name: str = ""
    text: str = ""  # so far; of a call: its arguments as JSON


class AnswerBlocks:
    """Splitter of an answer's events into blocks."""

    def __init__(self) -> None:
        self.all = list[AnswerBlock]()
        self._is_open = False

    def of(self, event: Event) -> Iterator[Step]:
        """Yield the steps of an event: one block after the other begins, grows and ends."""
        found = AnswerBlock("text", len(self.all), secrets.token_hex(12))
        if isinstance(event, Text | Thought):
            found.kind, found.text = "thought" if isinstance(event, Thought) else "text", event.text
        elif isinstance(event, ToolCall):
            found = AnswerBlock(
                "call", found.index, event.id, event.name, json.dumps(event.arguments, ensure_ascii=False)
            )
        is_same = self._is_open and found.kind == self.all[-1].kind != "call"
        if self._is_open and (isinstance(event, End) or (found.text and not is_same)):
            self._is_open = False
            yield "end", self.all[-1], ""
        if found.text and not is_same:
            self.all.append(found)
            added, found.text, self._is_open = found.text, "", True
            yield "begin", found, ""
            found.text = added
        elif found.text:
            self.all[-1].text += found.text
        if found.text:
            yield "add", self.all[-1], found.text


def blocks_of(turn: Turn) -> list[AnswerBlock]:
    """Return the blocks of a finished answer."""
    blocks = AnswerBlocks()
    events: list[Event] = [Thought(turn.thinking, ()), Text(turn.text, ()), *turn.tool_calls]
    for event in events:
        [*blocks.of(event)]
    return blocks.all
