"""Answers of models as points."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.summarize.check import Checker, Passage
from kvcli.summarize.citations import Place, find
from kvcli.summarize.points import MOST, pieces, point_of
from kvcli.summarize.result import Cite, written
from kvcli.summarize.split import Raw, split


def test_bullets_with_their_levels():
    answer = "Here are the main points:\n\n- One [p. 1].\n  - Below it [p. 2].\n* Two.\n3. Three.\n"
    assert split(answer) == [
        Raw("One [p. 1].", "bullet"),
        Raw("Below it [p. 2].", "bullet", 1),
        Raw("Two.", "bullet"),
        Raw("Three.", "bullet"),
    ]


def test_headings():
    answer = "# Costs\n- They fell.\n**Revenue:**\n- It rose."
    assert [(raw.text, raw.kind) for raw in split(answer)] == [
        ("Costs", "heading"),
        ("They fell.", "bullet"),
        ("Revenue", "heading"),
        ("It rose.", "bullet"),
    ]


def test_prose_by_sentence():
    answer = "Revenue rose by 3.5 % [p. 9]. Costs fell in\nMay. [p. 4, 5] Nothing else changed.\n\nDebt is new [p. 7]."
    assert split(answer) == [
        Raw("Revenue rose by 3.5 % [p. 9].", "sentence", opens=True),
        Raw("Costs fell in May. [p. 4, 5]", "sentence"),
        Raw("Nothing else changed.", "sentence"),
        Raw("Debt is new [p. 7].", "sentence", opens=True),
    ]


def test_what_says_nothing_is_no_point():
    assert split("- [p. 9]\n- ...\n-\n") == []


def test_a_citation_stands_for_the_words_before_it():
    text = "Revenue rose in May [p. 9], and costs fell in June [p. 12]."
    assert pieces(text, find(text)) == ["Revenue rose in May", "and costs fell in June"]


def test_one_citation_stands_for_all():
    text = "In May [p. 9] revenue rose by a third."
    assert pieces(text, find(text)) == ["In May revenue rose by a third."]


def test_few_words_stand_for_themselves():
    text = "The river rose in March [p. 1], killing dozens [p. 2], and it did so [p. 3]."
    whole = "The river rose in March, killing dozens, and it did so."
    assert pieces(text, find(text)) == ["The river rose in March", "killing dozens", whole]


def test_citations_that_come_first_stand_for_what_follows():
    text = "[p. 1] The river rose. [p. 2, 3] The bridge failed."
    assert pieces(text, find(text)) == ["The river rose", "The bridge failed"]


def test_sentences_keep_the_citations_of_several_documents():
    answer = "It rose. [a.txt p. 1] It fell. [b.txt p. 2; c.txt p. 3] Nothing else. [d p. 4]"
    wanted = ["It rose. [a.txt p. 1]", "It fell. [b.txt p. 2; c.txt p. 3]", "Nothing else. [d p. 4]"]
    assert [raw.text for raw in split(answer, ["a.txt", "b.txt", "d"])] == wanted


def test_a_paragraph_that_begins_with_a_citation_has_all_of_them_in_front():
    assert [raw.text for raw in split("[p. 1] One. [l. 2] Two. [p. 3] Three. [p. 4]\n\nFour. [p. 5] Five.")] == [
        "[p. 1] One.",
        "[l. 2] Two.",
        "[p. 3] Three. [p. 4]",
        "Four. [p. 5]",
        "Five.",
    ]


ALONE = {
    "below a bullet": ("- One.\n[p. 1]\n- Two.\n[p. 2]", ["One. [p. 1]", "Two. [p. 2]"]),
    "below a bullet, then prose": ("- One.\n[p. 1]\nTwo.", ["One. [p. 1]", "Two."]),
    "as a bullet": ("- One.\n- [p. 1]\n- [p. 2]\n- Two.", ["One. [p. 1] [p. 2]", "Two."]),
    "as a paragraph": ("One.\n\n[p. 1]\n\nTwo.\n\n(p. 2)", ["One. [p. 1]", "Two. (p. 2)"]),
    "of an unknown document": ("- One.\n[x.txt p. 1]\n- Two.", ["One. [x.txt p. 1]", "Two."]),
    "above bullets": ("[p. 1]\n- One.\n[p. 2]\n- Two.\n- Three.", ["[p. 1] One.", "[p. 2] Two.", "[p. 2] Three."]),
    "above paragraphs": ("[p. 1]\nOne.\n\n[p. 2]\nTwo.", ["[p. 1] One.", "[p. 2] Two."]),
    "as headings": ("## [p. 1]\n- One.\n## [p. 2]\n- Two.", ["[p. 1] One.", "[p. 2] Two."]),
    "below a heading": ("# A\n[p. 1]\n- One.\n# B\n- Two.\n[p. 2]", ["A", "[p. 1] One.", "B", "Two. [p. 2]"]),
    "above a heading": ("[p. 1]\n# A\n- One.", ["A", "[p. 1] One."]),
    "above and below": ("[p. 1]\n- One.\n[p. 2]", ["[p. 1] One. [p. 2]"]),
    "above nested bullets": ("- [p. 1]\n  - One.\n- [p. 2]\n  - Two.", ["[p. 1] One.", "[p. 2] Two."]),
    "below a title": ("Summary\n\n[p. 1]\n\nOne.\n\n[p. 2]\n\nTwo.", ["Summary", "[p. 1] One.", "[p. 2] Two."]),
    "below a title, as bullets": (
        "Facts:\n\n- [p. 1]\n- One.\n- [p. 2]\n- Two.",
        ["Facts:", "[p. 1] One.", "[p. 2] Two."],
    ),
    "below a long first line": (
        "The river rose by 12 metres in March of that year\n\n[p. 1]\n\nTwo.",
        ["The river rose by 12 metres in March of that year [p. 1]", "Two."],
    ),
    "below bullets, under one for all": (
        "# A [p. 1-3]\n\n[p. 1-3]\n\n- One.\n[p. 1]\n- Two.\n[p. 2]",
        ["A [p. 1-3]", "One. [p. 1]", "Two. [p. 2]"],
    ),
    "below bullets, under a heading of citations": ("## [p. 1]\n- One.\n[p. 2]\n- Two.", ["One. [p. 2]", "Two."]),
    "in bold above bullets": (
        "**[p. 1]**\n\n- One.\n- Two.\n\n**[p. 2]**\n\n- Three.\n- Four.",
        ["[p. 1] One.", "[p. 1] Two.", "[p. 2] Three.", "[p. 2] Four."],
    ),
    "above sentences": (
        "[p. 1]\nOne. Two.\n\nThree.\n\n[p. 2]\nFour.\nFive.",
        ["[p. 1] One.", "[p. 1] Two.", "[p. 1] Three.", "[p. 2] Four.", "[p. 2] Five."],
    ),
    "above bullets, up to a heading": ("[p. 1]\n\n- One.\n# B\n- Two.", ["[p. 1] One.", "B", "Two."]),
    "above bullets, up to one of its own": (
        "[p. 1]\n\n- One.\n- Two [p. 2].\n- Three.",
        ["[p. 1] One.", "Two [p. 2].", "Three."],
    ),
    "at the end, below a heading": ("- One.\n\n**References**\n[p. 1]\n[p. 2]", ["One.", "References"]),
}


@pytest.mark.parametrize("where", ALONE)
def test_a_citation_on_a_line_of_its_own_is_kept(where: str):
    answer, wanted = ALONE[where]
    assert [raw.text for raw in split(answer)] == wanted


def test_a_long_row_of_citations_is_about_the_next_point_only():
    row = " ".join(f"[p. {i}]" for i in range(40))
    assert [raw.text for raw in split(f"{row}\n\n- One.\n- Two.")] == [f"{row} One.", "Two."]


PREFACES = [
    "Sure! Here is a summary of the document:",
    "Sure!\n\nHere's a concise summary:",
    "Of course. Here’s the summary:",
    "Certainly, here are the main points:",
    "**Here is a summary of the document:**",
    "## Here is a summary of the document",
    "Here is a summary of report v1.2:",
    "Below is an overview:",
]
NONE = [
    "Sure signs: the river rose by 12 metres in March:",
    "Here are the losses of the season:",
    "Certainly the river rose.",
    "Here is a list that fell from the bridge.",
    "Summary:",
]


@pytest.mark.parametrize("preface", PREFACES)
def test_what_a_model_says_of_its_answer_is_no_point(preface: str):
    assert [raw.text for raw in split(f"{preface}\n\n- One.")] == ["One."]


@pytest.mark.parametrize("text", NONE)
def test_a_first_line_that_tells_something_is_a_point(text: str):
    assert [raw.text for raw in split(f"{text}\n\n- One.")] == [text, "One."]


PAGES = [
    Passage(Place("page", "1"), "The depth of well Volras is 256 metres. The keeper of depot Warrum is Fanus Benini."),
    Passage(Place("page", "2"), "The stone tower at Stultov shifted at low tide."),
]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Well Volras has a depth of 256 metres [p. 1].", "Well Volras has a depth of 256 metres [p. 1]."),
        ("Well Volras has a depth of 257 metres [p. 1].", "Well Volras has a depth of 257 metres [p. 1?]."),
        ("Well Volras has a depth of 256 metres [p. 2].", "Well Volras has a depth of 256 metres [p. 1]."),
        ("Well Volras has a depth of 256 metres [p. The].", "Well Volras has a depth of 256 metres [p. 1]."),
        (
            "Well Volras is 256 metres in depth [p. 1], and the tower at Stultov shifted [p. 1].",
            "Well Volras is 256 metres in depth [p. 1], and the tower at Stultov shifted [p. 2].",
        ),
        (
            "Well Volras is 256 metres in depth [p. 1] and exploded [p. 1].",
            "Well Volras is 256 metres in depth [p. 1] and exploded [p. 1?].",
        ),
        (
            "[p. 1] Well Volras is 256 metres in depth. [p. 2] The stone tower at Stultov shifted.",
            "[p. 1] Well Volras is 256 metres in depth. [p. 2] The stone tower at Stultov shifted.",
        ),
        ("Well Volras is 256 metres in depth [p. 1] [p. 2].", "Well Volras is 256 metres in depth [p. 1, 2?]."),
        ("The mill was sold to Zagreb [mill.txt p. 9].", "The mill was sold to Zagreb [mill.txt p. 9?]."),
        ("The stone tower shifted at low tide [Smith, p. 2].", "The stone tower shifted at low tide [p. 2]."),
        ("The tower at Stultov shifted (p < 0.05) [9].", "The tower at Stultov shifted (p < 0.05) [9]."),
    ],
)
def test_citations_are_checked_where_they_stand(said: str, shown: str):
    assert point_of(Raw(said, "bullet"), Checker(PAGES)).marked == shown


class Counting(Checker):
    """Counts how often a claim that says something is judged."""

    n_judged = 0

    def judge(self, claim: str, places: Sequence[Place], *, quotes: bool = False) -> tuple[Cite, ...]:
        self.n_judged += bool(claim)
        return super().judge(claim, places, quotes=quotes)


@pytest.mark.parametrize(("places", "n"), [([1, 2], 2), (range(1, 100), MOST)])
def test_many_citations_of_one_claim_are_judged_once_each(places: Sequence[int], n: int):
    checker = Counting(PAGES)
    row = "".join(f" a [p. {i}]" for _ in range(5) for i in places)
    point = point_of(Raw(f"The stone tower at Stultov shifted{row}", "bullet"), checker)
    assert checker.n_judged <= n + 1  # the first has words of its own
    assert len(point.cites) == 5 * len(places)


def test_without_a_checker_they_stay():
    point = point_of(Raw("It rose (page 9).", "bullet"), None)
    assert point.marked == "It rose [p. 9]."
    assert point.text == "It rose."


def test_points_are_written_as_they_were():
    answer = "## Costs\n- They fell [p. 1].\n  - A lot.\n\nRevenue rose. It is new.\n\nDebt is not.\n"
    points = [point_of(raw, None) for raw in split(answer)]
    assert written(points) == "## Costs\n- They fell [p. 1].\n  - A lot.\n\nRevenue rose. It is new.\n\nDebt is not.\n"


@given(st.text() | st.text("-*#[]p. 129?\n§()a") | st.text("- a [p. 1].\n# B\n"))
def test_no_answer_breaks_it(answer: str):
    checker = Checker(PAGES)
    points = [point_of(raw, checker, quotes=True) for raw in split(answer)]
    written(points)
    assert all(point.text for point in points)


@pytest.mark.parametrize("line", ["# a" + " " * 5000 + "b" + " " * 5000 + "!", "#" + " " * 20_000, "- " + " " * 20_000])
def test_long_lines_take_no_time(line: str):
    began = time.process_time()
    split(line)
    assert time.process_time() - began < 2


def test_an_indented_line_goes_on_with_its_bullet():
    answer = "- The bridge was closed in the winter\n  of 2027 for\n\trepairs [p. 1].\n  - Below.\n"
    answer += "Prose.\n  More.\n- Last\n\n  Apart."
    assert [(raw.text, raw.kind) for raw in split(answer)] == [
        ("The bridge was closed in the winter of 2027 for repairs [p. 1].", "bullet"),
        ("Below.", "bullet"),
        ("Prose.", "sentence"),
        ("More.", "sentence"),
        ("Last", "bullet"),
        ("Apart.", "sentence"),
    ]
