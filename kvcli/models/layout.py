"""How a model's chat template writes a conversation, and whether all that was said stands in what it wrote.

A template is a stranger's program: it may drop a role, all but the last turn, or every text that does not come as a
list of parts. It is tried with a mark in place of each text first. Where the marks come out, the texts must.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadInput, BadModel
from kvcli.models.control_words import PLACE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]

LEAST = 0.5  # of the words of a text: with fewer it counts as left out
_PLACES = re.compile(PLACE.format(r"(\d+)"))
_SPACE, _WORD = re.compile(r"\s*"), re.compile(r"\w+")
_THOUGHT = re.compile(r".*(?:</[^<>\s]+>|\[/[A-Z_]+\])", re.DOTALL)  # of an answer; templates may drop it
_NAMES = {"user": "question", "assistant": "answer"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a template writes which of the messages."""

    messages: Messages  # as it gets them: with the system text in the first question where it knows no such role
    in_parts: frozenset[str] = frozenset()  # roles whose text it takes as a list of parts
    own: Sequence[str] = ()  # what it writes itself, before each place and behind the last
    order: Sequence[int] = ()  # of the messages in the places

    @property
    def lost(self) -> list[int]:
        """The messages that have a text and no place."""
        return [i for i, m in enumerate(self.messages) if m["content"].strip() and i not in self.order]

    @property
    def between(self) -> str:
        """What it writes before what it does not take for an answer: the words that begin and end turns."""
        return "".join(
            own for own, i in zip(self.own, self.order, strict=False) if self.messages[i]["role"] != "assistant"
        )

    def name(self, i: int) -> str:
        role = self.messages[i]["role"]
        n = sum(m["role"] == role for m in self.messages[: i + 1])
        return f"{_NAMES[role]} {n}" if role in _NAMES else f"the {role} text"


def layout(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Layout:
    """The first way of handing the messages to the template in which it has a place for each.

    Raises BadModel where a question has none in any, and what the template itself says where it refuses them all.
    """
    folds = messages[0]["role"] == "system" and messages[0]["content"].strip() and len(messages) > 1
    refused: BadInput | BadModel | None = None
    found: list[tuple[int, Layout]] = []
    for given in (messages, fold_system(messages)) if folds else (messages,):
        in_parts = frozenset[str]()
        for _ in "as text", "in parts":
            try:
                one = _tried(tokenizer, given, in_parts)
            except (BadInput, BadModel) as error:
                if error.code == "template_too_heavy":
                    raise
                refused = refused if in_parts else error
                in_parts = frozenset(m["role"] for m in given)
                continue
            if not one.lost:
                return one
            found.append((sum(given[i]["role"] != "assistant" for i in one.lost), one))
            in_parts = frozenset(given[i]["role"] for i in one.lost)
    if refused is not None and not found:
        raise refused
    n_lost, best = min(found, key=lambda pair: pair[0])
    if n_lost:
        raise left_out(best, next(i for i in best.lost if best.messages[i]["role"] != "assistant"))
    return best


def _tried(tokenizer: PreTrainedTokenizerBase, messages: Messages, in_parts: frozenset[str]) -> Layout:
    marks = [
        {**m, "content": PLACE.format(i) if m["content"].strip() else m["content"]} for i, m in enumerate(messages)
    ]
    pieces = _PLACES.split(render(tokenizer, marks, in_parts))
    return Layout(messages, in_parts, pieces[::2], [int(i) for i in pieces[1::2]])


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, in_parts: frozenset[str]) -> str:
    """What the template makes of the messages."""
    from jinja2 import TemplateError

    given: list[dict[str, Any]] = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] in in_parts else dict(m)
        for m in messages
    ]
    try:
        return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise BadInput(
            f"the model's chat template refuses this conversation: {error}",
            code="chat_template",
            lines=["messages: " + ", ".join(m["role"] for m in messages)],
            try_=["ask without a system message"],
        ) from None


def changed(laid: Layout, texts: Sequence[str], prompt: str) -> list[int]:
    """The messages that do not stand in the prompt as they are, but for space at their ends.

    `texts`: of all messages. Each is looked for behind what the template wrote before it, and directly behind that
    unless the template writes otherwise with these texts. Of an answer the thought may be missing.
    Raises BadModel where most of a text is missing.
    """
    at, stands = 0, set[int]()
    for own, i in zip(laid.own, laid.order, strict=False):
        begins, said = prompt.find(own, at), texts[i].strip()
        is_near = begins >= 0 and not prompt[at:begins].strip()
        at = begins + len(own) if begins >= 0 else at
        start = _found(prompt, said, at, is_near=is_near)
        if start < 0 and laid.messages[i]["role"] == "assistant":
            said = _THOUGHT.sub("", said, count=1).strip()
            start = _found(prompt, said, at, is_near=False)
        if start >= 0:
            at = start + len(said)
            stands.add(i)
    missed = sorted({*laid.order} - stands)
    there = Counter(_WORD.findall(prompt.casefold())) if missed else Counter[str]()
    for i in missed:
        words = Counter(_WORD.findall(texts[i].casefold()))
        if (left := (words & there).total()) < LEAST * words.total():
            raise left_out(laid, i, f"of its {words.total():,} words {left:,} are in the prompt")
    return missed


def _found(prompt: str, said: str, at: int, *, is_near: bool) -> int:
    if not is_near:
        return prompt.find(said, at)
    space = _SPACE.match(prompt, at)
    start = space.end() if space else at
    return start if prompt.startswith(said, start) else -1


def left_out(laid: Layout, i: int, how: str = "none of it is in the prompt") -> BadModel:
    """The refusal of a prompt in which a message is missing."""
    return BadModel(
        f"the model's chat template leaves out {laid.name(i)}",
        code="bad_template",
        lines=[how],
        try_=["a new conversation" if i < len(laid.messages) - 1 else "another model"],
    )


def fold_system(messages: Messages) -> list[Mapping[str, str]]:
    """The same messages with the system text at the head of the first user message."""
    system, first, *rest = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]
