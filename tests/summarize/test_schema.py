"""A summary as JSON."""

from __future__ import annotations

import pytest

from kvcli.schemas.documents import DOCUMENTS, json_schema
from kvcli.schemas.turn import Run, TurnDocument
from kvcli.summarize.document import plan_document, source_facts, summary_document
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from tests.fake_model import fake_info
from tests.summarize.scribe import Scribe, paged, summary_of

PAPER = paged("The pump leaked for 4 days. Nobody saw it.", "The tower shifted by 14 metres.")
SAID = "- The pump leaked for 4 days [p. 1].\n- The tower shifted by 14 metres [p. 1].\n- More came [p. The]."


def document(**options: object):  # type: ignore[no-untyped-def]
    model = Scribe(lambda _: SAID)
    summary = summary_of(model, [PAPER], Request(**options))  # type: ignore[arg-type]
    turns = [TurnDocument.of(a.turn, fake_info(), Run("fafo")) for a in summary.turns]
    return summary_document(summary, [source_facts(PAPER, "x/a.pdf", 30)], turns).document()


def test_points_and_what_became_of_their_citations():
    found = document(quotes=True)
    assert found["schema"] == "kvcli.summary/2"
    cites = [point["cites"][0] for point in found["points"]]
    assert [(c["page"], c["confirmed"], c["corrected"], c["instead_of"]) for c in cites] == [
        (1, True, False, None),
        (2, True, True, "p. 1"),
        (None, False, False, None),
    ]
    assert (cites[0]["quote"], cites[0]["chars"]) == ("The pump leaked for 4 days.", [0, 27])
    assert (found["unconfirmed"], found["corrected"], found["parts"], found["mode"]) == (1, 1, 1, "whole")
    assert found["source"] == found["sources"][0]
    assert found["turns"][0]["turn"]["schema"] == "kvcli.turn/2"
    assert found["text"].splitlines()[-1] == "- More came [p. The?]."


def test_what_nobody_checked_is_neither_true_nor_false():
    found = document(check=False)
    assert [point["cites"][0]["confirmed"] for point in found["points"]] == [None] * 3
    assert found["unconfirmed"] == 0


def test_a_plan():
    model = Scribe(lambda _: SAID)
    plan = make_plan([PAPER], Request(), PlanWindow.of(model))  # type: ignore[arg-type]
    found = plan_document(plan, [source_facts(PAPER, "a.pdf")]).document()
    assert (found["mode"], found["seconds"], found["merges"]) == ("whole", None, 0)
    assert [(part["first"], part["last"]) for part in found["parts"]] == [("1", "2")]


@pytest.mark.parametrize("name", ["summary", "summary_plan"])
def test_schemas_are_listed(name: str):
    assert name in DOCUMENTS
    assert "properties" in json_schema(name)
