"""Blocks of an answer: runs of thoughts and of text, and calls, for protocols that name and number them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcli.api import End, Event, Text, Thought, ToolCall, Turn


@dataclass(slots=True)
class AnswerBlock:
    """One block. `id`: of a call, the one that its result names. `name`: of the function that a call names."""

    kind: Literal["thought", "text", "call"]
    index: int  # number in the answer
    id: str
    name: str = ""
    text: str = ""  # so far; of a call: its arguments as JSON


Step = tuple[Literal["begin", "add", "end"], AnswerBlock, str]  # what happens to a block; with "add", its new text


def steps_of(event: Event, blocks: list[AnswerBlock]) -> Iterator[Step]:
    """Add an event to the blocks of an answer. Yield the steps: each block begins, grows and ends before the next."""
    new, text = AnswerBlock("text", len(blocks), secrets.token_hex(12)), ""
    if isinstance(event, Text | Thought):
        new.kind, text = "thought" if isinstance(event, Thought) else "text", event.text
    elif isinstance(event, ToolCall):
        new.kind, new.id, new.name = "call", event.id, event.name
        text = json.dumps(event.arguments, ensure_ascii=False)
    is_more = bool(blocks) and new.kind == blocks[-1].kind != "call"
    if blocks and (isinstance(event, End) or (text and not is_more)):
        yield "end", blocks[-1], ""
    if text and not is_more:
        blocks.append(new)
        yield "begin", new, ""
    if text:
        blocks[-1].text += text
        yield "add", blocks[-1], text


def blocks_of(turn: Turn) -> list[AnswerBlock]:
    """Return the blocks of a finished answer."""
    blocks = list[AnswerBlock]()
    events: list[Event] = [Thought(turn.thinking, ()), Text(turn.text, ()), *turn.tool_calls]
    for event in events:
        [*steps_of(event, blocks)]
    return blocks
