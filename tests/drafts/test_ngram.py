"""What the n-gram drafter proposes: trees that hold, copies that make sense, settings that are checked."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.drafts.sources.prompt_lookup import PromptLookup
from kvcli.drafts.tree.tree import AcceptanceRates
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.forward_request import Draft, Rows
from kvcli.engine.stats import Step
from kvcli.methods.drafts.ngram import Ngram

TEXT = st.integers(1, 4).flatmap(lambda k: st.lists(st.integers(0, k), min_size=1, max_size=90))
FIXED = Ngram(adaptive=False)


def proposal(config: Ngram, text: list[int], room: int = 100) -> Draft:
    drafter = config.drafter()
    drafter.start(text)
    return drafter.propose(text, room)


def observe(drafter: TreeDrafter, text: list[int], draft: Draft, new: list[int], seconds: float = 0.01) -> None:
    rows = Rows.build(text[-1], len(text) - 1, draft)
    drafter.observe(Step(rows, torch.empty(0), list(range(len(new))), new, seconds))


@given(TEXT, st.integers(0, 9), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_draft_is_a_tree_within_its_bounds(text: list[int], room: int, most: int, branches: int, min_match: int):
    draft = proposal(Ngram(max=most, branches=branches, min_match=min_match, adaptive=False), text, room)
    assert len(draft.ids) == len(draft.parent) <= most
    assert all(-1 <= p < i for i, p in enumerate(draft.parent))
    assert max(draft.depth(), default=0) <= room
    edges = list(zip(draft.parent, draft.ids, strict=True))
    assert len(set(edges)) == len(edges)
    assert all(draft.parent.count(p) <= branches for p in draft.parent)
    Rows.build(text[-1], len(text) - 1, draft)


@pytest.mark.parametrize("config", [FIXED, Ngram()])
def test_nothing_is_proposed_where_nothing_repeats(config: Ngram):
    assert proposal(config, list(range(50))) == Draft([], [])


def test_what_followed_before_is_proposed():
    assert proposal(FIXED, [1, 2, 3, 4, 5, 9, 1, 2, 3]).ids[:2] == [4, 5]


def test_shared_beginnings_cost_one_row_and_forks_become_siblings():
    text = [1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2]
    draft = proposal(Ngram(adaptive=False, min_match=2), text)
    assert (draft.ids[:2], draft.parent[:2]) == ([3, 4], [-1, 0])
    assert {draft.ids[i] for i, p in enumerate(draft.parent) if p == 1} == {50, 60}


def test_the_frequent_continuation_comes_before_the_recent_one():
    text = [1, 2, 7, 0, 1, 2, 7, 5, 1, 2, 7, 6, 1, 2, 8, 3, 1, 2]
    draft = proposal(Ngram(adaptive=False, min_match=2), text)
    assert [draft.ids[i] for i, p in enumerate(draft.parent) if p == -1] == [7, 8]


@pytest.mark.parametrize(("text", "rows"), [([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], 3), ([1, 2, 3, 4, 5, 6, 1, 2, 3], 7)])
def test_a_short_match_gets_few_rows_before_their_cost_is_known(text: list[int], rows: int):
    copies = PromptLookup(1, 32)
    copies.start(text)
    (offer,) = copies.offers(copies.root(8), 0, 1)
    assert copies.safe(offer) == rows


def test_without_a_clock_all_there_is_is_sent():
    assert len(proposal(FIXED, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]).ids) == 15  # the seventh is all but hopeless, and free


def test_refused_drafts_lose_credit_and_confirmed_ones_gain_it():
    chances = []
    for right in (True, False):
        drafter = FIXED.drafter()
        for turn in range(30):
            text = [1000 + turn, 1, 2, 3, 2000 + turn, 1, 2]
            drafter.start(text)
            observe(drafter, text, drafter.propose(text, 9), [3] if right else [4000 + turn])
        chances.append(next(a.share for a in drafter.report().by_source["prompt-lookup"] if a.match == "2-3"))
    assert chances[0] > 0.8 > 0.4 > chances[1]


@given(TEXT, st.integers(0, 90), TEXT)
@settings(max_examples=60, deadline=None)
def test_an_undo_leaves_nothing_behind(text: list[int], n: int, more: list[int]):
    drafter = FIXED.drafter()
    drafter.start(text)
    again = text[:n] + more
    drafter.start(again)
    assert drafter.propose(again, 9) == proposal(FIXED, again, 9)


@given(TEXT, TEXT)
@settings(max_examples=60, deadline=None)
def test_a_text_changed_without_notice_is_followed(text: list[int], other: list[int]):
    """The first token of an answer, for one, is nobody's step."""
    drafter = FIXED.drafter()
    drafter.start(text)
    longer = text + other
    assert drafter.propose(longer, 9) == proposal(FIXED, longer, 9)


def test_each_pass_is_counted_once():
    drafter, text = Ngram().drafter(), [1, 2, 3]
    drafter.start(text)
    observe(drafter, text, Draft([], []), [4])  # nobody asked: a step of some other kind
    draft = drafter.propose([1, 2, 3, 4], 9)
    observe(drafter, [1, 2, 3, 4], draft, [5])
    observe(drafter, [1, 2, 3, 4], draft, [5])
    assert drafter._sources[0].index.tail(9) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max", 0, "1 to 256"),
        ("max", 2.5, "1 to 256"),
        ("min_match", 0, "1 to 64"),
        ("max_match", 300, "1 to 256"),
        ("branches", True, "1 to 64"),
        ("adaptive", 1, "true or false"),
        ("min_speedup", 1.5, "0 to 1"),
        ("min_speedup", "fast", "0 to 1"),
        ("baseline_interval", 1, "8 to 4096"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(key: str, value: object, allowed: str):
    with pytest.raises(ValueError, match=f"{key} = .*{allowed}"):
        Ngram(**{key: value})


def test_a_match_cannot_have_to_be_longer_than_it_may_be():
    with pytest.raises(ValueError, match="max_match = 8 is less than min_match = 9"):
        Ngram(min_match=9, max_match=8)


def test_settings_are_read_without_torch_or_numpy():
    code = "import sys, kvcli.methods.drafts.ngram as n; n.Ngram(); print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_another_text_had_behind_the_shared_beginning_is_forgotten():
    copies, fresh = PromptLookup(1, 32), PromptLookup(1, 32)
    copies.start([1, 2, 3, 4, 9, 5, 6, 7, 8, 5, 6])
    text = [1, 2, 3, 4, 9, 5, 6, 2, 5]
    copies.start(text)
    fresh.start(text)
    assert len(copies.index) == len(text)
    named = [[(o.id, o.chance) for o in one.offers(one.root(4), 0, 3)] for one in (copies, fresh)]
    assert named[0] == named[1] != []


def test_a_draft_counts_for_its_share():
    """A token that half of the places name is expected half of the time: taking it says more than taking a sure one."""
    chances = []
    for share in (0.5, 1.0):
        odds = AcceptanceRates(((0.3, 0.1),), ("1",))
        for was_right in (True, False, True):
            odds.learn(0, 0, was_right, share)
        chances.append(odds.chance(0, 0))
    half, whole = chances
    assert whole == pytest.approx((0.6 * 0.98**3 + 0.98**2 + 1) / (2 * 0.98**3 + 0.98**2 + 0.98 + 1))
    assert half == pytest.approx((0.6 * 0.98**3 + 0.98**2 + 1) / (2 * 0.98**3 + (0.98**2 + 0.98 + 1) / 2))
