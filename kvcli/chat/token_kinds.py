"""Token kinds: the kind of each id of a tokenizer, and the spans of template text and system text in a chat.

The kind of an id comes from the token's text. Chat templates also write words and line ends that are no control tokens
("user", "[INST]"): these are the text around the messages, wherever the template puts the messages.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kvcli.engine.sequence.token_kinds import (
    END,
    NEWLINE,
    PUNCT,
    QUESTION,
    SHOT,
    SPECIAL,
    SYSTEM,
    TEXT,
    TOOLS,
    KindSpan,
)
from kvcli.models.control_words import OPEN
from kvcli.models.layout import Layout
from kvcli.models.text import Messages, decode, encode, encode_with_places, lay_out, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDS = frozenset(".!?…\u3002\uff01\uff1f\u061f\u0964")  # marks that end a sentence
SIGNS = frozenset({"Sm", "Sc", "Sk"})  # categories of < = > | + $ ^ and their like; emoji are none of them
KINDS = {"system": SYSTEM, "tool": TOOLS}  # of messages, by role
LONG = 256  # tokens of a question at most; a longer last paragraph is the text that the question is about


def kinds_by_id(tokenizer: PreTrainedTokenizerBase, vocab: int) -> bytes:
    """Return the kind of each id as one byte, [V] (see `kvcli.engine.sequence.token_kinds`). Unused ids are text."""
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
    tokenizer: PreTrainedTokenizerBase, messages: Messages, ids: Sequence[int], marks: Collection[int] = ()
) -> list[KindSpan]:
    """Return the spans of template text (SPECIAL), system text (SYSTEM) and tool output (TOOLS) in a rendered chat.

    `marks`: further kinds to return. QUESTION is the last paragraph of the last message, unless it is longer than
    `LONG`; SHOT is the first token of each paragraph of a message. Spans that cannot be found are left out, such as an
    answer that the template changed and all text after it.
    """
    text, laid = lay_out(tokenizer, messages, lambda _: None)
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
