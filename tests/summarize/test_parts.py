"""Parts: nothing is lost, none is too long, and they end where sentences do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.documents import Document, Section, mark
from kvcli.render.summarize.notes import plan_lines
from kvcli.render.summarize.view import time_left
from kvcli.schemas.fit import PassTime
from kvcli.settings.schema import Sample
from kvcli.summarize.citations import Place, find, write
from kvcli.summarize.parts import Part, cut, pieces_of, shown
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from tests.summarize.scribe import Scribe, first_sentences, paged

PARAGRAPHS = "\n\n".join(
    f"The {w} pump leaked for a day. Nobody saw it, and it froze." for w in "red blue old new".split()
)


def count(text: str) -> int:
    return len(text.split())


def said(parts: list[Part]) -> str:
    return "".join(piece.section.text[piece.start : piece.end] for part in parts for piece in part.pieces)


@pytest.mark.parametrize("unit", ["page", "heading", "chapter", "line"])
def test_a_mark_is_a_citation(unit: str):
    label = {"page": "12", "line": "41-80"}.get(unit, "Methods, and more")
    assert write([Place(unit, label)]) == mark(unit, label)  # type: ignore[arg-type]
    assert find(mark(unit, label))[0].places[0].label == label  # type: ignore[arg-type]


def test_parts_are_about_equally_long():
    parts = cut(pieces_of([paged(*["one two three four five"] * 10)]), 40, count)
    assert [len(part.pieces) for part in parts] == [4, 3, 3] or [len(part.pieces) for part in parts] == [4, 4, 2]
    assert [part.number for part in parts] == [1, 2, 3]


def test_a_long_page_ends_a_part_at_a_paragraph():
    parts = cut(pieces_of([paged(PARAGRAPHS)]), 40, count)
    assert len(parts) == 2
    assert all(part.text.startswith("[p. 1]\n") for part in parts)
    assert parts[0].text.endswith("froze.")
    assert parts[1].passages[0].offset == PARAGRAPHS.index("The old")


def test_a_long_paragraph_ends_a_part_at_a_sentence():
    text = " ".join(PARAGRAPHS.split())
    parts = cut(pieces_of([paged(text)]), 25, count)
    assert len(parts) > 2
    assert all(part.text.endswith(".") for part in parts)


def test_overlap_repeats_whole_sentences():
    pages = [f"The {w} pump leaked. It froze. Page {w} ends here." for w in "red blue old new".split()]
    parts = cut(pieces_of([paged(*pages)]), 34, count, overlap=10)
    assert len(parts) > 1
    for before, after in pairwise(parts):
        head = after.pieces[0]
        assert head.section is before.pieces[-1].section
        assert before.text.endswith(head.text)
        assert count(shown(head, True)) <= 10


def test_documents_of_one_name_are_told_apart():
    twice = [paged("One pump.", name="a.pdf"), paged("Two pumps.", name="a.pdf")]
    assert [piece.document for piece in pieces_of(twice)] == ["a.pdf", "a.pdf (2)"]
    assert [piece.document for piece in pieces_of(twice[:1])] == [""]


texts = st.lists(st.text("ab .\n") | st.text(max_size=60), min_size=1, max_size=6)


@given(texts, st.integers(1, 40))
def test_nothing_is_lost(pages: list[str], most: int):
    sections = tuple(Section(i, str(i), text) for i, text in enumerate(pages, 1))
    document = Document("a", "", "", unit="page", sections=sections)
    pieces = pieces_of([document])
    parts = cut(pieces, most, len)
    assert said(parts) == "".join(section.text for section in sections if section.text.strip())


def test_no_prompt_is_longer_than_the_window():
    pages = [" ".join(["word"] * n) + "." for n in (3, 700, 40, 41, 1, 900)]
    for limit in (1010, 1100, 1300, 2000):
        plan = make_plan([paged(*pages)], Request(), PlanWindow.of(Scribe(first_sentences, limit=limit)))  # type: ignore[arg-type]
        assert all(prompt + plan.answer <= limit for prompt in plan.prompts)
        assert plan.mode == "parts"


def test_an_estimate_of_time_needs_measured_passes():
    model = Scribe(first_sentences, limit=20_000)
    bare = make_plan([paged(PARAGRAPHS)], Request(), PlanWindow.of(model))  # type: ignore[arg-type]
    assert bare.seconds is None
    passes = [PassTime(rows=r, context=c, seconds=s, low=s, high=s) for r, c, s in ((1, 64, 0.01), (32, 64, 0.02))]
    timed = make_plan([paged(PARAGRAPHS)], Request(), PlanWindow.of(model, passes))  # type: ignore[arg-type]
    reading = -(-timed.prompts[0] // 32) * 0.02
    assert timed.seconds == pytest.approx(reading + timed.answer // 2 * 0.01)
    model.profile.spec.method = "ngram"
    drafting = make_plan([paged(PARAGRAPHS)], Request(), PlanWindow.of(model, passes))  # type: ignore[arg-type]
    assert [" ".join(plan_lines(plan, 100)).count("up to about 4 s") for plan in (timed, drafting)] == [0, 1]
    assert "  about 4 s" in plan_lines(timed, 100)


def test_time_left_is_of_parts_and_merges_and_goes_down():
    pages = [" ".join(["word"] * 200) + "." for _ in range(5)]
    model = Scribe(first_sentences, limit=20_000)
    made = make_plan([paged(*pages)], Request(chunk=250), PlanWindow.of(model))  # type: ignore[arg-type]
    plan = replace(made, merges=1, seconds=None)
    assert len(plan.parts) == 5
    assert time_left(plan, 1, [], 3.0) is None, "nobody timed it"
    assert time_left(replace(plan, seconds=60.0), 2, [], 3.0) == 47.0, "a sixth of the estimate each"
    at_ends = [time_left(plan, at, [10.0] * (at - 1), here) for at in range(2, 7) for here in (0.0, 9.0)]
    assert at_ends == [50, 41, 40, 31, 30, 21, 20, 11, 10, 1]
    assert time_left(plan, 6, [10.0] * 5, 12.0) is None, "longer than the others: no number is right"
    assert time_left(plan, 7, [10.0] * 6, 4.0) == 6.0, "a merge more than planned"


def test_what_the_user_wrote_limits_an_answer():
    model = Scribe(first_sentences, limit=20_000)
    model.profile.sample = Sample(max_new_tokens=99)
    assert make_plan([paged("A pump.")], Request(), PlanWindow.of(model)).answer == 750  # type: ignore[arg-type]
    model.profile.origins["sample.max_new_tokens"] = "--max-new-tokens"
    assert make_plan([paged("A pump.")], Request(), PlanWindow.of(model)).answer == 99  # type: ignore[arg-type]
