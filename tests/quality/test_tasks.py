"""What the tasks write: seeded, of the length asked for, with every answer in the text; and how answers are scored."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import pytest

from kvcli.errors import BadInput, UsageError
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose, distinct, hide, listed, uuid
from kvcli.quality.sample import Context, Question, SampleSeed
from kvcli.quality.score import edit_distance, first_object, has, likeness, share_of_fields, share_of_references
from kvcli.quality.tasks import TASKS, chosen
from tests import small_tokenizers

LENGTH = 1009
NAMES = list(TASKS)
HIDDEN = [name for name in NAMES if name not in ("instructions", "json_extract")]  # references stand in the text


def draw(name: str, **changes: object) -> SampleSeed:
    given: dict[str, object] = {"task": name, "seed": 3, "length": LENGTH, "index": 1, "prose": Prose()}
    return SampleSeed(**(given | changes))  # type: ignore[arg-type]


def written(name: str, **changes: object) -> Context:
    return fitted(TASKS[name], draw(name, **changes), Prompts(small_tokenizers.demo()))


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_context(name: str) -> None:
    assert written(name) == written(name)
    assert written(name).text != written(name, seed=4).text
    assert written(name).questions != written(name, index=2).questions


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_contexts_fit_and_use_most_of_the_length(name: str, kind: str) -> None:
    prompts, length = Prompts(small_tokenizers.KINDS[kind]()), 8009
    context = fitted(TASKS[name], draw(name, length=length), prompts)
    assert 0.95 * length < prompts.longest(context) <= length
    whole = [prompts.context(context.text) + prompts.question(q) for q in context.questions]
    assert all(len(ids) + q.max_new <= length for ids, q in zip(whole, context.questions, strict=True))


@pytest.mark.parametrize("name", HIDDEN)
def test_references_stand_in_the_text(name: str) -> None:
    context = written(name)
    assert all(has(context.text, reference) for q in context.questions for reference in q.references)


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_answer_scores_one_and_an_empty_one_nothing(name: str) -> None:
    assert written(name).questions
    for question in written(name).questions:
        assert TASKS[name].score(question.prefix + question.expected, question) == 1
        assert TASKS[name].score(question.prefix, question) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused_with_the_least_that_does(name: str) -> None:
    with pytest.raises(BadInput) as raised:
        written(name, length=29)
    smallest = raised.value.detail["smallest"]
    assert raised.value.code == "task_too_long"
    assert isinstance(smallest, int)
    assert smallest > 29
    assert Prompts(small_tokenizers.demo()).longest(written(name, length=2 * smallest)) <= 2 * smallest


def test_the_asked_facts_of_a_json_sample_stand_in_its_text() -> None:
    context = written("json_extract")
    facts = json.loads(context.questions[0].references[0])
    assert len(facts) == 3
    assert all(has(context.text, value) for value in facts.values())


def test_a_needle_stands_where_its_depth_says() -> None:
    for index in range(7):
        context = written("niah_single", index=index)
        at = context.text.index(context.questions[0].references[0]) / len(context.text)
        assert at == pytest.approx(context.questions[0].meta["depth"], abs=0.04)


def test_depths_of_few_contexts_are_spread() -> None:
    depths = sorted(draw("niah_single", index=i).depth for i in range(5))
    assert max(b - a for a, b in pairwise(depths)) < 0.4
    assert len({round(d, 6) for d in depths}) == 5


def test_later_questions_ask_for_earlier_facts() -> None:
    context = written("late_questions")
    places = [context.text.index(q.references[0]) for q in context.questions]
    assert context.is_dialogue
    assert places == sorted(places, reverse=True)
    assert [q.meta["turn"] for q in context.questions] == [1, 2, 3, 4, 5, 6]


def test_the_three_frequent_words_are_those_asked_for() -> None:
    for index in range(5):
        context = written("fwe", index=index)
        words = context.text.removeprefix("A coded text: ").split()
        counts = {word: words.count(word) for word in set(words) - {"..."}}
        top = sorted(counts, key=lambda word: -counts[word])[:4]
        assert set(top[:3]) == set(context.questions[0].references)
        assert counts[top[2]] > counts[top[3]]


def test_common_words_stand_more_often_than_any_other() -> None:
    context = written("cwe")
    words = context.text.partition("Now the list.")[2].split()
    counts = {word: words.count(word) for word in words if not word.rstrip(".").isdecimal()}
    top = context.questions[0].references
    assert min(counts[word] for word in top) > max(n for word, n in counts.items() if word not in top)


def test_a_haystack_of_the_users_own_is_used_and_goes_round() -> None:
    text = "Gulls cried. The tide went out!\n\nNobody came to the pier"
    sentences = Prose(text).sentences(Random(1), 7)
    assert set(sentences) == {"Gulls cried.", "The tide went out!", "Nobody came to the pier"}
    assert sentences[:3] == sentences[3:6]
    assert "Gulls cried." in written("niah_single", prose=Prose(text)).text
    with pytest.raises(BadInput, match="no text"):
        Prose(" \n")


def test_needles_keep_their_order_and_their_places() -> None:
    assert hide(["a", "b"], [(1.0, "3"), (0.5, "1"), (0.5, "2"), (0.0, "0")]) == "0 a 1 2 b 3"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


def test_drawn_strings_are_told_apart() -> None:
    drawn = distinct(Random(1), 9, lambda rng: str(rng.randrange(100)))
    assert not any(a != b and a.startswith(b) for a in drawn for b in drawn)
    assert [len(part) for part in uuid(Random(1)).split("-")] == [8, 4, 4, 4, 12]


def test_unknown_tasks_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="niah_singel") as raised:
        chosen(["passkey", "niah_singel"])
    assert "niah_single" in raised.value.try_[0]
    assert [task.name for task in chosen(["vt", "passkey"])] == ["passkey", "vt"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [("P 12 and 34.", 1.0), ("P 34", 0.5), ("P 123 345", 0.0), ("12 34 P", 1.0), ("P12", 0.5), ("P a12", 0.0)],
)
def test_references_count_as_words_of_their_own(answer: str, score: float) -> None:
    assert share_of_references(answer, Question("?", "P", ("12", "34"), "")) == score


def test_the_prefix_that_was_given_earns_nothing() -> None:
    assert share_of_references("The code 12 is", Question("?", "The code 12 is", ("12",), "")) == 0
    assert share_of_references("The code 12 is 12", Question("?", "The code 12 is", ("12",), "")) == 1


@pytest.mark.parametrize(
    ("answer", "score"),
    [("N: a b c d", 1.0), ("N: a b c d and more", 1.0), ("N: a x c d", 0.75), ("N: b c d", 0.75), ("N:", 0.0)],
)
def test_a_span_loses_by_the_word(answer: str, score: float) -> None:
    assert likeness(answer, Question("?", "N:", ("a b c d",), "")) == score


@pytest.mark.parametrize(
    ("a", "b", "n"), [("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ab", 0)]
)
def test_edit_distances(a: str, b: str, n: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == n


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"a": 12, "b": "Red"}', 1.0),
        ('Sure: {"a": "12", "b": "blue"} {"b": "red"}', 0.5),
        ('{"a": "12"', 0.0),
        ("[1]", 0.0),
        ('{"a": null}', 0.0),
    ],
)
def test_fields_count_one_by_one(answer: str, score: float) -> None:
    assert share_of_fields(answer, Question("?", "", ('{"a": "12", "b": "red"}',), "")) == score


def test_the_first_object_is_what_counts() -> None:
    assert first_object('x {"a": {"b": 1}} {"c": 2}') == {"a": {"b": 1}}
    assert first_object("none") is None


def test_each_rule_is_checked_alone() -> None:
    rules = TASKS["instructions"]
    question = Question("?", "", ("Ab", "Yz", "shed", "Korin"), "")
    assert rules.detail is not None
    full = "Ab: the keeper of the shed is Korin. Yz"
    assert rules.detail(full, question) == dict.fromkeys(("begin", "end", "avoid", "short", "right"), True)
    assert rules.score(full.replace("shed", "shed, a depot,"), question) == 0.8
    assert rules.score(full.replace("Ab: the", "The"), question) == 0.8
    assert rules.score(full + " indeed", question) == 0.8
    assert rules.score(full.replace("Korin", "Korina"), question) == 0.8
    assert rules.score(full.replace(": the", ": the" + " very" * 30), question) == 0.8
    assert rules.score("", question) == 0
