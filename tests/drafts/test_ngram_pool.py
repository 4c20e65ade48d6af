"""The pool: longest key first, newest run first, bounds kept."""

from __future__ import annotations

import pytest

from kvcli.drafts.sources.ngram_pool import NgramPool
from kvcli.drafts.tree.tree import grow
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.settings.profile import Profile


def guessed(pool: NgramPool, text: list[int], most: int = 8, branches: int = 4) -> list[tuple[int, int]]:
    pool.start(text)
    return [(g.id, g.parent) for g in grow([pool], most, 9, branches)]


def test_the_longer_key_comes_first():
    pool = NgramPool(3, 8, 8)
    pool.put([9, 2], [5, 6])
    pool.put([1, 2], [3, 4])
    assert guessed(pool, [0, 1, 2])[0] == (3, -1)
    assert guessed(pool, [0, 9, 2])[0] == (5, -1)


def test_the_newest_run_comes_first_and_the_oldest_goes():
    pool = NgramPool(1, 2, 8)
    for run in ([3], [4], [5], [4]):
        pool.put([1], run)
    assert guessed(pool, [1]) == [(4, -1), (5, -1)]


def test_no_more_runs_than_asked_for():
    pool = NgramPool(1, 8, 2)
    for run in range(5):
        pool.put([1], [run])
    assert len(guessed(pool, [1])) == 2


def test_shared_beginnings_cost_one_row():
    pool = NgramPool(4, 8, 8)
    pool.put([1, 1, 1, 1], [2, 3, 4])
    pool.put([1, 1, 1, 1], [2, 3, 5])
    assert guessed(pool, [1, 1, 1, 1]) == [(2, -1), (3, 0), (5, 1), (4, 1)]


def test_keys_are_limited(monkeypatch):
    monkeypatch.setattr("kvcli.drafts.sources.ngram_pool.KEYS", 3)
    pool = NgramPool(1, 8, 8)
    for token in range(9):
        pool.put([token], [0])
    assert len(pool) == 3
    assert not guessed(pool, [5])
    assert guessed(pool, [8])


def test_a_text_that_grew_is_followed():
    pool = NgramPool(2, 8, 8)
    pool.put([1, 2], [3])
    pool.start([0, 1])
    pool.extend([2])
    assert [g.id for g in grow([pool], 4, 4, 4)] == [3]


@pytest.mark.parametrize("at", [2, 5, 9])
def test_the_text_itself_fills_it_where_it_is_to(at: int):
    """As FAFO's release does: every n-gram of prompt and answer, by its first token."""
    text, pool = [1, 2, 3, 4, 1, 5, 6, 2, 1], NgramPool(2, 8, 8, seeds=3)
    pool.start(text[:at])
    for token in text[at:]:
        pool.extend([token])
    assert sorted((g.id, g.parent) for g in grow([pool], 8, 8, 8)) == [(2, -1), (3, 1), (5, -1), (6, 0)]
    plain = NgramPool(2, 8, 8)
    plain.start(text)
    assert not grow([plain], 8, 8, 8)


def test_without_a_clock_all_there_is_to_draft_is_verified():
    """`fafo-paper`: 20 whole 9-grams, however unlikely, where a drafter that has to pay leaves the faint ones out."""
    settings = Profile.load("fafo-paper").spec.settings
    _, pool = settings.window_and_pool(())
    for run in range(20):
        pool.put([7], [100 * run + depth for depth in range(1, 9)])
    drafter = TreeDrafter(settings, [pool], clock=lambda: 0.0)
    drafter.start([5, 7])
    draft = drafter.propose([5, 7], 100)
    assert (len(draft.ids), max(draft.depth())) == (160, 8)
    assert len(grow([pool], 160, 100, 20)) < 80
