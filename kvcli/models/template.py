"""Chat templates of untrusted models, rendered in a sandboxed process.

A template is a program. The sandbox of jinja2 protects our objects, but not from endless loops or full memory; a
process can be killed. It starts with the tokenizer, to be ready when the weights are, and lives as long.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from inspect import signature
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

from kvcli.errors import BadInput, BadModel, UsageError
from kvcli.models.control_words import PLACE
from kvcli.models.refusals import blame_files
from kvcli.worker_process import Limits, Standby, WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Base class of replacements for methods of a tokenizer whose files may be untrusted.


class Guarded:
    """Owner of a worker process, stored in its tokenizer. A copy of the tokenizer gets a separate process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._whose = ref(tokenizer)  # a reference cycle would keep the process alive until garbage collection

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self._whose()
        assert tokenizer is not None
        return tokenizer

    def __reduce__(self) -> tuple[type[Self], tuple[PreTrainedTokenizerBase]]:
        return type(self), (self._tokenizer,)


ROOM = 8 << 20  # bytes of a conversation for which the first process is sized
BASE, FOLD = 256 << 20, 24  # bytes of address space: fixed, and per byte of conversation
OUTPUT = 1 << 20  # bytes of rendered text beyond the conversation: no model's own words are as long
LONGER = 8  # bytes of rendered text per byte of conversation, in addition
LIFE = 3600  # s of CPU time for everything that one process renders
START, SECONDS, PACE = 60.0, 5.0, 1 << 21  # s to start, s to render, bytes of conversation per further s
REPAIR = "get the model again, or repair its chat_template.jinja or tokenizer_config.json"
ASKED = {"tokenize": False, "add_generation_prompt": True}
KNOWN = {*ASKED, "tools", "documents"}  # options of transformers that are served here


class Chats(Guarded):
    """Replacement for a tokenizer's `apply_chat_template`: renders text with the beginning of an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._standby = Standby(_started, ROOM, START, _failed)
        self.start, self.stop = self._standby.start, self._standby.stop

    def __call__(self, conversation: Sequence[Mapping[str, str]], *others: Any, **options: Any) -> str:
        """Render the chat as text. `options`: those of ASKED, and variables for the template, such as `tools`.

        Raises jinja2.TemplateError if the template refuses the chat, BadModel if the template is bad.
        """
        others = (*others, *(signature(type(self._tokenizer).apply_chat_template).parameters.keys() & options) - KNOWN)
        # transformers would run the template in this process, without the sandbox
        if others or options.pop("tokenize", True) or "add_generation_prompt" not in options:
            raise UsageError(
                "the chat template of a model that kvcli loaded only returns the text of a prompt",
                lines=["it runs in a separate process, which has no other options"],
                try_=["tokenize=False, add_generation_prompt=True", "transformers.AutoTokenizer, if you trust it"],
            )
        variables = {**self._tokenizer.special_tokens_map, "messages": conversation, "tools": None, "documents": None}
        asked = {"template": self._source(), "variables": variables | options, "now": datetime.now().isoformat()}
        found = self._standby.ask(asked, lambda size: (SECONDS + size / PACE, OUTPUT + LONGER * size))
        if "refused" in found:
            from jinja2 import TemplateError

            raise TemplateError(str(found["refused"]))
        if not isinstance(found.get("text"), str):
            raise broken("its process returned no text")
        return str(found["text"])

    def _source(self) -> str:
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError as error:  # several templates without a default
            raise broken(str(error)) from None


def _started(room: int) -> WorkerProcess:
    return WorkerProcess("kvcli.models.template_worker", Limits(memory=BASE + FOLD * room, cpu=LIFE, wall=0.0))


def _failed(how: str, why: str) -> BadModel:
    if how != "heavy":
        return broken(why)
    return BadModel("the model's chat template cannot be used", code="template_too_heavy", lines=[why], try_=[REPAIR])


def broken(why: str) -> BadModel:
    return BadModel("the model's chat template cannot be used", code="bad_template", lines=[why], try_=[REPAIR])


# Layout of a conversation in a model's chat template, and a check that the prompt contains every message.
#
# A template is an untrusted program: it may drop a role, all but the last turn, or every text that is not a list of
# parts. It is first rendered with a mark in place of each text. Where the marks appear, the texts must appear.

Messages = Sequence[Mapping[str, Any]]

LEAST = 0.5  # share of the words of a text; with fewer found, the text counts as left out
_PLACES, _WORD = re.compile(PLACE.format(r"(\d+)")), re.compile(r"\w+")
THOUGHT = re.compile(r".*(?:</[^<>\s]+>|\[/[A-Z_]+\])", re.DOTALL)  # thought of an answer; templates may drop it
_NAMES = {"user": "question", "assistant": "answer", "system": "system text"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the messages in a rendered template. Without a template, messages are joined by blank lines."""

    messages: Messages
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables for the template besides the messages
    has_template: bool = True
    folds: bool = False  # the system text is put into the first question, because the template knows no system role
    in_parts: frozenset[str] = frozenset()  # roles whose text the template takes as a list of parts
    own: Sequence[str] = ()  # text of the template before each message and after the last
    order: Sequence[int] = ()  # message index at each position
    stands: Sequence[tuple[int, int] | None] = ()  # character range in the prompt of the message at each position

    @property
    def lost(self) -> list[int]:
        """Messages with text but without a position; for a system text put into the first question, that question."""
        lost = (i for i, m in enumerate(self.messages) if m["content"].strip() and i not in self.order)
        return sorted({i or int(self.folds) for i in lost})

    @property
    def between(self) -> str:
        """Template text before all messages but answers: it has the words that end and begin turns."""
        return "".join(w for w, i in zip(self.own, self.order, strict=False) if not self.is_answer(i))

    @property
    def changed(self) -> list[int]:
        """Messages that the prompt does not contain unchanged."""
        return sorted({*self.order} - {i for i, at in zip(self.order, self.stands, strict=True) if at is not None})

    def is_answer(self, i: int) -> bool:
        return bool(self.messages[i]["role"] == "assistant")

    def name(self, i: int) -> str:
        role = self.messages[i]["role"]
        return f"{_NAMES.get(role, role)} {sum(m['role'] == role for m in self.messages[: i + 1])}"


def layout(tokenizer: PreTrainedTokenizerBase, messages: Messages, variables: Mapping[str, Any]) -> Layout:
    """Return the first layout in which the template renders every message, apart from answers.

    `variables`: further variables that the template may read, such as `tools` or `enable_thinking`.
    Raises BadModel if there is none, and the template's own error if it refuses all layouts.
    """
    if not getattr(tokenizer, "chat_template", None):
        n = len(messages)
        return Layout(messages, variables, False, own=["", *["\n\n"] * (n - 1), ""], order=range(n))
    may_fold = messages[0]["role"] == "system" and messages[0]["content"].strip() and len(messages) > 1
    found, refused = list[Layout](), list[BadInput | BadModel]()
    for folds in (False, True) if may_fold else (False,):
        in_parts = frozenset[str]()
        for _ in ("as text", "what was lost in parts"):
            try:
                found.append(_tried(tokenizer, Layout(messages, variables, folds=folds, in_parts=in_parts)))
            except (BadInput, BadModel) as error:
                if error.code == "template_too_heavy":
                    raise
                refused += [] if in_parts else [error]
                in_parts = frozenset(m["role"] for m in messages)
            else:
                if not (lost := found[-1].lost):
                    return found[-1]
                in_parts = frozenset(messages[i]["role"] for i in lost)
    if not found:
        raise refused[-1]
    best = min(found, key=lambda one: sum(not one.is_answer(i) for i in one.lost))
    for i in best.lost:
        if not best.is_answer(i):
            raise _left_out(best, i, "none of it is in the prompt")
    return best


def _tried(tokenizer: PreTrainedTokenizerBase, laid: Layout) -> Layout:
    texts = [PLACE.format(i) if m["content"].strip() else m["content"] for i, m in enumerate(laid.messages)]
    pieces = _PLACES.split(render(tokenizer, laid, texts))
    return replace(laid, own=pieces[::2], order=[int(i) for i in pieces[1::2]])


def render(tokenizer: PreTrainedTokenizerBase, laid: Layout, texts: Sequence[str]) -> str:
    """Render the prompt of the messages with these texts."""
    from jinja2 import TemplateError

    if not laid.has_template:
        return "\n\n".join(texts)
    given: list[dict[str, Any]] = [{**m, "content": text} for m, text in zip(laid.messages, texts, strict=True)]
    if laid.folds:
        system, first = given.pop(0), given[0]
        first["content"] = f"{system['content']}\n\n{first['content']}"
    for message in given:
        if message["role"] in laid.in_parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
    with blame_files(broken):
        try:
            return str(tokenizer.apply_chat_template(given, **{**ASKED, **laid.variables}))
        except TemplateError as error:
            raise BadInput(
                f"the model's chat template refuses this conversation: {error}",
                code="chat_template",
                lines=["messages: " + ", ".join(m["role"] for m in given)],
                try_=["ask without a system message"],
            ) from None


def placed(laid: Layout, texts: Sequence[str], prompt: str) -> Layout:
    """Add to the layout the position of each message in the prompt, apart from outer white space and thoughts of
    answers.

    `texts`: of all messages. Each text is searched directly after the template's text before it, or anywhere later if
    the template's text differs with these messages. Raises BadModel if most of a text is missing.
    """
    at, stands = 0, list[tuple[int, int] | None]()
    for own, i in zip(laid.own, laid.order, strict=False):
        begins, said = prompt.find(own, at), texts[i].strip()
        is_near = begins >= 0 and not prompt[at:begins].strip()
        at = begins + len(own) if begins >= 0 else at
        start = prompt.find(said, at)
        if start < 0 and laid.is_answer(i):
            said = THOUGHT.sub("", said, count=1).strip()
            start = prompt.find(said, at)
        elif is_near and prompt[at : max(at, start)].strip():
            start = -1
        end = start + len(said)
        stands.append((at, end) if start >= 0 else None)
        at = end if start >= 0 else at
    laid = replace(laid, stands=stands)
    there = Counter(_WORD.findall(prompt.casefold())) if laid.changed else Counter[str]()
    for i in laid.changed:
        words = Counter(_WORD.findall(texts[i].casefold()))
        if (left := (words & there).total()) < LEAST * words.total():
            raise _left_out(laid, i, f"{left:,} of its {words.total():,} words are in the prompt")
    return laid


def _left_out(laid: Layout, i: int, how: str) -> BadModel:
    return BadModel(
        f"the model's chat template leaves out {laid.name(i)}",
        code="bad_template",
        lines=[how],
        try_=["a new conversation" if i < len(laid.messages) - 1 else "another model"],
    )
