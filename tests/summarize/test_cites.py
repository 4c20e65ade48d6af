"""Citations as models write them, and back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.summarize.cites import Place, clean, find, without, write


def pages(*labels: str, document: str = "") -> tuple[Place, ...]:
    return tuple(Place("page", label, document) for label in labels)


WRITTEN = {
    "[p. 9, 41]": pages("9", "41"),
    "[p. 9-11]": pages("9-11"),
    "[p. 9–11, 41]": pages("9-11", "41"),
    "[pp. 3 and 4]": pages("3", "4"),
    "[pp. 3, 4, and 7]": pages("3", "4", "7"),
    "[p. 9, p. 41]": pages("9", "41"),
    "[p. 9; p. 41]": pages("9", "41"),
    "[p.9]": pages("9"),
    "[p 9]": pages("9"),
    "[Page 9]": pages("9"),
    "(page 9)": pages("9"),
    "(pp. 3-4)": pages("3-4"),
    "[see p. 9]": pages("9"),
    "[p. 9?]": pages("9"),
    "[p. 9, 77?]": pages("9", "77"),
    "[p. 12, table 3]": pages("12"),
    "[p. 012]": pages("12"),
    "[p. 11-9]": pages("9-11"),
    "[p. The]": pages(""),
    "[p. 5 5": pages("5"),
    "[§ Methods]": (Place("heading", "Methods"),),
    "[§ Methods; § Results, in brief]": (Place("heading", "Methods"), Place("heading", "Results, in brief")),
    "[l. 41-80]": (Place("line", "41-80"),),
    "[lines 41-80, 90]": (Place("line", "41-80"), Place("line", "90")),
}
PLAIN = [
    "[9]",
    "[see above]",
    "[page intentionally left blank]",
    "(in p. 9 of it)",
    "[please]",
    "(p)",
    "[]",
    "[[9]",
    "p. 9",
    "(p53 pathway)",
    "(p53)",
    "(p 53 pathway)",
    "[L2 norm]",
    "(P2P networks)",
    "[p1]",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_citation_is_found_however_it_is_written(text: str):
    (bracket,) = find(f"Revenue rose {text}")
    assert bracket.places == WRITTEN[text]
    assert bracket.start == len("Revenue rose ")


@pytest.mark.parametrize("text", PLAIN)
def test_other_brackets_are_text(text: str):
    assert find(f"Revenue rose {text} that year.") == []


def test_documents_are_named():
    found = find("It rose [a b.pdf p. 3, 4; c(1).pdf p. 9].", ["a b.pdf", "c(1).pdf"])
    assert found[0].places == (*pages("3", "4", document="a b.pdf"), *pages("9", document="c(1).pdf"))


def test_doubt_is_written():
    nine, seventy = pages("9", "77")
    assert write([nine, seventy], [seventy]) == "[p. 9, 77?]"
    assert write(pages("")) == "[p. ?]"


def test_an_open_bracket_ends_with_its_line():
    text = "- It rose [p. 5\n- It fell [p. 7]"
    assert [text[b.start : b.end] for b in find(text)] == ["[p. 5", "[p. 7]"]


def test_text_without_its_citations():
    text = "Revenue rose [p. 9], costs fell [p. 12]."
    assert without(text, find(text)) == "Revenue rose, costs fell."


numbers = st.integers(1, 99_999)
ranges = st.tuples(numbers, numbers).filter(lambda t: t[0] < t[1]).map(lambda t: f"{t[0]}-{t[1]}")
labels = numbers.map(str) | ranges
titles = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).map(clean).filter(lambda t: t.strip("§"))


def places_in(names: list[str]) -> st.SearchStrategy[list[Place]]:
    name = st.sampled_from(names)
    numbered = st.builds(Place, st.sampled_from(["page", "line"]), labels, name)
    titled = st.builds(Place, st.just("heading"), titles.map(lambda t: t.lstrip("§")).map(clean).filter(bool), name)
    return st.lists(numbered | titled, min_size=1, max_size=6)


places = places_in([""]) | places_in(["a.pdf", "b c.pdf", "x[1];.pdf"])


@given(places, st.data())
def test_what_is_written_is_found_again(wanted: list[Place], data: st.DataObject):
    doubtful = data.draw(st.lists(st.sampled_from(wanted)))
    text = write(wanted, doubtful)
    known = {p.document for p in wanted if p.document}
    if len(text) < 200:
        (bracket,) = find(f"A claim {text}.", sorted(known))
        assert list(bracket.places) == wanted
        assert (bracket.start, bracket.end) == (8, 8 + len(text))


hostile = st.text() | st.text("[]()p.§l;,?-0123456789 \n\t&and") | st.text("[p. 9]").map(lambda t: t * 50)


@given(hostile, st.lists(st.text(), max_size=3))
def test_no_text_breaks_it(text: str, documents: list[str]):
    found = find(text, documents)
    assert all(text[b.start] in "[(" and b.places for b in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    rest = without(text, found)
    assert len(rest) <= len(text)
    for bracket in found:
        write(bracket.places, bracket.places)
