"""The command that tries every text-generating class of transformers: how each class may end, and all of them."""

from __future__ import annotations

import json
import os
import runpy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import all_families
from tests.all_families import KINDS, Verdict, census, config_of, judged, main
from tests.families import FAMILIES

NEW, SECONDS = 24, 60
ROOT = Path(__file__).parents[1]


# the last one keeps its attention function around a text whose own is another
@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "stablelm", "nemotron", "granite_speech"])
def test_an_equal_text_is_equal_and_not_one_token_over_and_over(kind: str) -> None:
    found = judged(kind, NEW, SECONDS)
    assert (found.outcome, found.why) == ("equal", "")
    assert found.distinct > 2


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bart", "it is an encoder-decoder"),
        ("gemma4_unified", "the mask of layer 0 depends on more than positions"),  # from what is a picture
    ],
)
def test_what_cannot_be_served_is_refused_by_name(kind: str, why: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    found = judged(kind, NEW, SECONDS)
    assert found.outcome == "refused"
    assert found.why.startswith("model_unsupported: ")
    assert why in found.why


def test_a_text_that_differs_is_wrong_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    right = all_families.ours

    def third_is_another(*args: Any) -> list[int]:
        text = right(*args)
        return [*text[:2], text[2] ^ 1, *text[3:]]

    monkeypatch.setattr(all_families, "ours", third_is_another)
    found = judged("llama", NEW, SECONDS)
    assert (found.outcome, found.why) == ("wrong", "plain parts at token 3")


ENDS = {
    "raises": (lambda *_: 1 // 0, "ZeroDivisionError"),
    "dies": (lambda *_: os._exit(9), "its process ended with 9"),
    "hangs": (lambda *_: time.sleep(60), "not done after 1 s"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_class_that_breaks_breaks_alone(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        all_families, "judge", lambda kind, new: ENDS[end][0]() if kind == "b" else Verdict(kind, "equal")
    )
    found = list(census(["a", "b", "c"], NEW, 1 if end == "hangs" else SECONDS, 1))
    assert [one.outcome for one in found] == ["equal", "crashed", "equal"]
    assert ENDS[end][1] in found[1].why


def test_a_crash_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for outcome, status in (("equal", 0), ("refused", 0), ("unbuilt", 0), ("wrong", 1), ("crashed", 1)):
        monkeypatch.setattr(all_families, "judged", lambda kind, new, seconds, o=outcome: Verdict(kind, o))
        assert main(["--only", "llama"]) == status
        assert f'"{outcome}": 1' in capsys.readouterr().out


def test_every_listed_family_is_among_them() -> None:
    assert {config_of(kind).model_type for kind in ("gemma3_text", "qwen2")} == {"gemma3_text", "qwen2"}
    assert {f.model_type or f.name for f in FAMILIES.values()} <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


CENSUS: dict[str, Any] = json.loads((ROOT / "docs" / "census.json").read_text())


def test_the_census_has_nothing_wrong_and_its_page_says_it() -> None:
    assert [one["kind"] for one in CENSUS["verdicts"] if one["outcome"] in ("wrong", "crashed")] == []
    if CENSUS["transformers"] == transformers.__version__:
        assert [one["kind"] for one in CENSUS["verdicts"]] == KINDS
    page = (ROOT / "docs" / "reference" / "census.md").read_text()
    part = page.partition("<!-- generated: census docs/census.json -->\n")[2].partition("\n<!-- end -->")[0]
    assert part == runpy.run_path(str(ROOT / "docs" / "generate.py"))["census"]("docs/census.json")


@pytest.mark.parametrize("kind", ["qwen3", "mistral3", "qwen2_5_vl", "bloom", "doge", "paligemma"])
def test_the_census_is_what_is_found_now(kind: str) -> None:
    (known,) = [one for one in CENSUS["verdicts"] if one["kind"] == kind]
    found = judged(kind, NEW, SECONDS)
    assert (found.outcome, found.bits) == (known["outcome"], known["bits"])


@pytest.mark.slow
def test_all_of_them() -> None:
    found = list(census(KINDS, NEW, SECONDS, 1))
    ended = Counter(one.outcome for one in found)
    assert [one for one in found if one.outcome in ("wrong", "crashed")] == []
    assert ended["equal"] >= 65
    listed = {f.model_type or f.name for f in FAMILIES.values()}
    assert listed <= {one.kind for one in found if one.outcome == "equal" and one.distinct > 2}
