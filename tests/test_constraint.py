"""Answers held to schemas and grammars by llguidance: always whole or said to be cut, and the same with drafting."""

from __future__ import annotations

import builtins
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

import kvcli
from kvcli.chat.model import Model
from kvcli.engine.sequence.constraint import Vocabulary, is_whole
from kvcli.engine.sequence.sampler import Sampler
from kvcli.errors import BadInput, BadModel
from kvcli.installing import pip
from kvcli.models.grammar import Grammar
from tests import small_tokenizers
from tests.fake_model import FakeTokenizer

pytest.importorskip("llguidance", reason="what keeps to schemas and grammars; comes with the dev extra")

V = 2048
SCHEMA = {
    "type": "object",
    "properties": {
        "depot": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "boxes": {"type": "integer", "minimum": 0, "maximum": 999},
        "goods": {"type": "array", "items": {"enum": ["oil", "grain", "salt"]}, "minItems": 1, "maxItems": 3},
        "open": {"type": ["boolean", "null"]},
    },
    "required": ["depot", "boxes", "goods", "open"],
    "additionalProperties": False,
}
RULES = """
root ::= "The stock of depot " name " is " [0-9]{1,4} " boxes of " good "."
name ::= [A-Z] [a-z]+
good ::= "oil" | "grain" | "salt"
"""
QUESTION = "What is the stock of depot Gimness?"


def fits(text: str) -> bool:
    """Whether it is JSON of the schema above."""
    found = json.loads(text)
    return (
        list(found) == list(SCHEMA["properties"])
        and re.fullmatch("[A-Z][a-z]{2,8}", found["depot"]) is not None
        and found["boxes"] in range(1000)
        and set(found["goods"]) <= {"oil", "grain", "salt"}
        and 1 <= len(found["goods"]) <= 3
        and found["open"] in (True, False, None)
    )


@cache
def model(profile: str) -> Model:
    sets = {"load.dtype": "fp32", "spec.adaptive": False} if profile != "exact" else {"load.dtype": "fp32"}
    return kvcli.load("demo", profile=profile, set=sets)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(small_tokenizers.demo(), V, [5, 0])


@pytest.mark.parametrize("sample", [{"temperature": 0.0}, *({"temperature": 1.0, "seed": n} for n in range(4))])
@pytest.mark.parametrize("profile", ["ngram", "fafo", "lookahead"])
def test_an_answer_fits_its_schema_with_any_drafter(profile: str, sample: dict[str, Any]) -> None:
    turns = [
        model(name).generate(QUESTION, constraint=model(name).constraint(Grammar.of_schema(SCHEMA)), **sample)
        for name in ("exact", profile)
    ]
    assert turns[0].ids == turns[1].ids
    assert turns[0].finish == "stop"
    assert fits(turns[0].text)
    assert turns[1].stats.drafted_passes


def test_drafts_that_fit_are_taken() -> None:
    m = model("ngram")
    chat = m.chat()
    chat.attach(kvcli.read_document("demo:report"))
    turn = chat.send(QUESTION, constraint=m.constraint(Grammar.of_text(RULES)), temperature=0.0)
    assert turn.text == "The stock of depot Gimness is 59 boxes of oil."
    assert turn.stats.accepted_tokens > 4
    free = chat.send("Who are you?", temperature=0.0)  # the next answer is held to nothing
    assert free.text.startswith("I am the demo model")


def test_an_answer_that_is_cut_is_said_to_be() -> None:
    m = model("exact")
    held = m.constraint(Grammar.of_schema(SCHEMA))
    cut = m.generate(QUESTION, constraint=held, max_new_tokens=6)
    assert cut.finish == "length"
    assert not is_whole(held, cut.ids, m.lm.stop_ids)
    assert is_whole(m.constraint(Grammar.of_text("start: /[^x]*/")), cut.ids, m.lm.stop_ids)


def test_any_object_is_json() -> None:
    held = vocabulary().constraint(Grammar.json_object())
    drawn, rng = list[int](), random.Random(5)
    while not is_whole(held, drawn, [0, 5]):
        drawn.append(rng.choice(held.allowed(drawn).nonzero().flatten().tolist()))
        assert len(drawn) < 5000
    assert isinstance(json.loads(small_tokenizers.demo().decode(drawn)), dict)
    assert held.allowed(drawn).nonzero().flatten().tolist() == [0, 5], "only the end may follow"


@pytest.mark.parametrize("grammar", [Grammar.of_schema(SCHEMA), Grammar.json_object(), Grammar.of_text(RULES)])
def test_what_is_allowed_depends_on_the_ids_alone(grammar: Grammar) -> None:
    """One that is asked here and there says what a fresh one says: along a tree of answers, in any order, ends too."""
    held, rng = vocabulary().constraint(grammar), random.Random(3)
    known: list[list[int]] = [[]]
    for _ in range(150):
        ids = rng.choice(known[-20:])
        mask = held.allowed(ids)
        assert mask is not None
        assert mask.tolist() == vocabulary().constraint(grammar).allowed(ids).tolist()
        if not ids or ids[-1] not in (0, 5):
            known.append([*ids, rng.choice(mask.nonzero().flatten().tolist())])
    assert max(map(len, known)) > 10


@pytest.mark.parametrize("more", [7, -1])  # logits than tokens, and fewer
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_bytes_and_words_that_fall_back_on_bytes_can_be_held(kind: str, more: int) -> None:
    tokenizer = small_tokenizers.KINDS[kind]()
    stop = tokenizer.eos_token_id
    held = Vocabulary(tokenizer, len(tokenizer) + more, [stop]).constraint(
        Grammar.of_schema({"enum": ["Hello", "world"]})
    )
    ids: list[int] = []
    while (i := int(held.allowed(ids).nonzero()[-1])) != stop:
        assert held.allowed(ids).shape == (len(tokenizer) + more,)
        ids.append(i)
    assert json.loads(tokenizer.decode(ids)) in ("Hello", "world")


def test_what_it_cannot_follow_allows_nothing_and_does_no_harm() -> None:
    held, fresh = (vocabulary().constraint(Grammar.json_object()) for _ in range(2))
    assert not held.allowed(small_tokenizers.demo().encode("no JSON")).any()
    assert held.allowed([]).tolist() == fresh.allowed([]).tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.of_schema({"type": "objekt"}), "Invalid type: objekt"),
        (lambda: Grammar.of_schema({"type": "object", "if": {}}), '"if"'),
        (lambda: Grammar.of_schema({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (lambda: Grammar.of_schema({"$ref": "http://localhost/x"}), "does not fetch"),
        (lambda: Grammar.of_schema({"const": object()}), "not JSON serializable"),
        (lambda: Grammar.of_text(" \n"), "it is empty"),
        (lambda: Grammar.of_text('root ::= "a" foo'), "Rule 'foo' not found"),
        (lambda: Grammar.of_text('x ::= "a"'), "No 'root' rule"),
        (lambda: Grammar.of_text('root ::= "a'), "at line 1"),
        (lambda: Grammar.of_text('# one\nstart: "a" foo'), "line 2, column 8: unknown name"),
        (lambda: Grammar.of_text("start: /[0-9/"), "invalid regex"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_its_fault(make: Any, said: str) -> None:
    with pytest.raises(BadInput) as found:
        make()
    assert found.value.code in ("bad_schema", "bad_grammar")
    assert said in found.value.message


def test_what_has_no_end_or_no_bytes_is_refused() -> None:
    m = model("exact")
    with pytest.raises(BadInput, match="ignore_eos") as error:
        m.stream(QUESTION, constraint=m.constraint(Grammar.json_object()), ignore_eos=True)
    assert error.value.code == "needs_end"
    for empty in ("root ::= ", 'start: ""'):
        with pytest.raises(BadInput, match="only an empty answer"):
            m.constraint(Grammar.of_text(empty))
    assert m.constraint(Grammar.of_text('start: "a"?')).allowed([]) is not None
    with pytest.raises(BadModel) as found:
        Vocabulary(small_tokenizers.demo(), V, [])
    assert found.value.code == "no_stop_token"
    for tokenizer, said in ((SlowTokenizer(), "fast"), (small_tokenizers.metaspace(), "decoder")):
        with pytest.raises(BadModel) as found:
            Vocabulary(tokenizer, V, [5])
        assert found.value.code == "bad_vocabulary"
        assert said in found.value.lines[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Grammar.of_text(f'root ::= "a"{{{n}}}'),
        lambda n: Grammar.of_text(f'root ::= "d" "eep" "a"{{{n}}}'),
        lambda n: Grammar.of_text(f"start: /a{{{n}}}/"),
        lambda n: Grammar.of_schema({"type": "string", "pattern": f"^a{{{n}}}$"}),
    ],
)
def test_what_repeats_without_measure_is_refused_before_it_is_begun(make: Any) -> None:
    m = model("exact")
    for n in (10**6, 10**9):
        with pytest.raises(BadInput, match="repeats too much"):
            m.constraint(make(n))
    assert m.constraint(make(500)).allowed([]) is not None


class SlowTokenizer(FakeTokenizer):
    def __len__(self) -> int:
        return 259


def test_without_the_extra_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("llguidance"):
            raise ModuleNotFoundError("No module named 'llguidance'")
        return found(name, *args, **more)

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BadInput) as error:
        Grammar.json_object()
    assert error.value.try_ == (pip("llguidance"),)


def test_texts_of_several_threads_may_be_held_to_the_same() -> None:
    held = vocabulary().constraint(Grammar.of_schema(SCHEMA))
    answers = [list[int]() for _ in range(4)]
    for seed, answer in enumerate(answers):
        rng = random.Random(seed)
        while not is_whole(held, answer, [0]):
            mask = held.allowed(answer)
            assert mask is not None
            answer.append(rng.choice(mask.nonzero().flatten().tolist()))

    def ask(answer: list[int]) -> list[bool]:
        masks = [held.allowed(answer[:n]) for _ in range(5) for n in range(len(answer))]
        return [bool(mask[i]) for mask, i in zip(masks, answer * 5, strict=True) if mask is not None]

    with ThreadPoolExecutor(4) as threads:
        assert all(map(all, threads.map(ask, answers)))


def test_a_fork_goes_on_under_the_same_constraint() -> None:
    session = model("exact").new_session()
    session.start_answer([1], Sampler(), model("exact").constraint(Grammar.json_object()))
    assert session.fork().constraint is session.constraint
