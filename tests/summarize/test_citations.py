"""Citations as models write them, and back."""

from __future__ import annotations

from itertools import pairwise
from unicodedata import category

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcli.documents import mark
from kvcli.documents.document import clean
from kvcli.summarize.check import named
from kvcli.summarize.citations import Place, find, without, write


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
    "[p. The]": pages("The"),
    "[p. ]": pages(""),
    "[p. 5 5": pages("5"),
    "[§ Methods]": (Place("heading", "Methods"),),
    "[§ Methods; § Results, in brief]": (Place("heading", "Methods"), Place("heading", "Results, in brief")),
    "[l. 41-80]": (Place("line", "41-80"),),
    "[lines 41-80, 90]": (Place("line", "41-80"), Place("line", "90")),
    "【p. 2】": pages("2"),
    "⟦p. 2⟧": pages("2"),
    "{p. 2}": pages("2"),
    "\uff3bp. 2\uff3d": pages("2"),
    "\uff08p. 2\uff09": pages("2"),
    "[p2]": pages("2"),
    "[P9]": pages("9"),
    "[*p. 2*]": pages("2"),
    "[**p. 2**]": pages("2"),
    "[page: 2]": pages("2"),
    "[pgs. 9-10]": pages("9-10"),
    "[S. 2]": pages("2"),
    "[Seiten 2-3]": pages("2-3"),
    "[Source: p. 2]": pages("2"),
    "(Source: p. 2)": pages("2"),
    "[cf. p. 2]": pages("2"),
    "(see p. 2)": pages("2"),
    "(on page 2)": pages("2"),
    "[L41-L80]": (Place("line", "41-80"),),
    "(l. 41-80)": (Place("line", "41-80"),),
    "(lines 3-4)": (Place("line", "3-4"),),
    "(§ Methods)": (Place("heading", "Methods"),),
    "[Section 2]": (Place("heading", "Section 2"),),
    "(p. 9, line 3)": pages("9"),
    "(p. 9, table 3)": pages("9"),
    "[p. 9 ff.]": pages("9"),
    "[p. 9f., 12]": pages("9", "12"),
    "[p. 9, 2nd table]": pages("9"),
    "[p. 1,234]": pages("1234"),
    "[p. 9,10,123]": pages("9", "10", "123"),
    "[p. 112,115,120]": pages("112", "115", "120"),
    "[p. 9; 41]": pages("9", "41"),
    "[p. 9 p. 41]": pages("9", "41"),
    "[p. 3.5]": pages("3.5"),
    "[p. iv]": pages("iv"),
    "[pp. iii-iv]": pages("iii-iv"),
    "[p. 3a]": pages("3a"),
    "[p. #3]": pages("#3"),
    "[p. < 0.05]": pages("< 0.05"),
    "[p. 3 | p. 4]": pages("3", "4"),
    "[p. 3 + 4]": pages("3", "4"),
    "[p. 3, see also p. 4]": pages("3", "4"),
    "[p. 3..5]": pages("3-5"),
    "[p. 3 ... 5]": pages("3-5"),
    "[p. 3 \N{HORIZONTAL ELLIPSIS} 5]": pages("3-5"),
    "[^p. 1]": pages("1"),
    "(cite: p. 1)": pages("1"),
    "[citation: p. 1]": pages("1"),
    # a page says more than the heading or the table that it stands beside
    "[Chapter 1, p. 1]": pages("1"),
    "[see Section 2: p. 3]": pages("3"),
    "[§ Methods, p. 3]": pages("3"),
    "[§ Methods (pp. 3-4)]": pages("3-4"),
    "[p. 3, § Methods]": pages("3"),
    "(Section 4, p. 3)": pages("3"),
    "[§ Costs; Section 4, p. 3]": (Place("heading", "Costs"), *pages("3")),
    "[§ Costs, p. 5 in brief]": (Place("heading", "Costs, p. 5 in brief"),),
    "[§ Costs, p53]": (Place("heading", "Costs, p53"),),
    "[p. 9; l. 3; § Debt]": (*pages("9"), Place("line", "3"), Place("heading", "Debt")),
    "[§ Costs, revenue; and 5?]": (Place("heading", "Costs, revenue, and 5"),),
    "[§ Costs; see p. 5]": (Place("heading", "Costs"), *pages("5")),
    # of documents that nobody knows
    "[mill.txt p. 9]": pages("9", document="mill.txt"),
    "(mill.txt p. 9)": pages("9", document="mill.txt"),
    "[mill.txt, p. 9, table 3]": pages("9", document="mill.txt"),
    "[Smith 2019, p. 9]": pages("9", document="Smith 2019"),
    "[as shown on page 9]": pages("9", document="as shown on"),
    "[mill p. 9; oil.txt p. 3]": (*pages("9", document="mill"), *pages("3", document="oil.txt")),
    "[p. 1; mill p. 4]": (*pages("1"), *pages("4", document="mill")),
    "[§ Costs; x.md § Debt]": (Place("heading", "Costs"), Place("heading", "Debt", "x.md")),
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
    "[p53 pathway]",
    "[sic]",
    "[9, 12]",
    "(p < 0.05)",
    "[p < 0.05]",
    "(p.05)",
    "(p. 0.05)",
    "(p 0.05)",
    "(5 p.m.)",
    "[p.m.]",
    "(see page 12 of the annex)",
    "(page 12 was blank)",
    "[the court held on page 9 that it fell]",
    "[the p 53 pathway]",
    "[metro line 3 opened]",
    "(line 3)",
    "(Section 2)",
    "(§ 433 BGB)",
    "(Smith 2019, p. 9)",
    "(Smith, pp. 9-11)",
    "(Section 4 of the annex, p. 3)",
    "{a, b}",
    "{p1}",
    r"\citep{p1}",
    r"\cite{p. 1}",
    "$x_{p. 1}$",
    r"\frac{page 2}{line 3}",
    "array[p1]",
    "f(x)_[p1]",
    "【9】",
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


NAMED = {
    "[a b.pdf, p. 3]": pages("3", document="a b.pdf"),
    "[A B.PDF p. 3]": pages("3", document="a b.pdf"),
    '["a b.pdf", p. 3]': pages("3", document="a b.pdf"),
    "[a b p. 3]": pages("3", document="a b.pdf"),
    "(a b.pdf p. 3)": pages("3", document="a b.pdf"),
    "[see a b.pdf p. 3; see also 2027.txt p. 4]": (
        *pages("3", document="a b.pdf"),
        *pages("4", document="2027.txt"),
    ),
    "[a b.pdf p. 3, 2027.txt p. 4]": (*pages("3", document="a b.pdf"), *pages("4", document="2027.txt")),
    "[a b.pdf, p. 3 and 2027.txt, p. 4]": (*pages("3", document="a b.pdf"), *pages("4", document="2027.txt")),
    "[a b.pdf, p. 3; mill.txt p. 4]": (*pages("3", document="a b.pdf"), *pages("4", document="mill.txt")),
    "[b.pdf p. 3]": pages("3", document="b.pdf"),
    "[twice p. 3]": pages("3", document="twice"),  # of two files
}


@pytest.mark.parametrize("text", NAMED)
def test_names_are_understood_however_they_are_written(text: str):
    (bracket,) = find(f"It rose {text}.", ["a b.pdf", "2027.txt", "twice.pdf", "twice.txt"])
    assert bracket.places == NAMED[text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[report.pdf p. 1]", pages("1")),
        ("[REPORT, p. 1]", pages("1")),
        ("(report.pdf p. 1)", pages("1")),
        ("[see the report.pdf, p. 1]", pages("1")),
        ("[Introduction, p. 1]", pages("1")),
        ("[Table 2, p. 1]", pages("1")),
        ("[Fig. 1, p. 1]", pages("1")),
        ("[document, page 1]", pages("1")),
        ("[Introduction, § Costs]", (Place("heading", "Costs"),)),
        ("[Introduction, p. 1; Results, p. 3]", pages("1", "3")),
        ("[mill.txt p. 1]", pages("1", document="mill.txt")),
    ],
)
def test_of_one_document_no_name_is_needed(text: str, expected: tuple[Place, ...]):
    (bracket,) = find(f"It rose {text}.", ["", "report.pdf"])
    assert bracket.places == expected


@pytest.mark.parametrize("text", ["[Smith on page 9 said so]", "(Smith, p. 9)", "[the p 53 pathway]"])
def test_text_is_text_in_one_document_too(text: str):
    assert find(f"It rose {text}.", ["", "report.pdf"]) == []


@pytest.mark.parametrize("text", ["rose[p. 1]", "\N{CJK UNIFIED IDEOGRAPH-589E}[p1]", r"\[p. 1\]", "*rose*[p1]"])
def test_no_space_is_needed_before_a_citation(text: str):
    assert find(text)[0].places == pages("1")


def test_a_name_whose_capitals_are_another_letters_is_another_name():
    assert find("It rose [i p. 3].", ["\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}"])[0].places == pages(
        "3", document="i"
    )


def test_neighbours_are_one_citation():
    text = "It rose [p. 1] [p. 2], [p. 1] and [p. 4]. It fell [p. 5] by [p. 6]."
    assert [(text[b.start : b.end], b.places) for b in find(text)] == [
        ("[p. 1] [p. 2], [p. 1] and [p. 4]", pages("1", "2", "4")),
        ("[p. 5]", pages("5")),
        ("[p. 6]", pages("6")),
    ]
    assert len(find("It rose [p. 1]\n[p. 2].")) == 2


def test_doubt_is_written():
    nine, seventy = pages("9", "77")
    assert write([nine, seventy], [seventy]) == "[p. 9, 77?]"
    assert write(pages("")) == "[p. ?]"


@pytest.mark.parametrize("label", ["Costs, revenue; and 5?", "Costs; Debt", "[1] Debt  of\t2027"])
def test_a_heading_is_cited_as_its_mark_spells_it(label: str):
    place = Place("heading", label)
    assert mark("heading", label) == write([place])
    for written in (mark("heading", label), f"[§ {label.replace('[', '(').replace(']', ')')}]"):
        assert named(find(written)[0].places[0], [place, Place("heading", "Costs")]) == [0]


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


hostile = st.text() | st.text("[](){}p.§l;:*,?-0123456789 \n\t&and") | st.text("[p. 9]").map(lambda t: t * 50)


hostile |= st.lists(st.sampled_from("[ ] ( ) p. p l. § ; , see 9 1,234 - a.pdf x.md \uff08 【 of *".split())).map(
    " ".join
)


@example("\uff08§A)", [])
@given(hostile, st.lists(st.text() | st.sampled_from(["a.pdf", "see", "9"]), max_size=3))
def test_no_text_breaks_it(text: str, documents: list[str]):
    found = find(text, documents)
    assert all(category(text[b.start]) == "Ps" and b.places for b in found)  # an opening bracket of any script
    assert all(a.end <= b.start for a, b in pairwise(found))
    rest = without(text, found)
    assert len(rest) <= len(text)
    for bracket in found:
        write(bracket.places, bracket.places)
