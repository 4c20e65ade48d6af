"""The Jacobi window: what each lookahead row sees, and that its n-grams are what Jacobi iteration gives."""

from __future__ import annotations

import pytest
import torch

from kvcli.drafts.sources.jacobi_window import JacobiWindow


def filled(width: int, ngram: int, text: list[int], ends: tuple[int, ...] = ()) -> JacobiWindow:
    window = JacobiWindow(width, ngram, ends)
    window.start(text)
    return window


def test_positions_and_rows():
    window = filled(3, 4, list(range(50)))
    scouts = window.lookahead_rows()
    assert window.rows == len(scouts.ids) == 3 * 3 - 1
    assert scouts.offset == [1, 2, 1, 2, 3, 2, 3, 4]  # level by level, the corner left out
    assert window.reach == 4
    assert [scouts.offset[i] for i in scouts.wanted] == [2, 3, 4]  # the last level


def test_each_lookahead_row_sees_one_token_for_each_place_before_it():
    """Seen offsets with the pending token's: 0, 1, ... up to its own, once each."""
    scouts = filled(4, 5, list(range(50))).lookahead_rows()
    assert len(scouts.offset) > 4
    for i, offset in enumerate(scouts.offset):
        seen = [scouts.offset[j] for j in torch.nonzero(scouts.sees[i]).flatten().tolist()]
        assert sorted(seen) == list(range(1, offset + 1))


def test_nothing_is_harvested_from_fillers():
    window = filled(2, 5, list(range(50)))
    harvests = [list(window.harvest([7, 8], [100 + i, 200 + i])) for i in range(6)]
    assert [len(h) for h in harvests] == [0, 0, 0, 2, 2, 2]


def test_a_run_is_the_column_and_its_prediction():
    window, before = filled(2, 4, list(range(50))), [7, 8]
    for i in range(2):
        assert not list(window.harvest(before, [100 + i, 200 + i]))
    top = window._tokens[0][1]
    assert list(window.harvest(before, [102, 202])) == [([7, 8], [100, 101, 102]), ([7, 8, top], [200, 201, 202])]
    assert window._tokens[0] == [100, 200]


def test_the_same_text_is_filled_alike_and_no_text_sends_nobody():
    text = list(range(9))
    assert filled(3, 4, text).lookahead_rows().ids == filled(3, 4, text).lookahead_rows().ids
    assert JacobiWindow(3, 4).lookahead_rows() is None
    assert filled(3, 4, [5], ends=(5,)).lookahead_rows() is None


def test_end_tokens_do_not_enter():
    window = filled(2, 4, [5, 1, 5, 2, 5], ends=(5,))
    list(window.harvest([1], [5, 5]))
    assert 5 not in window.lookahead_rows().ids


@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_counts_is_drafted_ahead(width: int):
    """Where the next token is the last plus one, the window converges to the text within its levels."""
    window, text = filled(width, 5, [0, 900, 901]), [0, 900, 901]
    runs: list[list[int]] = []
    for _ in range(12):
        scouts = window.lookahead_rows()
        last = [scouts.ids[i] + 1 for i in scouts.wanted]
        runs = list(window.harvest(text[-4:], last))
        text.append(text[-1] + 1)
    before, run = runs[0]  # of the first column, which continues the text as it was before this pass
    assert before == text[-5:-1]
    assert len(run) == 4
    assert run == [run[0] + i for i in range(4)]
