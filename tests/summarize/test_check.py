"""Citations held against pages: what is true stays, what is false is marked, what is elsewhere is moved."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.summarize.check import Checker, Claim, Passage
from kvcli.summarize.cites import Bracket, Place, find, write
from kvcli.summarize.words import units, words
from tests.bench.citations import is_right, judged
from tests.summarize.cases import KINDS, cases

EACH = 24  # cases of each kind, 288 in all


@pytest.mark.parametrize("kind", KINDS)
def test_generated_citations_are_judged_right(kind: str):
    """Of every kind: the true are confirmed, those of another page moved to it, the planted false ones doubted."""
    chosen = list(cases(EACH, 1, [kind]))
    assert len(chosen) == EACH
    assert [(case.claim, case.page, judged(case)) for case in chosen if not is_right(case)] == []


def pages(*texts: str) -> list[Passage]:
    return [Passage(Place("page", str(i)), text) for i, text in enumerate(texts, 1)]


def shown(texts: list[str], said: str) -> str:
    """The citation at the end of `said` as it is written after the check."""
    (bracket,) = find(said)
    return Checker(pages(*texts)).judge(said[: bracket.start], bracket).text


REVENUE = "Revenue rose by 12 % in the third quarter, carried by river-freight contracts. The board met twice."
DEBT = "Debt cover fell below the limit that the bank had set. It was 1.8 at the end of September."
BRIDGE = "Bridge repairs were moved to 2027 after the winter survey. The “old town” bridge stays closed to lorries."
REPORT = [REVENUE, DEBT, BRIDGE]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Revenue rose 12 % on river freight contracts [p. 1]", "[p. 1]"),
        ("River-freight contracts raised revenue by 12 % [p. 1]", "[p. 1]"),
        ("Revenue rose 13 % on river-freight contracts [p. 1]", "[p. 1?]"),
        ("Revenue rose 12 % on river-freight contracts [p. 2]", "[p. 1]"),
        ("Revenue rose 12 % on river-freight contracts [p. 7]", "[p. 1]"),
        ("The bank's limit was missed: debt cover fell to 1.8 in September [p. 2]", "[p. 2]"),
        ("Debt cover fell to 1,8 at the end of September [p. 2]", "[p. 2]"),
        ("Debt cover fell to 1.9 at the end of September [p. 2]", "[p. 2?]"),
        ("Bridge repairs moved to 2027, and revenue rose 12 % in the third quarter [p. 1, 3]", "[p. 1, 3]"),
        ("Bridge repairs moved to 2027, and revenue rose 12 % in the third quarter [p. 2, 3]", "[p. 2?, 3?]"),
        ("Bridge repairs were moved to 2027 [p. 2-3]", "[p. 2-3]"),
        ("Bridge repairs were moved to 2027 [p. 1-200]", "[p. 3]"),
        ('It says that the "old town bridge stays closed" to lorries [p. 3]', "[p. 3]"),
        ('It says that the "new town bridge stays closed" to lorries [p. 3]', "[p. 3?]"),
        ("The company expects a merger with Acme [p. 1]", "[p. 1?]"),
        ("[p. 1]", "[p. 1?]"),
    ],
)
def test_claims_in_other_words(said: str, expected: str):
    assert shown(REPORT, said) == expected


def test_two_pages_with_the_claim_leave_the_doubt():
    assert shown([REVENUE, DEBT, REVENUE], "Revenue rose by 12 % in the third quarter [p. 2]") == "[p. 2?]"


def test_a_sentence_over_two_pages_is_on_both():
    texts = ["The stone tower at Stultov shifted by 14", "centimetres at low tide. Nothing else did.", "Debt is new."]
    claim = "The stone tower at Stultov shifted by 14 centimetres at low tide"
    assert [shown(texts, f"{claim} [p. {n}]") for n in (1, 2, 3)] == ["[p. 1]", "[p. 2]", "[p. 1]"]


def test_a_heading_is_a_sentence_of_its_own():
    found = [unit.line.split() for unit in units("## Depths of wells\nThe pump leaked.\n# More\n- Red\n- Blue")]
    assert found == [["depth", "well"], ["pump", "leak"], [], ["red"], ["blu"]]


def test_numbers_of_the_citations_in_a_text_count_for_nothing():
    assert shown(["The pump leaked for a day [p. 4]."], "The pump leaked for 4 days [p. 1]") == "[p. 1?]"


def test_a_citation_must_name_its_document():
    passages = [Passage(Place("page", "1", name), text) for name, text in (("a.pdf", REVENUE), ("b.pdf", DEBT))]
    checker = Checker(passages)
    said = "Revenue rose by 12 % in the third quarter"
    for wrong in (Place("page", "1"), Place("page", "1", "b.pdf")):
        judged = checker.judge(said, Bracket(0, 0, (wrong,)))
        assert judged.text == "[a.pdf p. 1]"
        assert judged.cites[0].instead_of == write([wrong])[1:-1]


def test_headings_and_lines():
    passages = [Passage(Place("heading", "Methods & Materials"), REVENUE), Passage(Place("line", "41-80"), DEBT)]
    checker = Checker(passages)
    assert checker.at(Place("heading", "methods & materials")) == [0]
    assert [checker.at(Place("line", label)) for label in ("41-80", "50", "50-60", "80-90", "81")] == [[1]] * 4 + [[]]


def test_a_quote_is_the_sentence_as_it_stands():
    text = "Nothing here.\n\nRevenue rose by 12 % in the\nthird quarter. The board met."
    section = f"Gone before. {text}"
    passage = Passage(Place("page", "1"), text, offset=len("Gone before. "))
    (cite,) = (
        Checker([passage])
        .judge("In the third quarter revenue rose 12 %", Bracket(0, 0, (passage.place,)), quotes=True)
        .cites
    )
    assert cite.quote is not None
    assert cite.quote.text == "Revenue rose by 12 % in the\nthird quarter."
    assert section[cite.quote.start : cite.quote.end] == cite.quote.text


def test_capitals_mean_no_names_where_every_noun_has_one():
    german = "Der Umsatz stieg im Quartal um zwölf Prozent. Die Brücke bleibt für Lastwagen und Busse gesperrt. " * 3
    assert shown([german, DEBT], "Der Umsatz, der Erlös also, stieg im Quartal um zwölf Prozent [p. 1]") == "[p. 1]"


@pytest.mark.parametrize(
    ("one", "other"),
    [("1,234", "1234"), ("3.5", "3,5"), ("three", "3"), ("pumps", "pump"), ("stopped", "stop"), ("Café", "café")],
)
def test_spellings_of_one_word(one: str, other: str):
    assert [word.key for word in words(f"x-ray {one}")] == [word.key for word in words(f"x-ray {other}")]


texts = st.text() | st.text('Aa1 .,;?\n[p]"“and12%') | st.just(REVENUE)


@given(st.lists(texts, min_size=1, max_size=4), texts, st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_no_text_breaks_it(passages: list[str], claim: str, cited: list[int]):
    checker = Checker(pages(*passages))
    judged = checker.judge(claim, Bracket(0, 0, tuple(Place("page", str(n)) for n in cited)), quotes=True)
    for cite in judged.cites:
        if cite.confirmed:
            assert checker.at(cite.place)
        if cite.quote:
            assert cite.quote.text.strip()


@given(texts)
def test_sentences_cover_all_words(text: str):
    keys = {word.key for word in words(text)}
    assert set().union(*(unit.keys for unit in units(text)), frozenset()) == keys


@given(texts)
def test_a_text_confirms_itself(text: str):
    """A sentence of a page, word for word, is always confirmed by that page."""
    checker = Checker(pages(text, DEBT))
    for unit in units(text):
        sentence = text[unit.start : unit.end]
        if Claim.of(sentence).words:
            assert checker.supports(Claim.of(sentence), [0])


def test_a_heading_is_the_one_that_is_spelt_so():
    passages = [
        Passage(Place("chapter", label), text) for label, text in (("C++", REVENUE), ("C#", DEBT), ("C", BRIDGE))
    ]
    checker = Checker(passages)
    assert [checker.at(Place("heading", label)) for label in ("C++", "C#", "C", "c#", "c ++")] == [
        [0],
        [1],
        [2],
        [1],
        [0],
    ]
    assert Checker(passages[:1]).at(Place("heading", "C#")) == []
    twice = Checker([Passage(Place("heading", label), REVENUE) for label in ("Well A", "Well a")])
    assert [twice.at(Place("heading", label)) for label in ("Well A", "Well a", "well a", "WELL A")] == [
        [0],
        [1],
        [],
        [],
    ]
    assert Checker([Passage(Place("page", "1", n), DEBT) for n in ("A.pdf", "a.pdf")]).at(
        Place("page", "1", "a.pdf")
    ) == [1]


def test_a_chapter_is_cited_as_the_document_has_it():
    judged = Checker([Passage(Place("chapter", "Debt"), DEBT)]).judge(
        "Debt cover was 1.8 in September", Bracket(0, 0, (Place("heading", "debt"),))
    )
    assert (judged.cites[0].place, judged.text) == (Place("chapter", "Debt"), "[§ Debt]")


@pytest.mark.parametrize("text", ["x" + "." * 60_000 + "y", "A. " * 30_000, "x" + "。." * 30_000 + "y", "\n " * 30_000])
def test_long_rows_take_no_time(text: str):
    began = time.process_time()
    units(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("page", "claim", "is_true"),
    [
        ("125 mg", "0.125 mg", False),
        ("5 mg", "5 g", False),
        ("125 mg", "125 kg", False),
        ("5 million", "5 billion", False),
        ("5 million", "5", False),
        ("12 %", "12", True),
        ("12 %", "12 percent", True),
        ("5", "-5", False),
        ("-5", "\u22125", True),
        ("thirty", "Twenty", False),
        ("twenty-five", "25", True),
        ("twenty-one", "20", False),
        ("1.25 million", "1,250,000", True),
        ("1,234", "1234", True),
        ("0.125 mg", "0,125 mg", True),
        ("5 m", "5 metres", True),
        ("5 hours", "5 h", True),
    ],
)
def test_a_number_is_one_with_its_sign_scale_and_unit(page: str, claim: str, is_true: bool):
    text = "The patients of the trial at Stultov got {} of sugar each morning. Nothing else was given."
    found = shown([text.format(page), DEBT], f"{text.partition('.')[0].format(claim)} [p. 1]")
    assert found == ("[p. 1]" if is_true else "[p. 1?]")
