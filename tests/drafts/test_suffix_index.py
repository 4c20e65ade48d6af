"""The index against a search by brute force, and against itself built another way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.drafts.sources import prompt_lookup
from kvcli.drafts.sources.prompt_lookup import Matches, SuffixIndex

TEXT = st.integers(1, 4).flatmap(lambda k: st.lists(st.integers(0, k), max_size=90))


def brute(text: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """(length, end) of every earlier place that ends as the text does, the longest and then the latest first."""
    places = []
    for end in range(len(text) - 1):
        n = 0
        while n < longest and n <= end and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        if n >= shortest:
            places.append((n, end))
    return sorted(places, reverse=True)


def built(text: list[int], shortest: int = 1, longest: int = 8) -> SuffixIndex:
    index = SuffixIndex(shortest, longest)
    index.extend(text)
    return index


def found(index: SuffixIndex, limit: int = 1000) -> list[tuple[int, int]]:
    matches = index.find(limit)
    return list(zip(matches.lengths, matches.ends, strict=True))


@pytest.fixture(params=[4096, 5], ids=["scanned", "sorted"])
def fold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Short texts are only scanned; with a small threshold they go through the table as well."""
    monkeypatch.setattr(prompt_lookup, "_FOLD", request.param)
    return request.param


@pytest.mark.usefixtures("fold")
@pytest.mark.parametrize("shortest", [2, 3])
@pytest.mark.parametrize("longest", [3, 32])
def test_every_earlier_place_is_found(shortest: int, longest: int):
    @given(TEXT)
    @settings(max_examples=60, deadline=None)
    def check(text: list[int]) -> None:
        assert found(built(text, shortest, longest)) == brute(text, shortest, longest)

    check()


@pytest.mark.usefixtures("fold")
@given(TEXT)
@settings(max_examples=60, deadline=None, suppress_health_check=[])
def test_single_tokens_match_where_no_pair_does(text: list[int]):
    pairs = brute(text, 2, 8)
    assert found(built(text, 1, 8)) == (pairs or brute(text, 1, 8))


@pytest.mark.usefixtures("fold")
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_longest_matches_survive_a_limit(limit: int):
    @given(TEXT)
    @settings(max_examples=60, deadline=None)
    def check(text: list[int]) -> None:
        got, all_places = found(built(text, 2), limit), brute(text, 2, 8)
        assert len(got) <= limit
        assert set(got) <= set(all_places)
        assert [n for n, _ in got][:1] == [n for n, _ in all_places][:1]

    check()


@pytest.mark.usefixtures("fold")
@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9))
@settings(max_examples=60, deadline=None)
def test_token_by_token_and_at_once_are_the_same(pieces: list[list[int]]):
    slowly = SuffixIndex(1, 8)
    for piece in pieces:
        slowly.extend(piece)
    whole = built([t for piece in pieces for t in piece])
    assert found(slowly) == found(whole)
    assert slowly.tail(100) == whole.tail(100)


@pytest.mark.usefixtures("fold")
@given(TEXT, st.integers(0, 90), TEXT)
@settings(max_examples=60, deadline=None)
def test_dropped_tokens_are_forgotten(text: list[int], n: int, more: list[int]):
    index = built(text)
    index.truncate(n)
    assert found(index) == found(built(text[:n]))
    index.extend(more)
    assert len(index) == len(text[:n] + more)
    assert found(index) == found(built(text[:n] + more))


def test_a_long_text_is_sorted_and_still_searched_exactly(random_ids):
    text = random_ids(9001, 40, 1)
    index = built(text[:8191], 2, 32)
    for token in text[8191:]:
        index.extend([token])
    assert found(index) == brute(text, 2, 32)


def test_places_of_a_very_common_pair_are_the_latest_ones():
    matches = built([7] * 20011, 2, 32).find(16)
    assert matches == Matches(list(range(20009, 19993, -1)), [32] * 16)


def test_ids_wider_than_the_table_find_no_false_places(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_lookup, "_FOLD", 5)
    wide = 1 << 19
    assert found(built([1, 2, 3, 9, 1 + wide, 2, 5, 6, 1, 2], 2)) == [(2, 1)]


@pytest.mark.parametrize(
    ("text", "end", "n", "after"),
    [
        ([1, 2, 3, 4, 1, 2], 1, 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 1, 6, [3, 4, 1, 2, 3, 4]),  # the repetition is taken to go on
        ([5, 5], 0, 3, [5, 5, 5]),
    ],
)
def test_what_followed_is_copied(text: list[int], end: int, n: int, after: list[int]):
    assert built(text).following([end], n) == [after]


@given(TEXT, TEXT)
@settings(max_examples=60, deadline=None)
def test_the_shared_prefix_is_measured(a: list[int], b: list[int]):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert built(a).shared(b) == n
