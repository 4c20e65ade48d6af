"""Points while an answer grows: the same as of the whole answer, each said once and as soon as it is certain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.summarize.points import PointStream, point_of, unique
from kvcli.summarize.result import Point, written
from kvcli.summarize.split import Splitter, split

DOCUMENTS = ["a.pdf", "b.txt"]


def pen() -> PointStream:
    return PointStream(lambda raw: point_of(raw, None, DOCUMENTS), DOCUMENTS, is_final=True)


def streamed(pieces: list[str]) -> list[Point]:
    """What is said of an answer that comes in these pieces."""
    own, said = pen(), ""
    points: list[Point] = []
    for piece in pieces:
        said += piece
        points += [event.point for event in own.write(said)]
    points += [event.point for event in own.write(said, whole=True)]
    assert points == own.points
    return points


def whole(answer: str) -> list[Point]:
    return unique([point_of(raw, None, DOCUMENTS) for raw in split(answer, DOCUMENTS)])


LINES = st.sampled_from(
    """- The river rose. |- It fell [p. 1].|  - Below it [p. 2].|* **Bold** [p. 3]|- [p. 4]|1. [p. 5]|12. Twelve|12 eels
    [p. 6]|[p. 7] The mill burned.|The bridge failed. [p. 8] It was rebuilt.|[a.pdf p. 1]|It rose [b.txt p. 2].|[p. 9
    (see p. 9)|[p. 10] [p. 11]|  goes on [p. 12]|# Costs|## [p. 13]|**Revenue:**|**[p. 14]**|__Debt__|Here is the list:
    Sure, below is it:|Sure!|Here is a summary:|**Here’s the summary:**|Overview:|Summary|References|[p. 1-3]
    - “Quoted”|- ...|?|- |-|+ A [c.md p. 1]
    5|5.|5. |(5) Five|- 5|- **|- _A_|é|# |#|\u4e2d\u6587。[p. 15]\u597d""".replace("\n    ", "|").split("|")
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\n\n", "\r\n", "\r", " ", "", "\n \n", "\u2028", "\x0b"])
ANSWERS = (
    st.lists(st.tuples(LINES, ENDS).map("".join), max_size=12).map("".join)
    | st.text("-*#[]p. 12\n\r§()aA", max_size=80)
    | st.text(max_size=60)
)


@settings(max_examples=400)
@given(ANSWERS, st.data())
def test_what_is_streamed_is_what_is_written_whole(answer: str, data: st.DataObject):
    wanted = whole(answer)
    assert streamed(list(answer)) == wanted
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert streamed(pieces) == wanted
    assert streamed([]) == []


@settings(max_examples=400)
@given(ANSWERS, ANSWERS)
def test_what_is_found_stays_however_the_answer_goes_on(answer: str, more: str):
    splitter = Splitter(DOCUMENTS)
    lines, _, begun = answer.rpartition("\n")
    for line in (lines + "\n").splitlines() if _ else []:
        splitter.feed(line)
    early = [*splitter.found, *(splitter.after(begun.splitlines()[0]) if begun else [])]
    assert split(answer + more, DOCUMENTS)[: len(early)] == early


SOON = {
    "- One [p. 1].\n- T": ["One [p. 1]."],
    "- One [p. 1].\n12 m": [],  # may become a bullet that is a citation and nothing else
    "- One [p. 1].\n- [p": [],
    "- One.\n  on": [],
    "- One.\n- Two.\nN": ["One.", "Two."],
    "One. Two. [p. 2]\n\n": ["One."],
    "One. Two.\n\n# C": ["One.", "Two."],
}


@pytest.mark.parametrize("answer", SOON)
def test_a_point_comes_as_soon_as_nothing_can_change_it(answer: str):
    assert [event.point.marked for event in pen().write(answer)] == SOON[answer]


def test_a_preface_is_one_only_at_the_beginning():
    answer = "Here is a summary of all:\n\n- One.\n\nHere are the losses:\n\n- Two."
    assert written(streamed(list(answer))) == written(whole(answer)) == "- One.\n\nHere are the losses:\n- Two.\n"


def test_points_that_come_again_are_counted():
    own = pen()
    list(own.write("- One.\n- One.\n- One."))
    list(own.write("- One.\n- One.\n- One.\n- Two.", whole=True))
    assert ([point.text for point in own.points], own.repeated) == (["One.", "Two."], 2)
