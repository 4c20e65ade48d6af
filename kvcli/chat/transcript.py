"""Messages of a chat: the tokens and kinds of the rendered prompt, the saved form, and the export."""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcli.api import Finish, ToolCall, Turn
from kvcli.documents import Document, with_documents
from kvcli.engine.sequence.state import END, NEWLINE, PUNCT, QUESTION, SHOT, SPECIAL, SYSTEM, TEXT, TOOLS, KindSpan
from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import write_private
from kvcli.models.control_words import OPEN
from kvcli.models.template import Layout
from kvcli.models.text import Messages, decode, encode, encode_with_places, lay_out, special_ids
from kvcli.schemas.turn import ChatDocument, Figures, SavedDocument, SavedMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.stats import Stats

# Token kinds: the kind of each id of a tokenizer, and the spans of template text and system text in a chat.
#
# The kind of an id comes from the token's text. Chat templates also write words and line ends that are no control
# tokens ("user", "[INST]"): these are the text around the messages, wherever the template puts the messages.

ENDS = frozenset(".!?…\u3002\uff01\uff1f\u061f\u0964")  # marks that end a sentence
SIGNS = frozenset({"Sm", "Sc", "Sk"})  # categories of < = > | + $ ^ and their like; emoji are none of them
KINDS = {"system": SYSTEM, "tool": TOOLS}  # of messages, by role
LONG = 256  # tokens of a question at most; a longer last paragraph is the text that the question is about


def kinds_by_id(tokenizer: PreTrainedTokenizerBase, vocab: int) -> bytes:
    """Return the kind of each id as one byte, [V] (see `kvcli.engine.sequence.state`). Unused ids are text."""
    special, known = special_ids(tokenizer), len(tokenizer)
    return bytes(
        SPECIAL if i in special else kind_of(decode(tokenizer, [i])) if i < known else TEXT for i in range(vocab)
    )


def kind_of(token: str) -> int:
    """Return the kind of a token with this text. Spaces alone are text, and so is half a character."""
    bare = token.strip()
    if not all(map(_is_mark, bare)):
        return TEXT
    if "\n" in token:
        return NEWLINE
    if not bare:
        return TEXT
    return END if ENDS & set(bare) else PUNCT


def _is_mark(char: str) -> bool:
    category = unicodedata.category(char)
    return category.startswith("P") or category in SIGNS


# --- a chat


def chat_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, ids: Sequence[int], marks: Collection[int] = (), **of: Any
) -> list[KindSpan]:
    """Return the spans of template text (SPECIAL), system text (SYSTEM) and tool output (TOOLS) in a rendered chat.

    `marks`: further kinds to return. QUESTION is the last paragraph of the last message, unless it is longer than
    `LONG`; SHOT is the first token of each paragraph of a message. Spans that cannot be found are left out, such as an
    answer that the template changed and all text after it. `of`: variables of the template, as `ids` were rendered.
    """
    text, laid = lay_out(tokenizer, messages, lambda _: None, of)
    parts = list(_parts(laid, text))
    cuts = _tokens_at(tokenizer, text, ids, sorted({at for start, end, _ in parts for at in (start, end)}))
    spans = [KindSpan(cuts[start], cuts[end], kind) for start, end, kind in parts if start in cuts and end in cuts]
    longest = LONG if QUESTION in marks else 0
    spans = [s for s in spans if s.start < s.end and (s.kind != QUESTION or s.end - s.start <= longest)]
    return (_shots(tokenizer, text, ids, parts) if SHOT in marks else []) + spans  # later spans override earlier ones


def _shots(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], parts: Sequence[tuple[int, int, int]]
) -> list[KindSpan]:
    """Return the first token of each paragraph outside the template text."""
    own = [(start, end) for start, end, kind in parts if kind == SPECIAL]
    if not own:  # no template text was found: it begins differently for other messages
        return []
    told = [(a, b) for (_, a), (b, _) in zip(own, [*own[1:], (len(text), 0)], strict=True) if a < b]
    begins = {a for a, _ in told} | {
        m.end() for m in re.finditer(r"\n\s*\n\s*", text) for a, b in told if a < m.end() < b
    }
    cuts = _tokens_at(tokenizer, text, ids, sorted(begins))
    return [KindSpan(at, at + 1, SHOT) for at in sorted(set(cuts.values())) if at < len(ids)]


def _parts(laid: Layout, text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, kind) in characters of `text`, in order."""
    at = 0
    for own, i, place in zip(laid.own, laid.order, laid.stands, strict=False):
        start, end = place or (at + len(own), at)
        if text[at:start].strip() != own.strip():
            return
        yield start - len(own), start, SPECIAL
        if place is None:
            return
        if (role := laid.messages[i]["role"]) in KINDS:
            yield start, end, KINDS[role]
        elif i == len(laid.messages) - 1:
            yield max(start, text.rfind("\n\n", start, end) + 2), end, QUESTION
        at = end
    if text[at:].strip() == laid.own[-1].strip():
        yield len(text) - len(laid.own[-1]), len(text), SPECIAL


def _tokens_at(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], places: Sequence[int]
) -> Mapping[int, int]:
    """Map characters of `text` to the index in `ids` of the token that begins there or next, if that is certain.

    A generated answer may have other tokens than the tokenizer would choose. The tokens that both tokenizations share
    before and after it are certain.
    """
    fresh, starts = _starts(tokenizer, text, places)
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(fresh, ids, strict=False)))
    most = min(len(fresh), len(ids)) - before
    behind = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(fresh[::-1], ids[::-1], strict=False)))
    behind = min(behind, most)
    found = {}
    for place, start in zip(places, starts, strict=True):
        if start <= before:
            found[place] = start
        elif start >= len(fresh) - behind:
            found[place] = start + len(ids) - len(fresh)
    return found


def _starts(tokenizer: PreTrainedTokenizerBase, text: str, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the ids of `text`, and for each position in it the number of tokens that begin before."""
    special = not getattr(tokenizer, "chat_template", None)
    if not getattr(tokenizer, "is_fast", False) or OPEN in text or special:
        # there are no offsets of the whole text: count the tokens of the text before each position
        return encode(tokenizer, text, special), [len(encode(tokenizer, text[:at], special)) for at in places]
    ids, spans = encode_with_places(tokenizer, text)
    begins = [start for start, _ in spans]
    return ids, [bisect_left(begins, at) for at in places]


# Prompt tokens of a chat, as text and as ids. Beyond the context window, their beginning is condensed to fewer slots.
#
# The chat keeps all messages, and their whole text is rendered. A condensed beginning has fewer ids than its text has
# tokens. These ids are valid only in the text session that condensed it, so callers first check that the session still
# has the condensed KV in its cache.

LEAST = 64  # slots per head; with fewer, the beginning is as good as dropped
NEWEST = 1 / 8  # share of the context window: newest tokens that are not condensed, if possible
FILLED = 7 / 8  # share of the context window filled afterwards, at most: evicting fewer slots at a time loses less


@dataclass(frozen=True, slots=True)
class PromptMark:
    """The end of one prompt of a chat."""

    text: int  # characters
    ids: int  # tokens


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The last prompt with its answer, as text and as the ids that were prefilled."""

    text: str = ""
    ids: Sequence[int] = ()
    marks: tuple[PromptMark, ...] = ()  # ends of prompts that are not condensed, rising
    begins: PromptMark = PromptMark(0, 0)  # end of the condensed beginning

    def after(self, before: PromptTokens, prompt: str, n: int) -> PromptTokens:
        """Add the marks of `before` that this prompt shares, and its own mark; it had n ids."""

        def shares(end: PromptMark) -> bool:
            alike = prompt.startswith(before.text[: end.text])
            return alike and list(self.ids[: end.ids]) == list(before.ids[: end.ids])

        marks = filter(shares, before.marks)
        begins = before.begins if shares(before.begins) else PromptMark(0, 0)
        return replace(self, marks=(*marks, PromptMark(len(prompt), n)), begins=begins)

    def of(self, text: str, is_compressed_prefix: Callable[[Sequence[int]], bool]) -> tuple[str, Sequence[int]]:
        """Return the known beginning of `text` and its ids."""
        if self.begins.ids and not is_compressed_prefix(self.ids[: self.begins.ids]):
            return "", ()  # the condensed KV is no longer in the cache
        if text.startswith(self.text):
            return self.text, self.ids
        return self.text[: self.begins.text], self.ids[: self.begins.ids]

    def condensed(
        self,
        text: str,
        detail: Mapping[str, Any],
        can_condense: Callable[[Sequence[int]], bool],
        condense: Callable[[int, int], list[int] | None],
    ) -> PromptTokens | None:
        """Condense more of the beginning, so that a prompt of this text fits the context window; None = impossible.

        `detail`: of the ContextOverflow error, with the lengths. `condense`: from the first so many tokens to so many
        slots per head, which get the returned ids; None = impossible.
        """
        room = detail["limit"] - detail["reserve"]
        left = {mark: round(room * FILLED) - (detail["prompt"] - mark.ids) for mark in self.marks}
        shared = [m for m in self.marks if text.startswith(self.text[: m.text])]
        able = [m for m in shared if LEAST <= left[m] < m.ids and can_condense(self.ids[: m.ids])]
        newest = [m for m in able if detail["prompt"] - m.ids >= room * NEWEST]
        if not able:
            return None
        mark = newest[-1] if newest else able[0]
        n = left[mark]
        if (ids := condense(mark.ids, n)) is None:
            return None
        later = tuple(PromptMark(m.text, m.ids - mark.ids + n) for m in self.marks if m.ids > mark.ids)
        return replace(self, ids=[*ids, *self.ids[mark.ids :]], marks=later, begins=PromptMark(mark.text, n))


def tokens_of_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: Sequence[int], turn: Turn
) -> tuple[str, list[int]]:
    """Return prompt and answer as text and as ids, without the stop token, which the template rewrites."""
    answer = list(turn.ids)
    if turn.finish == "stop" and answer and answer[-1] in special_ids(tokenizer):
        answer.pop()
    if decode(tokenizer, answer) != turn.text:  # a stop string cut the text shorter than the ids
        return "", []
    return prompt + turn.text, [*ids, *answer]


Role = Literal["user", "tool", "assistant"]
FINISH_MARKS = {
    "stop": "",
    "interrupted": " *[stopped]*",
    "length": " *[cut at the length limit]*",
    "loop": " *[stopped in a loop]*",
    "tool_calls": "",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat. Its documents precede its text in the prompt. Results of tools stand for a question."""

    role: Role
    text: str
    documents: tuple[Document, ...] = ()
    finish: Finish | None = None  # of an answer: how it ended
    figures: Figures | None = None  # of an answer: its times and token counts
    thinking: str = ""  # of an answer: saved, but left out of later prompts
    calls: tuple[ToolCall, ...] = ()  # of an answer
    results: tuple[str, ...] = ()  # in place of a question: of the calls before, in their order

    @property
    def content(self) -> str:
        """Text of the message in the prompt, with its documents."""
        return with_documents(self.text, self.documents)


def openai_form(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    """Return a call as templates and OpenAI's clients take it. `as_text`: its arguments as JSON text."""
    arguments = json.dumps(call.arguments) if as_text else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def contents_of(messages: Sequence[Message], *, as_text: bool = False) -> list[dict[str, Any]]:
    """Return messages as chat templates take them. `as_text`: arguments of calls as JSON text."""
    found, calls = list[dict[str, Any]](), tuple[ToolCall, ...]()
    for message in messages:
        if calls and message.results:  # without the calls, the results are shown as a question
            pairs = zip(calls, message.results, strict=False)
            found += [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": text} for c, text in pairs]
        else:
            found.append({"role": "user" if message.results else message.role, "content": message.content})
        if calls := message.calls:
            found[-1]["tool_calls"] = [openai_form(call, as_text=as_text) for call in calls]
    return found


def messages_of(saved: ChatDocument) -> list[Message]:
    return [
        Message(
            **{key: getattr(m, key) for key in ("role", "text", "finish", "figures", "thinking")},
            documents=documents_of(m.documents),
            calls=tuple(ToolCall(**one.model_dump()) for one in m.calls),
            results=tuple(m.results),
        )
        for m in saved.messages
    ]


def documents_of(saved: Sequence[SavedDocument]) -> tuple[Document, ...]:
    return tuple(Document(one.name, one.text, one.sha256) for one in saved)


def figures_of(stats: Stats) -> Figures:
    """Return the saved figures of a turn. Figures that were not measured are None."""
    return Figures.from_attributes(
        stats,
        first_token=stats.first_token or None,
        read_tok_s=stats.read_tok_s or None,
        decode_tok_s=stats.decode_tok_s or None,
    )


def export_chat(saved: ChatDocument, path: Path, *, overwrite: bool = False) -> Path:
    """Write the chat to `path`, in the format of its suffix."""
    path = Path(expanduser(path))
    write = {".md": markdown, ".json": _pretty, ".jsonl": json_lines}.get(path.suffix.lower())
    if write is None:
        raise UsageError(
            f"cannot tell the format from the name {path.name}",
            code="unknown_format",
            try_=["a name in .md, .json or .jsonl"],
        )
    if not path.parent.is_dir():
        raise BadInput(f"no such folder: {path.parent}", code="file_missing")
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists already", code="file_exists", try_=["another name, or remove it first"])
    with writing(path):
        write_private(path, write(saved))
    return path


def json_lines(saved: ChatDocument) -> str:
    """Return one message per line with `role` and `content`, as training and evaluation tools read them."""
    rows = [{"role": "system", "content": saved.system}] if saved.system else []
    rows += contents_of(messages_of(saved), as_text=True)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def markdown(saved: ChatDocument) -> str:
    """Return markdown for people: headings by speaker, documents by name only."""
    parts = [f"# {saved.title or first_words(saved.messages) or 'Conversation'}"]
    if saved.system:
        parts.append(f"## System\n\n{saved.system}")
    for message in messages_of(saved):
        if message.role == "user":
            files = "".join(f"*{d.name}, {d.lines:,} line{'s' * (d.lines != 1)}*\n\n" for d in message.documents)
            parts.append(f"## You\n\n{files}{message.text}")
        elif message.results:
            parts.append(f"## Tools\n\n{message.text}")
        else:
            mark = FINISH_MARKS[message.finish or "stop"]
            calls = "".join(f"\n\n`{call.name} {json.dumps(call.arguments)}`" for call in message.calls)
            thought = f"*{' '.join(message.thinking.split())}*\n\n" if message.thinking else ""
            parts.append(f"## {saved.model}\n\n{thought}{message.text}{mark}{calls}")
    return "\n\n".join(parts) + "\n"


def first_words(messages: Sequence[Message] | Sequence[SavedMessage], width: int = 60) -> str | None:
    """Return a title made of the first question."""
    if not messages:
        return None
    words = " ".join(messages[0].text.split())
    return words if len(words) <= width else words[: width - 1].rsplit(" ", 1)[0] + "…"


def _pretty(saved: ChatDocument) -> str:
    return json.dumps(saved.document(), ensure_ascii=False, indent=2) + "\n"
