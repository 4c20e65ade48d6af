"""Summaries from plan to end, with a model that says what it is told to."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvcli.api import Text
from kvcli.documents import Document, Section
from kvcli.errors import BadModel, ContextOverflow, UsageError
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import CacheWriteFailed, Done, Event, MergeBegan, PartBegan, Planned, PointReady, Stopped
from kvcli.summarize.request import Request, length_of
from kvcli.summarize.run import summarize
from tests.fake_model import fake_info
from tests.summarize.scribe import Scribe, first_sentences, paged, summary_of

TOPICS = ["amber", "birch", "cobalt", "delta", "ember", "fjord", "garnet", "harbour", "indigo", "juniper"]


def page(i: int) -> str:
    word = TOPICS[i - 1]
    return f"The {word} survey found {i * 111} leaks. {f'Its {word} crew went home in {word} rain. ' * 20}".strip()


TEN = paged(*(page(i) for i in range(1, 11)))
SMALL = Request(chunk=420, length=60)  # two pages a part


def test_a_short_document_is_read_whole():
    model = Scribe(first_sentences, limit=20_000)
    events = list(summarize(model, [TEN]))
    assert isinstance(events[0], Planned)
    assert events[0].plan.mode == "whole"
    assert [type(e).__name__ for e in events[1:5]] == ["PartBegan", "Live", "Read", "Text"]
    summary = done(events)
    assert [point.marked for point in summary.points][:2] == [
        "The amber survey found 111 leaks [p. 1].",
        "The birch survey found 222 leaks [p. 2].",
    ]
    assert all(cite.confirmed and not cite.corrected for cite in summary.cites)
    assert (len(summary.points), len(summary.turns), summary.unconfirmed) == (10, 1, 0)


def test_points_are_said_as_soon_as_they_are_complete():
    events = list(summarize(Scribe(first_sentences, limit=20_000), [TEN]))
    kinds = [type(e).__name__ for e in events if isinstance(e, Text | PointReady)]
    assert kinds.index("PointReady") < len(kinds) - 20
    assert [e.point for e in events if isinstance(e, PointReady)] == list(done(events).points)


def test_a_long_document_is_read_in_parts_and_joined():
    model = Scribe(first_sentences)
    events = list(summarize(model, [TEN]))
    plan = planned(events)
    assert plan.mode == "parts"
    assert len(model.asked) == len(plan.parts) > 1
    assert plan.parts[0].span[0].label == "1"
    assert [cite.place.label for cite in done(events).cites] == [str(i) for i in range(1, 11)]
    assert not any(isinstance(e, MergeBegan) for e in events)


def test_parts_share_the_beginning_of_their_prompts():
    model = Scribe(first_sentences)
    list(summarize(model, [TEN]))
    heads = {asked.partition("[p. ")[0] for asked in model.asked}
    assert len(heads) == 1
    assert "Summarise" not in heads.pop().partition("<user>")[2]


def test_what_was_planned_is_what_is_asked():
    model = Scribe(first_sentences)
    plan = planned(list(summarize(model, [TEN])))
    assert list(plan.prompts) == [len(model.tokenizer.encode(asked)) for asked in model.asked]


def merging(prompt: str) -> str:
    if "These points summarise" in prompt:
        return "- Two surveys found leaks [p. 1, 3].\n- The delta survey found 444 leaks [p. 9].\n- More [p. 77]."
    return first_sentences(prompt)


def test_a_merge_may_cite_only_what_its_inputs_cite():
    model = Scribe(merging)
    summary = summary_of(model, [TEN], Request(chunk=420, length=20))
    assert len(model.asked) == len(summary.turns) == summary.n_parts + 1
    assert summary.turns[-1].is_merge
    shown = [point.marked for point in summary.points]
    assert shown[1] == "The delta survey found 444 leaks [p. 4]."
    assert shown[2] == "More [p. 77?]."
    assert "[p. 9]" in model.asked[-1]


def lying(prompt: str) -> str:
    """Cites page 9 in every part."""
    if "These points summarise" in prompt:
        return "- The juniper survey found 1110 leaks [p. 10]."
    return "- The amber survey found 111 leaks [p. 9]."


@pytest.mark.parametrize("lead", ["a.pdf", "a", "the report,", "Introduction,", "Table 2,", "Section 4,"])
def test_what_leads_a_page_of_the_only_document_is_no_other_document(lead: str):
    summary = summary_of(Scribe(lambda _: f"- The amber survey found 111 leaks [{lead} p. 1].", limit=20_000), [TEN])
    assert [point.marked for point in summary.points] == ["The amber survey found 111 leaks [p. 1]."]
    assert [(cite.confirmed, cite.corrected) for cite in summary.cites] == [(True, False)]


def test_another_file_is_another_document():
    said = "- The amber survey found 111 leaks [b.pdf p. 1]."
    (cite,) = summary_of(Scribe(lambda _: said, limit=20_000), [TEN]).cites
    assert (cite.place.label, cite.instead_of) == ("1", "b.pdf p. 1")


@pytest.mark.parametrize(
    "claim",
    [
        "Smith found in 2020 that the effect was strong in all trials",
        "Prices fell by 7 % in Lyon, says Miller",
    ],
)
def test_references_of_a_page_are_part_of_what_it_says(claim: str):
    text = "The effect was strong in all trials [Smith 2020, p. 45]. Prices fell by 7 % in {Miller, page 3} Lyon."
    model = Scribe(lambda _: f"- {claim} [p. 1].", limit=20_000)
    assert summary_of(model, [paged(f"{text} Adler left.")]).points[0].marked == f"{claim} [p. 1]."


def test_a_page_that_no_part_confirmed_cannot_be_cited_by_the_merge():
    model = Scribe(
        lambda p: (
            "- The amber survey found 111 leaks. It was an amber survey and it found leaks [p. 1]."
            if "[p. 1]\n" in p
            else lying(p)
        )
    )
    summary = summary_of(model, [TEN], Request(chunk=420, length=10))
    assert summary.turns[-1].is_merge
    assert [point.marked for point in summary.points] == ["The juniper survey found 1110 leaks [p. 10?]."]


def test_a_summary_of_many_parts_is_merged_in_rounds():
    more = "and more surveys " * 40
    model = Scribe(lambda p: f"- {'All' if 'These points' in p else p.partition('The ')[2][:9]} {more}", limit=900)
    plan = planned(list(summarize(model, [TEN], Request(length=100))))
    assert len([a for a in model.asked if "These points" in a]) > 1
    assert plan.merges >= len([a for a in model.asked if "These points" in a])


@pytest.mark.parametrize("limit", [1400, 900])  # one round of merges, several
def test_a_merge_that_writes_nothing_leaves_the_points_of_the_parts(tmp_path: Path, limit: int):
    model = Scribe(lambda p: "" if "These points" in p else first_sentences(p), limit=limit)
    cache, short = Cache(tmp_path / "c", "model", "profile"), Request(length=20)
    events = list(summarize(model, [TEN], short, cache=cache))
    summary = done(events)
    assert [cite.place.label for cite in summary.cites if cite.confirmed] == [str(i) for i in range(1, 11)]
    assert [e.point for e in events if isinstance(e, PointReady)] == list(summary.points)
    assert summary.notes == ("merge 1 had no result, so the points of the parts are listed in order",)
    model.answer = merging
    assert any(isinstance(e, MergeBegan) and not e.is_cached for e in summarize(model, [TEN], short, cache=cache))


def test_a_second_merge_that_writes_nothing_keeps_what_the_first_wrote():
    said = iter(["- The birch survey and the amber one both found leaks.", ""])
    long = "and it went on for days " * 20
    model = Scribe(
        lambda p: next(said) if "These points" in p else f"- The {p.partition('The ')[2].split()[0]} survey {long}.",
        limit=900,
    )
    summary = summary_of(model, [TEN], Request(length=100))
    assert summary.points[0].text.startswith("The birch survey and the amber one")
    assert len(summary.points) > 2
    assert "merge 2 had no result, so the points of the parts are listed in order" in summary.notes


def test_an_empty_answer_is_asked_for_again_but_an_empty_part_is_not(tmp_path: Path):
    cache = Cache(tmp_path / "c", "model", "profile")
    silent = Scribe(lambda _: "", limit=20_000)
    assert len(summary_of(silent, [TEN], cache=cache).points) == 3  # quotes
    assert len(summary_of(Scribe(first_sentences, limit=20_000), [TEN], cache=cache).points) == 10
    list(summarize(silent, [TEN], SMALL, cache=cache))
    assert all(cached for _, cached in began(list(summarize(silent, [TEN], SMALL, cache=cache))))


def test_doubt_is_counted():
    model = Scribe(
        lambda _: "- The amber survey found 112 leaks [p. 1].\n- The birch survey found 222 leaks [p. 9].", limit=20_000
    )
    summary = summary_of(model, [TEN])
    assert (summary.unconfirmed, summary.corrected) == (1, 1)
    assert summary.markdown() == (
        "- The amber survey found 112 leaks [p. 1?].\n- The birch survey found 222 leaks [p. 2].\n"
    )


def test_quotes_stand_under_their_points():
    summary = summary_of(Scribe(first_sentences, limit=20_000), [TEN], Request(quotes=True))
    quote = summary.points[3].cites[0].quote
    assert quote is not None
    assert TEN.sections[3].text[quote.start : quote.end] == quote.text
    assert "  > The delta survey found 444 leaks." in summary.markdown()


def test_without_the_check_nothing_is_marked():
    summary = summary_of(Scribe(lambda _: "- More [p. 77].", limit=20_000), [TEN], Request(check=False))
    assert (summary.markdown(), summary.unconfirmed) == ("- More [p. 77].\n", 0)


def test_without_citations_there_are_no_marks():
    model = Scribe(lambda _: "- Leaks.", limit=20_000)
    summary = summary_of(model, [TEN], Request(cite=False))
    assert "[p. " not in model.asked[0]
    assert "mark" not in model.asked[0]
    assert summary.markdown() == "- Leaks.\n"


def test_several_documents_are_named():
    other = paged("The quartz survey found 9 leaks.", name="b.pdf")
    model = Scribe(first_sentences, limit=20_000)
    summary = summary_of(model, [TEN, other])
    assert summary.points[0].marked == "The amber survey found 111 leaks [a.pdf p. 1]."
    assert summary.points[-1].marked == "The quartz survey found 9 leaks [b.pdf p. 1]."
    assert summary.unconfirmed == 0


def test_repeated_points_are_left_out_and_said_so():
    summary = summary_of(Scribe(lambda _: "- Leaks.\n- Leaks.\n- Leaks.", limit=20_000), [TEN])
    assert len(summary.points) == 1
    assert summary.notes == ("the answer: 2 repeated points left out",)


def test_an_answer_that_was_cut_is_noted():
    summary = summary_of(Scribe(lambda p: first_sentences(p) * 9, limit=20_000), [TEN], Request(length=20))
    assert summary.turns[0].turn.finish == "length"
    assert "the answer was cut at 60 tokens" in summary.notes[0]


ROUND = " the pump hums" * 40


@pytest.mark.parametrize("before", ["- The pump leaks [p. 1].\n- It hums", "The pump leaks [p. 1]. It hums"])
def test_what_a_loop_says_is_no_finding_and_the_loop_is_noted(tmp_path: Path, before: str):
    cache, asked = Cache(tmp_path / "c", "model", "profile"), Request(style="prose" if before[0] == "T" else None)
    for _ in range(2):  # the second time from the cache
        model = Scribe(lambda _: before + ROUND, limit=20_000, stop_loops=60)
        summary = summary_of(model, [TEN], asked, cache=cache)
        assert [point.text for point in summary.points] == ["The pump leaks."]
        assert summary.turns[0].turn.finish == "loop"
        assert summary.notes == (
            "the answer repeated itself and was stopped; only the text before the repetition is used",
        )
    assert model.asked == []


LOOPED = {
    "in a bracket": ("- It leaks [p. 1]. It hums [p. " + "10, p. " * 60, ["It leaks [p. 1]."]),
    "behind a bracket": ("- It leaks [p. 1]. See (fig. 2) and" + ROUND, ["It leaks [p. 1]."]),
    "behind a citation": ("- It leaks. [p. 1] It hums and" + ROUND, ["It leaks. [p. 1]"]),
    "by lines": ("- It leaks [p. 1].\n" + "- It hums [p. 10].\n" * 40, ["It leaks [p. 1].", "It hums [p. 10]."]),
    "in prose": ("It leaks [p. 1]. It costs 3.5 euros, as e.g. in (p. 4. or" + ROUND, ["It leaks [p. 1]."]),
    "below headings": ("# Costs\n- It leaks [p. 1].\n# More\n- The" + ROUND, ["Costs", "It leaks [p. 1].", "More"]),
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_summary_that_looped_is_the_same_text_when_it_is_kept(tmp_path: Path, name: str):
    answer, wanted = LOOPED[name]
    cache, found = Cache(tmp_path / "c", "model", "profile"), []
    for _ in range(2):  # the second time from the cache
        model = Scribe(lambda _: answer, limit=20_000, stop_loops=60)
        events = list(summarize(model, [TEN], Request(check=False), cache=cache))
        said = [event.point.marked for event in events if isinstance(event, PointReady)]
        assert said == [point.marked for point in events[-1].summary.points]
        found.append((said, events[-1].summary.turns[0].turn.text))
    assert model.asked == []
    assert found[0] == found[1]
    assert found[0][0] == wanted


def test_a_part_that_went_round_in_a_loop_is_named():
    model = Scribe(lambda p: ROUND if "cobalt" in p else first_sentences(p), stop_loops=60)
    summary = summary_of(model, [TEN], SMALL)
    assert "part 2 of 5 repeated itself" in summary.notes[0]
    assert not any("hums" in point.text for point in summary.points)


# --- interrupted


def began(events: list[Event]) -> list[tuple[int, bool]]:
    return [(e.part.number, e.is_cached) for e in events if isinstance(e, PartBegan)]


def in_part(model: Scribe, n: int) -> bool:
    return len(model.asked) >= n


def test_cancelled_in_part_three_goes_on_there(tmp_path: Path):
    model = Scribe(first_sentences)
    cache = Cache(tmp_path / "c", "model", "profile")
    events = list(summarize(model, [TEN], SMALL, cache=cache, cancel=lambda: in_part(model, 3)))
    assert events[-1] == Stopped(2, 5, True)
    again = Scribe(first_sentences)
    events = list(summarize(again, [TEN], SMALL, cache=cache))
    assert began(events) == [(1, True), (2, True), (3, False), (4, False), (5, False)]
    assert len(again.asked) == 3
    assert [t.is_cached for t in done(events).turns] == [True, True, False, False, False]
    assert done(events).points == summary_of(Scribe(first_sentences), [TEN], SMALL).points


@pytest.mark.parametrize("error", [KeyboardInterrupt, ContextOverflow("x")])
def test_an_error_in_part_three_leaves_two_done(tmp_path: Path, error: type[BaseException] | BaseException):
    model = Scribe(first_sentences)

    def fails(prompt: str) -> str:
        if in_part(model, 3):
            raise error
        return first_sentences(prompt)

    model.answer = fails
    cache = Cache(tmp_path / "c", "model", "profile")
    with pytest.raises(error if isinstance(error, type) else type(error)):
        list(summarize(model, [TEN], SMALL, cache=cache))
    assert began(list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache)))[:3] == [
        (1, True),
        (2, True),
        (3, False),
    ]


CHANGES = {
    "another text": lambda c: (c, paged(*(page(i) + " Indeed." for i in range(1, 11))), SMALL),
    "another model": lambda c: (Cache(c.folder, "other", c.profile), TEN, SMALL),
    "another profile": lambda c: (Cache(c.folder, c.model, "other"), TEN, SMALL),
    "another focus": lambda c: (c, TEN, Request(chunk=420, length=60, focus="rain")),
    "another length": lambda c: (c, TEN, Request(chunk=420, length=61)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_settings_are_other_answers(tmp_path: Path, what: str):
    cache = Cache(tmp_path / "c", "model", "profile")
    list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))
    changed, document, request = CHANGES[what](cache)
    assert not any(
        cached for _, cached in began(list(summarize(Scribe(first_sentences), [document], request, cache=changed)))
    )


def test_what_only_shows_differently_is_not_asked_again(tmp_path: Path):
    cache = Cache(tmp_path / "c", "model", "profile")
    list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))
    quoted = Request(chunk=420, length=60, quotes=True)
    assert all(cached for _, cached in began(list(summarize(Scribe(first_sentences), [TEN], quoted, cache=cache))))


DAMAGE = [b"", b"{", b"\xff\xfe", b"[]", b'{"schema": "kvcli.part/0"}', b'{"schema":"kvcli.part/2","text":3}', b"null"]


DAMAGE += [b"[" * 100_000, b'{"a":' * 100_000]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text", "\ud800"),
        ("text", None),
        ("ids", "12"),
        ("ids", [1.5]),
        ("finish", []),
        ("stats", {"prompt": "3"}),
        ("stats", {"kv": []}),
        ("stats", {"kv": {"a": "b"}}),
        ("stats", {"decode": None}),
        ("stats", {"recent": ["x"]}),
        ("stats", {"paused_why": "\udfff"}),
    ],
)
def test_an_entry_with_a_wrong_field_is_computed_again(tmp_path: Path, key: str, value: object):
    cache = Cache(tmp_path / "c", "model", "profile")
    list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))
    for file in (tmp_path / "c").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert not any(cached for _, cached in began(list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_computed_again(tmp_path: Path, damage: bytes):
    cache = Cache(tmp_path / "c", "model", "profile")
    list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))
    files = sorted((tmp_path / "c").iterdir())
    assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"] * 5
    for file in files:
        file.write_bytes(damage)
    assert not any(cached for _, cached in began(list(summarize(Scribe(first_sentences), [TEN], SMALL, cache=cache))))
    assert all(json.loads(file.read_bytes())["schema"] == "kvcli.part/2" for file in files)


def test_a_cache_that_cannot_be_written_is_noted_once(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    cache = Cache(tmp_path / "file" / "c", "model", "profile")
    summary = summary_of(Scribe(first_sentences), [TEN], SMALL, cache=cache)
    assert len(summary.points) == 10
    assert ["cannot be saved" in note for note in summary.notes] == [True]
    model = Scribe(first_sentences)
    events = list(summarize(model, [TEN], SMALL, cache=cache, cancel=lambda: in_part(model, 3)))
    assert [event.why for event in events if isinstance(event, CacheWriteFailed)] == [summary.notes[0]]
    assert events[-1] == Stopped(2, 5, False)


# --- refused


REFUSED = [
    {"chunk": 10},
    {"overlap": -1},
    {"chunk": 100, "overlap": 80},
    {"length": 3},
    {"mode": "whole", "chunk": 100},
    {"cite": False, "quotes": True},
    {"check": False, "quotes": True},
    {"focus": " "},
    {"focus": "caf\udce9"},
    {"lang": "\udcff"},
]


@pytest.mark.parametrize("wrong", REFUSED, ids=str)
def test_what_cannot_be_is_refused(wrong: dict[str, object]):
    with pytest.raises(UsageError) as caught:
        Request(**wrong)  # type: ignore[arg-type]
    assert caught.value.try_


@pytest.mark.parametrize("text", ["", "0", "-3", "longer", "1e3", "١٢"])
def test_lengths_are_words_or_numbers(text: str):
    assert length_of("300") == 300
    with pytest.raises(UsageError):
        length_of(text)


def test_whole_that_does_not_fit_is_refused_in_numbers():
    with pytest.raises(ContextOverflow) as caught:
        summary_of(Scribe(first_sentences), [TEN], Request(mode="whole"))
    assert caught.value.detail["limit"] == 1400
    assert "--mode parts" in caught.value.try_


def test_no_window_is_offered_that_the_model_has_not():
    for reach, offers in ((100_000, 1), (1400, 0)):
        model = Scribe(first_sentences, info=fake_info(limit=reach))
        for request in (Request(mode="whole"), Request(length=1000)):
            with pytest.raises(ContextOverflow) as caught:
                summary_of(model, [TEN], request)
            assert sum(item.startswith("--ctx") for item in caught.value.try_) == offers


def test_what_is_wrong_with_an_overlap_is_said():
    with pytest.raises(UsageError, match="at least 0"):
        Request(overlap=-1)
    with pytest.raises(UsageError, match="at most half"):
        Request(chunk=100, overlap=80)


def test_a_window_without_room_is_refused():
    with pytest.raises(ContextOverflow) as caught:
        summary_of(Scribe(first_sentences, limit=900), [TEN])
    assert caught.value.detail["limit"] == 900


def wording(folder: Path, **changes: object) -> None:
    text = {"schema": "kvcli.wording/1", "question": "Sum up.", "follows": [], "merges": False, **changes}
    (folder / "summarize.json").write_text(json.dumps(text))


def test_a_model_may_bring_its_own_wording(tmp_path: Path):
    wording(tmp_path)
    model = Scribe(first_sentences, limit=20_000, info=fake_info(path=str(tmp_path)))
    assert len(summary_of(model, [TEN]).points) == 10
    assert model.asked[0].endswith("\n\nSum up.\n<assistant>")
    assert "<system>" not in model.asked[0]


@pytest.mark.parametrize(
    "asked", [{"length": "short"}, {"style": "prose"}, {"focus": "rain"}, {"lang": "de"}, {"cite": False}]
)
def test_what_a_model_does_not_follow_is_refused(tmp_path: Path, asked: dict[str, object]):
    wording(tmp_path)
    model = Scribe(first_sentences, limit=20_000, info=fake_info(path=str(tmp_path)))
    with pytest.raises(UsageError) as caught:
        summary_of(model, [TEN], Request(**asked))  # type: ignore[arg-type]
    assert caught.value.code == "not_followed"
    assert f"--{next(iter(asked))}" in f"{caught.value.message} {caught.value.try_}"
    assert model.asked == []


def test_a_model_that_is_best_with_short_parts_gets_them(tmp_path: Path):
    wording(tmp_path, part=[420, 420])
    model = Scribe(first_sentences, limit=20_000, info=fake_info(path=str(tmp_path)))
    assert planned(list(summarize(model, [TEN]))).mode == "parts"


DAMAGED = [
    "[]",
    "{",
    "[" * 99_999,
    '{"schema": "kvcli.wording/2"}',
    '{"schema": "kvcli.wording/1", "x": 1}',
    '{"schema": "kvcli.wording/1", "part": "x"}',
    '{"schema": "kvcli.wording/1", "part": [0, 9]}',
    '{"schema": "kvcli.wording/1", "merges": 1}',
    '{"schema": "kvcli.wording/1", "sentence": true}',
    '{"schema": "kvcli.wording/1", "follows": ["colour"]}',
]


@pytest.mark.parametrize("text", [*DAMAGED, ""])
def test_a_damaged_wording_is_an_error(tmp_path: Path, text: str):
    if text:
        (tmp_path / "summarize.json").write_text(text)
    else:
        os.mkfifo(tmp_path / "summarize.json")
    with pytest.raises(BadModel):
        summary_of(Scribe(first_sentences, info=fake_info(path=str(tmp_path))), [TEN])


FORMS = {
    "range": ("page", "pdf", [str(i) for i in range(1, 9)], lambda i: f"p. {max(i, 1)}-{max(i, 1) + 1}"),
    "case": ("heading", "html", [f"Chapter {c}" for c in "ABCDEFGH"], lambda i: f"§ chapter {'abcdefgh'[i]}"),
    "chapter": ("chapter", "epub", [f"Chapter {c}" for c in "ABCDEFGH"], lambda i: f"§ Chapter {'ABCDEFGH'[i]}"),
    "line": ("line", "text", [f"{i * 40 + 1}-{i * 40 + 40}" for i in range(8)], lambda i: f"l. {i * 40 + 3}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_merge_may_cite_whatever_the_parts_cited(form: str):
    unit, kind, labels, cite = FORMS[form]
    said = [f"The bridge number {i} was closed in {1900 + i * 7} for repairs" for i in range(1, 9)]
    fill = " Gravel lay beside the road in heaps." * 20
    sections = tuple(
        Section(i, label, f"{text}.{fill}") for i, (label, text) in enumerate(zip(labels, said, strict=True))
    )
    document = Document("a", "x", "0" * 64, unit=unit, sections=sections, kind=kind)  # type: ignore[arg-type]

    def answer(prompt: str) -> str:
        if "- The bridge" in prompt:
            return "\n".join(re.findall(r"- The bridge[^\n]*", prompt))
        return "\n".join(f"- {text} [{cite(i)}]." for i, text in enumerate(said) if f"{text}." in prompt)

    summary = summary_of(Scribe(answer, limit=900), [document], Request(length=60))
    assert any(answered.is_merge for answered in summary.turns)
    assert (len(summary.cites), summary.unconfirmed) == (8, 0)
    assert {cite.place.unit for cite in summary.cites} == {unit}


# --- helpers


def planned(events: list[Event]):  # type: ignore[no-untyped-def]
    assert isinstance(events[0], Planned)
    return events[0].plan


def done(events: list[Event]):  # type: ignore[no-untyped-def]
    assert isinstance(events[-1], Done)
    return events[-1].summary
