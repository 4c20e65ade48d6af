"""What a mix is planned to take follows from the sources that it has."""

from __future__ import annotations

import pytest

from kvcli.drafts.mix import Mix


def test_without_scouts_neither_rows_nor_a_view_are_planned_for():
    with_scouts = Mix(max=7, window=4, ngram=5, view="stream", sinks=16, local=100, refresh=8)
    assert with_scouts.rows == 1 + 7 + 15
    assert with_scouts.copied(1000) == 124
    assert with_scouts.copied(50) == 50
    without = Mix(max=7, view="stream", sources=("suffix", "recycle"))
    assert without.rows == 8
    assert without.copied(1000) == 0
    assert without.drafter().view is None


def test_a_mix_of_nothing_is_refused():
    with pytest.raises(ValueError, match="one at least"):
        Mix(sources=())
