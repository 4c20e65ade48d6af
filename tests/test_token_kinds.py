"""Kinds of tokens by how they read, and where the template's and the system's text stand in a chat."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcli.chat.conversation import Chat
from kvcli.chat.model import Model
from kvcli.chat.transcript import LONG, chat_spans, kind_of, kinds_by_id
from kvcli.engine.sequence.state import (
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
    kinds_of,
)
from kvcli.models.text import decode, encode, render_prompt, render_text, special_ids
from kvcli.settings.profile import load_profile
from tests import make
from tests.small_tokenizers import DROPS_SYSTEM, KINDS, NO_SYSTEM, byte_fallback, demo

CHAT = [
    {"role": "system", "content": "Be brief, user."},
    {"role": "user", "content": "user: how deep is it?"},
    {"role": "assistant", "content": "It is 972 metres."},
    {"role": "user", "content": "  Really?\n"},
]


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (",", PUNCT), (" (", PUNCT), ("—", PUNCT), ("<=", PUNCT), ("$", PUNCT), ("':", PUNCT), ("|", PUNCT),
        (".", END), (" ?", END), ('!"', END), ("。", END), ("...", END),
        ("\n", NEWLINE), ("\n\n", NEWLINE), ("}\n", NEWLINE), (".\n", NEWLINE),
        ("", TEXT), (" ", TEXT), ("\t", TEXT), ("a", TEXT), (" the", TEXT), ("7", TEXT), ("a.", TEXT), ("\nif", TEXT),
        ("\N{REPLACEMENT CHARACTER}", TEXT), ("\N{GRINNING FACE}", TEXT),
    ],
)  # fmt: skip
def test_a_token_is_what_it_reads_like(token: str, kind: int) -> None:
    assert kind_of(token) == kind


@pytest.mark.parametrize("name", KINDS)
def test_every_id_of_every_kind_of_tokenizer_has_a_kind(name: str) -> None:
    tokenizer = KINDS[name]()
    table = kinds_by_id(tokenizer, len(tokenizer) + 7)
    assert len(table) == len(tokenizer) + 7
    assert table.endswith(bytes(7))
    assert {i for i, kind in enumerate(table) if kind == SPECIAL} == special_ids(tokenizer)
    ids = encode(tokenizer, "Hello, world\n")
    found = kinds_of(ids, torch.frombuffer(bytearray(table), dtype=torch.int8), []).tolist()
    by_kind = {
        kind: "".join(decode(tokenizer, [i]) for i, k in zip(ids, found, strict=True) if k == kind) for kind in found
    }
    assert by_kind[PUNCT].strip() == ","
    assert by_kind[NEWLINE].strip(" ") == "\n"
    assert set(found) == {TEXT, PUNCT, NEWLINE}


WITH_TOOLS = """\
{%- for m in messages %}
    {{- '<|user|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' if m.role == 'tool'
        else '<|' + m.role + '|>' + m.content }}{{ '<|end|>' }}
{%- endfor %}<|assistant|>"""


def spelled(tokenizer: Any, ids: list[int], spans: list[KindSpan], kind: int) -> str:
    return "".join(decode(tokenizer, ids[s.start : s.end]) for s in spans if s.kind == kind)


@pytest.mark.parametrize("make", [demo, byte_fallback])
def test_the_template_and_the_system_text_are_found_in_a_chat(make: Any) -> None:
    tokenizer = make()
    ids = render_prompt(tokenizer, CHAT)
    spans = chat_spans(tokenizer, CHAT, ids)
    text = render_text(tokenizer, CHAT)[0]
    assert spelled(tokenizer, ids, spans, SYSTEM).strip() == "Be brief, user."
    template = spelled(tokenizer, ids, spans, SPECIAL)
    for word in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"):
        assert template.count(word) == text.count(word) > 0
    assert "deep" not in template
    assert "972" not in template
    assert "Really" not in template


@pytest.mark.parametrize("make", [demo, byte_fallback])
def test_the_question_is_the_last_paragraph_of_the_last_message(make: Any) -> None:
    tokenizer = make()
    asked = "And how wide is it?"
    for content in (asked, f"The well is deep.\n\nIt is old.\n\n{asked}"):
        chat = [*CHAT[:3], {"role": "user", "content": content}]
        ids = render_prompt(tokenizer, chat)
        spans = chat_spans(tokenizer, chat, ids, {QUESTION})
        assert spelled(tokenizer, ids, spans, QUESTION).strip() == asked
        assert [s for s in spans if s.kind != QUESTION] == chat_spans(tokenizer, chat, ids)
    pasted = [*CHAT[:3], {"role": "user", "content": "It is old. " * LONG}]
    ids = render_prompt(tokenizer, pasted)
    assert not spelled(tokenizer, ids, chat_spans(tokenizer, pasted, ids, {QUESTION}), QUESTION)


def test_what_tools_said_is_found_in_a_chat() -> None:
    said = "depth = 972"
    chat = [*CHAT[:2], {"role": "tool", "content": said}, CHAT[3]]
    tokenizer = byte_fallback(WITH_TOOLS)
    ids = render_prompt(tokenizer, chat)
    assert spelled(tokenizer, ids, chat_spans(tokenizer, chat, ids), TOOLS).strip() == said


def test_each_paragraph_of_what_was_said_begins_an_example() -> None:
    chat = [*CHAT[:3], {"role": "user", "content": "one: 1\n\ntwo: 2\n \n\nthree: 3"}]
    ids = render_prompt(demo(), chat)
    spans = chat_spans(demo(), chat, ids, {SHOT})
    begins = [span.start for span in spans if span.kind == SHOT]
    text = [decode(demo(), ids[a:b]) for a, b in zip(begins, [*begins[1:], len(ids)], strict=True)]
    assert [one.split(":")[0].strip() for one in text[-3:]] == ["one", "two", "three"]
    assert [s for s in spans if s.kind != SHOT] == chat_spans(demo(), chat, ids)


def test_a_template_that_begins_otherwise_with_other_words_has_no_paragraphs() -> None:
    tokenizer = byte_fallback("{{ messages[0]['content'] | length }}: {{ messages[0]['content'] }}")
    chat = [{"role": "user", "content": "one: 1\n\ntwo: 2"}]
    assert chat_spans(tokenizer, chat, render_prompt(tokenizer, chat), {SHOT}) == []


def test_a_system_text_that_heads_the_first_question_is_found_there() -> None:
    for template in (NO_SYSTEM, DROPS_SYSTEM, None):
        tokenizer = byte_fallback(template)
        ids = render_prompt(tokenizer, CHAT[:2])
        spans = chat_spans(tokenizer, CHAT[:2], ids)
        assert spelled(tokenizer, ids, spans, SYSTEM).strip() == "Be brief, user."


def test_text_that_spells_a_control_token_moves_nothing() -> None:
    chat = [{"role": "system", "content": "Say <|end|> twice."}, {"role": "user", "content": "<|end|> what?"}]
    ids = render_prompt(demo(), chat)
    spans = chat_spans(demo(), chat, ids)
    assert spelled(demo(), ids, spans, SYSTEM) == "Say <|end|> twice."
    assert spelled(demo(), ids, spans, SPECIAL).count("<|end|>") == 2


def test_an_answer_in_other_tokens_does_not_move_what_is_around_it() -> None:
    ids = render_prompt(demo(), CHAT)
    first = render_prompt(demo(), CHAT[:2])
    answer = encode(demo(), CHAT[2]["content"])
    letters = [i for c in CHAT[2]["content"] for i in encode(demo(), c)]
    assert letters != answer
    heard = [*first, *letters, *ids[len(first) + len(answer) :]]
    spans = chat_spans(demo(), CHAT, heard)
    assert spelled(demo(), heard, spans, SYSTEM) == "Be brief, user."
    assert spelled(demo(), heard, spans, SPECIAL) == spelled(demo(), ids, chat_spans(demo(), CHAT, ids), SPECIAL)


def test_a_conversation_tells_the_session_where_its_system_text_stands() -> None:
    lm = make.model("llama", vocab_size=len(demo()), max_position_embeddings=1024)
    policy = {"name": "fastgen", "recovery": 0.0, "recent": 3, "sinks": 0}
    model = Model(lm, demo(), load_profile("exact").replace(exactness="approx", policy=policy))
    chat = Chat(model.text_session, "Answer in one word, always.")
    chat.send("What is deep? " * 20, max_new_tokens=3)
    session = model.text_session.session
    assert session.kinds is not None
    (at,) = [span for span in session.kind_spans if span.kind == SYSTEM]
    assert decode(demo(), session.ids[at.start : at.end]) == "Answer in one word, always."
    for layer in range(lm.n_layers):
        for pos in session.cache.slots(layer).pos:
            assert set(pos.tolist()) >= set(range(at.start, at.end))
            assert int((pos >= 0).sum()) < len(session.ids) / 2
    model.generate([5, 6, 7], max_new_tokens=2)
    assert session.kind_spans == []


def test_without_a_policy_no_kinds_are_looked_up() -> None:
    lm = make.model()

    class Silent:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"the tokenizer was asked for {name}")

    assert Model(lm, Silent(), load_profile("exact")).text_session.session.kinds is None  # type: ignore[arg-type]
