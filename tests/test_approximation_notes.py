"""A profile that may lose facts says so when it may have: every shipped one, over a text that is too long for it."""

from __future__ import annotations

from functools import cache

import pytest

import kvcli
from kvcli.chat.turn import approximation_note
from kvcli.demo import report_path
from kvcli.render.turn.status_row import RowOptions, status_row
from kvcli.render.turn.turn_summary import one_line_summary, summary
from kvcli.schemas.turn import Run, TurnDocument
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import Profile, load_profile

DRAFTED = ("draft", "specextend", "specextend-paper")
SHIPPED = {file.profile: Profile.load(file.profile) for file in builtin_files() if file.profile not in DRAFTED}
APPROX = [name for name, profile in SHIPPED.items() if profile.exactness == "approx"]
EXACT = [name for name, profile in SHIPPED.items() if profile.exactness == "exact"]
SAID = {  # what each loses, in words of its note
    "balanced": "balanced stores keys and values in 8 bits",
    "budget": "budget keeps the tokens that fit a budget of bytes, by attention while the prompt is repeated, "
    "stores the rest in 8 and 4 bits",
    "cpu": "cpu stores keys and values in 8 bits",
    "expected": "expected keeps 50% of a prompt, by the attention expected from later questions",
    "fastgen": "fastgen keeps 50% of the tokens in each head, by its attention pattern",
    "fastgen-paper": "fastgen-paper keeps tokens with 95% of the attention in each head, by its attention pattern",
    "kvzip": "kvzip keeps 25% of a prompt, by attention while the prompt is repeated",
    "lazy": "lazy reads 20% of a prompt of 1,024 tokens or more in the upper layers",
    "lazy-fast": "lazy-fast reads 20% of a prompt of 1,024 tokens or more in the upper layers",
    "lazy-paper": "lazy-paper reads 10% of a prompt in the upper layers",
    "lean": "lean stores keys in 4 and values in 2 bits",
    "max-context": "max-context stores keys and values in 4 bits, reads 3% of the text for each token",
    "offload": "offload reads 3% of the text for each token",
    "snap": "snap keeps 50% of a prompt, by attention from its end",
    "streaming": "streaming keeps the first 4 tokens and the newest 1,020",
}


@cache
def loaded(quant):
    return kvcli.load("demo", profile=Profile.load("exact").replace(load={"quant": quant}))


@cache
def answered(name, tokens):
    """A turn about the first so many tokens of the report."""
    profile = SHIPPED[name]
    model = loaded(profile.load.quant).with_profile(profile)
    text = report_path().read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text, add_special_tokens=False)[:tokens]
    turn = model.generate(ids, max_new_tokens=4, ignore_eos=True)
    run = Run(name, profile.spec.method, profile.hash, profile.exactness)
    return turn, TurnDocument.of(turn, model.info, run)


def test_every_shipped_profile_is_one_or_the_other():
    assert sorted(APPROX) == sorted(SAID)
    assert len(APPROX) + len(EXACT) == len(SHIPPED)


@pytest.mark.parametrize("name", APPROX)
def test_beyond_its_budget_the_note_the_figures_and_the_json_say_approx(name):
    turn, document = answered(name, 2500)
    note = turn.stats.approx
    assert note.startswith(f"approximate answer: profile {SAID[name]}")
    assert note.endswith(", so facts may be missing; -P exact uses the full text")
    for width in (200, 40):
        assert any("approx" in line for line in summary(turn, width))
        assert "approx" in one_line_summary(turn, width)[0]
        assert ("approx", "yellow") in status_row(turn.stats, RowOptions(name), None, width)
    assert document.approx
    assert {"kind": "approx", "text": note} in document.events


@pytest.mark.parametrize("name", EXACT)
def test_where_nothing_is_lost_nothing_is_said(name):
    turn, document = answered(name, 2500)
    assert turn.stats.approx == ""
    assert "approx" not in str([*summary(turn, 200), *one_line_summary(turn, 200)])
    assert not document.approx
    assert document.events == []


@pytest.mark.parametrize("name", sorted({*APPROX} - {"fastgen-paper", "lazy-paper"}))  # which spare no text
def test_a_text_within_its_budget_is_whole(name):
    turn, document = answered(name, 60)
    assert (turn.stats.approx, document.approx, document.events) == ("", False, [])


def test_a_new_text_is_whole_again():
    model = loaded("none").with_profile(SHIPPED["streaming"])
    ids = model.tokenizer.encode(report_path().read_text(encoding="utf-8"), add_special_tokens=False)
    assert model.generate(ids[:2500], max_new_tokens=1).stats.approx
    assert not model.generate(ids[700:760], max_new_tokens=1).stats.approx


def test_a_budget_that_was_typed_is_named_as_what_loses():
    flags = {"memory.budget": "25%", "policy.name": "budget", "exactness": "approx"}
    for name in ("exact", "budget"):
        typed = load_profile(name, flags={key: (value, "--budget") for key, value in flags.items()})
        note = approximation_note(typed, ["forgotten"])
        assert note.startswith(
            f"approximate answer: profile {name} --budget 25% keeps the tokens that fit a budget of bytes"
        )
        assert note.endswith("; -P exact without --budget uses the full text")


def test_numbers_of_fewer_bits_than_the_models_are_a_loss():
    for bits, lost in (("fp32", ""), ("bf16", "approximate answer: profile own stores keys and values in bf16")):
        changes = {"kv": {"dtype": bits}, "load": {"dtype": "fp32"}, "exactness": "approx", "name": "own"}
        model = kvcli.load("demo", profile=Profile.load("exact").replace(**changes))
        assert model.generate([7, 8, 9], max_new_tokens=1).stats.approx.startswith(lost)
        assert bool(lost) == bool(model.generate([7, 8, 9], max_new_tokens=1).stats.approx)
