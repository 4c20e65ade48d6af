"""Models that cannot follow the general wording: one sentence of each short passage, whose place kvcli finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli

from kvcli.engine.model_info import ModelInfo
from kvcli.errors import BadModel, UsageError
from kvcli.settings.schema import Sample
from kvcli.summarize.events import PartEnded, PointReady
from kvcli.summarize.request import Request
from kvcli.summarize.run import summarize
from kvcli.summarize.wording import RULES, TABLE, Wording, wording_of
from tests.fake_model import fake_info
from tests.summarize.scribe import Scribe, paged, summary_of

SMALL = replace(fake_info(path="/nowhere"), family="llama", parameters=135_000_000)
LARGE = replace(SMALL, parameters=4_000_000_000)
PAGES = [
    " ".join(f"Depot {name} counted {n} boxes of oil on day {day}." for day in range(1, 30))
    for n, name in enumerate(["Arn", "Bel", "Cor", "Dun"], 11)
]
DOCUMENT = paged(*PAGES)


def copies(prompt: str) -> str:
    """The first sentence of the passage, as a small model has it, and then whatever comes."""
    first = prompt.split("<user>")[-1].split(".")[0].strip()
    return f"{first}.\nYou are a helpful assistant. Summarise the document above. {first}."


def mistakes(prompt: str) -> str:
    return "Depot Bel counted boxes of whales on day 7."


def test_a_small_model_says_one_sentence_of_each_passage_and_kvcli_finds_its_page():
    model = Scribe(copies, limit=8192, info=SMALL)
    summary = summary_of(model, [DOCUMENT])
    assert len(summary.points) == len(model.asked) == summary.n_parts == 4
    assert [point.marked for point in summary.points] == [
        f"Depot {name} counted {n} boxes of oil on day 1. [p. {n - 10}]"
        for n, name in enumerate(["Arn", "Bel", "Cor", "Dun"], 11)
    ]
    assert all(cite.confirmed for cite in summary.cites)
    for asked in model.asked:
        assert "[p." not in asked
        assert RULES not in asked


def test_what_such_a_model_gets_wrong_is_marked():
    summary = summary_of(Scribe(mistakes, limit=8192, info=SMALL), [paged(PAGES[0])])
    assert [point.marked for point in summary.points] == ["Depot Bel counted boxes of whales on day 7. [p. 1?]"]
    assert not summary.cites[0].confirmed


@pytest.mark.parametrize(
    "answer",
    [
        "3.1 Depots\n\nThe depot",
        "13.",  # a number that stands in the passage
        "Depot Cor 13.",
        "What did the depots count?",
        "The text above summarizes the information in a concise manner.",
        "I'm ready to assist you.",
        "",
    ],
)
def test_what_is_no_statement_about_the_passage_is_no_point_and_that_is_said(answer: str):
    summary = summary_of(Scribe(lambda prompt: answer if "Cor" in prompt else copies(prompt), info=SMALL), [DOCUMENT])
    assert [cite.place.label for cite in summary.cites] == ["1", "2", "4"]
    assert summary.notes == ("1 of 4 parts are not in the summary: the model wrote nothing about them",)


NOTE = (
    "# Decided\n\nThe release moves to 3 April, as the installer fails.\n\n# Budget\n\nThe bill was 4,200 euros. "
    "Carla asks for a discount.\n\nOk.\n\nNobody knows who tests the Android version."
)


@pytest.mark.parametrize("answer", ["", "I'm ready to assist you.", "Here is a summary:"])
@pytest.mark.parametrize("text", [NOTE, NOTE.replace("# ", "").replace("\n\n", "\n")])
def test_where_such_a_model_says_nothing_the_first_sentences_stand_as_quotes(text: str, answer: str):
    events = list(summarize(Scribe(lambda _: answer, limit=8192, info=SMALL), [paged(text)]))
    summary = events[-1].summary
    assert [event.point for event in events if isinstance(event, PointReady)] == list(summary.points)
    assert 2 <= len(summary.points) <= 3
    assert all(
        point.text[0] + point.text[-1] == "“”" and point.text[1:-1] in " ".join(text.split())
        for point in summary.points
    )
    assert all(cite.confirmed for cite in summary.cites)
    assert summary.notes == ("the model wrote nothing about the text, so the summary quotes its first sentences",)


@pytest.mark.parametrize("info", [SMALL, LARGE])
def test_text_with_sentences_has_a_summary_whatever_the_model_says(info: ModelInfo):
    assert summary_of(Scribe(lambda _: "", limit=8192, info=info), [paged(NOTE)]).points
    assert summary_of(Scribe(lambda _: "", limit=8192, info=info), [paged("Agenda")]).points == ()


def test_points_joined_in_order_go_out_part_by_part():
    events = list(summarize(Scribe(copies, limit=8192, info=SMALL), [paged(*PAGES, PAGES[0])]))
    kinds = [type(event) for event in events if isinstance(event, PointReady | PartEnded)]
    assert kinds == [PartEnded, PointReady] * 4 + [PartEnded]  # the fifth says again what the first said
    assert [event.point for event in events if isinstance(event, PointReady)] == list(events[-1].summary.points)
    assert events[-1].summary.notes == ("1 repeated point left out",)


@pytest.mark.parametrize(("info", "said", "drawn"), [(SMALL, None, 1.0), (SMALL, 1.2, None), (LARGE, None, None)])
def test_such_a_model_may_repeat_what_it_read_unless_it_was_told_not_to(info: ModelInfo, said: float, drawn: float):
    model = Scribe(copies, limit=8192, info=info)
    model.profile.sample = Sample(repetition_penalty=said)
    summary_of(model, [paged(PAGES[0])])
    assert [penalties.get("repetition_penalty") for penalties in model.penalties] == [drawn]
    assert [penalties.get("dry_multiplier") for penalties in model.penalties] == [0.0 if info is SMALL else None]


@pytest.mark.parametrize(("n", "is_short"), [(5, True), (20, True), (29, False)])
def test_a_few_sentences_are_asked_about_in_other_words(n: int, is_short: bool):
    text = " ".join(PAGES[0].split(". ")[:n])
    model = Scribe(copies, limit=8192, info=SMALL)
    assert (len(model.tokenizer.encode(text)) < 240) == is_short
    summary_of(model, [paged(text * (1 if is_short else 2))])
    assert ("Summarize this text in three sentences:\n\nDepot" in model.asked[0]) == is_short
    assert ("<system>" in model.asked[0]) == (not is_short)


def test_what_comes_before_the_statement_is_passed_over():
    before = "## Depots\n\nWhat did they count?\n\nThe text above is a concise summary."
    heard = f"{before}\n\n* Depot Arn counted 11 boxes of oil on day 1.\n* Depot"
    summary = summary_of(Scribe(lambda _: heard, limit=8192, info=SMALL), [paged(PAGES[0])])
    assert [point.text for point in summary.points] == ["Depot Arn counted 11 boxes of oil on day 1."]


def test_length_is_followed_by_longer_passages_and_nothing_else_is():
    long, short = (Scribe(copies, limit=8192, info=SMALL) for _ in range(2))
    summary_of(long, [DOCUMENT])
    summary_of(short, [DOCUMENT], Request(length=10))
    assert len(short.asked) < len(long.asked)
    with pytest.raises(UsageError, match="--focus"):
        summary_of(long, [DOCUMENT], Request(focus="oil"))


def test_without_citations_none_are_looked_for():
    summary = summary_of(Scribe(copies, limit=8192, info=SMALL), [DOCUMENT], Request(cite=False))
    assert not summary.cites
    assert "[p." not in summary.points[0].marked


def test_large_models_and_families_that_are_not_listed_are_asked_as_ever():
    assert wording_of(LARGE) == wording_of(replace(SMALL, family="olmo2")) == Wording()
    assert wording_of(replace(SMALL, parameters=0)) == Wording()  # not known


def test_a_models_own_wording_comes_first(tmp_path: Path):
    own = {"schema": "kvcli.wording/1", "question": "Sum up."}
    (tmp_path / "summarize.json").write_text(json.dumps(own))
    assert wording_of(replace(SMALL, path=str(tmp_path))).question == "Sum up."
    for damaged in ({**own, "schema": "kvcli.wording/9"}, {**own, "follows": ["everything"]}, [own]):
        (tmp_path / "summarize.json").write_text(json.dumps(damaged))
        with pytest.raises(BadModel) as found:
            wording_of(replace(SMALL, path=str(tmp_path)))
        assert found.value.code == "bad_wording"


def test_every_row_of_the_table_is_a_wording():
    for row in tomli.loads(TABLE.read_text())["wording"]:
        least = row["parameters"][0]
        for family in row["families"]:
            assert wording_of(replace(SMALL, family=family, parameters=least)) != Wording()
