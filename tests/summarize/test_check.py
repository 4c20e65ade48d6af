"""Citations held against pages: what is true stays, what is false is marked, what is elsewhere is moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.summarize.check import Checker, Claim, Passage
from kvcli.summarize.citations import Place, find, write
from kvcli.summarize.claim_words import units, words
from kvcli.summarize.lexicon import replaced_by
from kvcli.summarize.result import marks
from kvcli.summarize.units import heads
from tests.bench.citations import is_right, judged
from tests.summarize.cases import KINDS, SURE, cases

EACH = 24  # cases of each kind


@pytest.mark.parametrize("kind", SURE)
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
    return marks(Checker(pages(*texts)).judge(said[: bracket.start], bracket.places))


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
        ("Debt cover fell to 1.8 at the end of September [p. 2, 3]", "[p. 2, 3?]"),
        ("Bridge repairs were moved to 2027 after the winter survey [p. 1, 3]", "[p. 1?, 3]"),
        ("Bridge repairs were moved to 2027 [p. 1-200]", "[p. 3]"),
        ('It says that the "old town bridge stays closed" to lorries [p. 3]', "[p. 3]"),
        ('It says that the "new town bridge stays closed" to lorries [p. 3]', "[p. 3?]"),
        ("Revenue rose by 12 % in the third quarter, carried by river freight, and the board met [p. 1]", "[p. 1]"),
        ("Revenue rose by 12 % in the third quarter, carried by river freight, and lorries stopped [p. 1]", "[p. 1?]"),
        ("The company expects a merger with Acme [p. 1]", "[p. 1?]"),
        ("[p. 1]", "[p. 1?]"),
    ],
)
def test_claims_in_other_words(said: str, expected: str):
    assert shown(REPORT, said) == expected


def test_two_pages_with_the_claim_leave_the_doubt():
    assert shown([REVENUE, DEBT, REVENUE], "Revenue rose by 12 % in the third quarter [p. 2]") == "[p. 2?]"


def test_one_page_number_of_two_documents_is_two_places():
    """Neither is taken for the only one that has the claim, though all of their names but the document's are alike."""
    passages = [
        Passage(Place("page", label, name), text)
        for name, label, text in (("a", "3", REVENUE), ("a", "4", DEBT), ("b", "3", REVENUE))
    ]
    said = "Revenue rose by 12 % in the third quarter [a p. 4]"
    (bracket,) = find(said)
    assert marks(Checker(passages).judge(said[: bracket.start], bracket.places)) == "[a p. 4?]"
    passages[2] = Passage(Place("page", "3", "b"), BRIDGE)
    assert marks(Checker(passages).judge(said[: bracket.start], bracket.places)) == "[a p. 3]"


@pytest.mark.parametrize(("last", "mark"), [(7, ""), (8, "?"), (9, "?")])
def test_a_range_of_more_than_five_pages_points_at_none(last: int, mark: str):
    """Else whoever cites a whole report would be right whatever is said."""
    texts = [DEBT, DEBT, *[BRIDGE] * 7]
    assert shown(texts, f"Bridge repairs were moved to 2027 [p. 3-{last}]") == f"[p. 3-{last}{mark}]"


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
        (cite,) = checker.judge(said, [wrong])
        assert marks([cite]) == "[a.pdf p. 1]"
        assert cite.instead_of == write([wrong])[1:-1]


def test_headings_and_lines():
    passages = [Passage(Place("heading", "Methods & Materials"), REVENUE), Passage(Place("line", "41-80"), DEBT)]
    checker = Checker(passages)
    assert checker.at(Place("heading", "methods & materials")) == [0]
    assert [checker.at(Place("line", label)) for label in ("41-80", "50", "50-60", "80-90", "81")] == [[1]] * 4 + [[]]


def test_a_quote_is_the_sentence_as_it_stands():
    text = "Nothing here.\n\nRevenue rose by 12 % in the\nthird quarter. The board met."
    section = f"Gone before. {text}"
    passage = Passage(Place("page", "1"), text, offset=len("Gone before. "))
    (cite,) = Checker([passage]).judge("In the third quarter revenue rose 12 %", [passage.place], quotes=True)
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
    for cite in checker.judge(claim, [Place("page", str(n)) for n in cited], quotes=True):
        if cite.confirmed:
            assert checker.at(cite.place)
        if cite.quote:
            assert cite.quote.text.strip()


@given(texts)
def test_sentences_cover_all_words(text: str):
    keys = {word.key for word in words(text)}
    covered = set().union(*(unit.keys for unit in units(text)), frozenset())
    assert covered >= keys
    assert covered == keys or heads(text)


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
    checker = Checker([Passage(Place("chapter", "Debt"), DEBT)])
    (cite,) = checker.judge("Debt cover was 1.8 in September", [Place("heading", "debt")])
    assert (cite.place, marks([cite])) == (Place("chapter", "Debt"), "[§ Debt]")


@pytest.mark.parametrize(
    ("text", "n"),
    [("x" + "." * 99_000 + "y", 1), ("A. " * 30_000, 1), ("x" + "。." * 40_000 + "y", 40_001), ("\n " * 40_000, 0)],
)
def test_long_rows_are_cut_into_sentences(text: str, n: int):
    """Where a pattern takes squares, this never ends."""
    assert len(units(text)) == n


PLANT = "In 2027 the plant in Lyon employed 340 people and grew by 12 %, as Adler said. The mill stands idle."


@pytest.mark.parametrize(
    "claim",
    [
        "In 2027 Adler closed Lyon and fired 12 % of 340 staff",
        "Adler bribed 340 judges in Lyon in 2027, 12 % of whom confessed",
        "Adler stole 12 %",
    ],
)
def test_numbers_and_names_confirm_no_other_words(claim: str):
    assert shown([PLANT, DEBT], f"{claim} [p. 1]") == "[p. 1?]"


def test_a_claim_of_numbers_and_names_alone_is_confirmed():
    assert shown([PLANT, DEBT], "Lyon 2027: 340, 12 % (Adler) [p. 1]") == "[p. 1]"


def test_a_quote_goes_by_all_words_numbers_and_names_included():
    text = "The plant grew. The plant grew by 12 %."
    place = Place("page", "1")
    (cite,) = Checker(pages(text)).judge("Plant grew by 12 %", [place], quotes=True)
    assert cite.quote is not None
    assert cite.quote.text == "The plant grew by 12 %."


CLOSED = "Adler closed the plant in Lyon in 2027. The board met, and Adler left."


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Adler closed the plant in Lyon in 2027 [p. 1]", "[p. 1]"),
        ("Miller closed the plant in Lyon in 2027 [p. 1]", "[p. 1?]"),
        ("Toyota closed the plant in Lyon in 2027 [p. 1]", "[p. 1?]"),
        ("Overall, the plant in Lyon closed in 2027 [p. 1]", "[p. 1]"),
        ("Observers say that Adler closed the plant in Lyon in 2027 [p. 1]", "[p. 1]"),
    ],
)
def test_an_unknown_name_in_front_does_not_stand_for_the_one_of_the_page(said: str, expected: str):
    filler = " ".join(f"The {word} was painted." for word in "gate mill road barn roof pier lamp kiln".split())
    assert shown([CLOSED, filler], said) == expected


MILL = (
    "The council opened the old mill to visitors in spring. The crew closed the lower gate before the storm. The "
    "harbour was painted by the crew. Visitors praised the harbour."
)


@pytest.mark.parametrize(
    ("claim", "mark"),
    [
        ("The council opened the old mill to visitors in spring", ""),
        ("The council closed the old mill to visitors in spring", "?"),
        ("The council opened the old harbour to visitors in spring", "?"),
        ("In spring, the council opened the old mill to visitors", ""),
        ("In spring the old mill was opened to visitors by the council", ""),
        ("The council unlocked the old mill to visitors in spring", ""),  # a new word may be a synonym
        ("The crew shut the lower gate before the storm", ""),
        ("The visitors closed the lower gate before the storm", "?"),
    ],
)
def test_a_word_of_the_text_in_place_of_another_is_noticed(claim: str, mark: str):
    assert shown([MILL, DEBT], f"{claim} [p. 1]") == f"[p. 1{mark}]"


@pytest.mark.parametrize(("kind", "least"), [("one plain word changed", 20), ("two plain words changed", 23)])
def test_changed_words_are_mostly_marked(kind: str, least: int):
    assert sum(is_right(case) for case in cases(EACH, 2, [kind])) >= least


def test_replaced_words_stand_between_the_same_neighbours():
    (unit,) = units("The old mill closed the lower gate before the storm.")
    assert replaced_by(words("The old mill opened the lower gate"), unit) == {"open": {"clos"}}
    assert replaced_by(words("The old mill closed the gate"), unit) == {}  # left out
    assert replaced_by(words("The old mill soon closed the lower gate"), unit) == {}  # added
    assert replaced_by(words("Before the storm the lower gate closed"), unit) == {}  # moved
    assert replaced_by(words("The new mill closed the lower gate"), unit) == {"new": {"old"}}


def test_the_docs_name_every_kind_of_claim():
    text = (Path(__file__).parents[2] / "docs/design/citations.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if kind not in " ".join(text.split())] == []


def test_a_sentence_ends_where_its_document_ends():
    """A page's last words go on at the next page, and never in the next document."""
    texts = ("The river rose by forty", "centimetres near the old mill at Brantov. Nobody was hurt.")
    claim = "The river rose by forty centimetres near the old mill at Brantov"
    for documents, confirmed in ((("a.pdf", "a.pdf"), True), (("a.pdf", "b.pdf"), False)):
        places = [Place("page", str(i), name) for i, name in enumerate(documents, 1)]
        checker = Checker([Passage(place, text) for place, text in zip(places, texts, strict=True)])
        (cite,) = checker.judge(claim, places[:1])
        assert cite.confirmed == confirmed
