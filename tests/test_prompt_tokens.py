"""Which queries are held for a compression point: exactly the latest, and those at probed positions."""

from __future__ import annotations

import pytest
import torch

from kvcli.engine.forward_request import Rows
from kvcli.engine.policy.policy_inputs import QueryRecorder


def hear(query_recorder: QueryRecorder, start: int, n: int) -> None:
    """A pass of n rows from `start` on, one layer, whose query is its position."""
    rows, asked = Rows.chain([1] * n, start), query_recorder.rows_to_record_in_chunk(start, n)
    queries = torch.tensor([rows.pos[row] for row in asked], dtype=torch.float64).view(1, -1, 1)
    query_recorder.take(rows, asked, [queries], range(n))


@pytest.mark.parametrize("recent", [0, 1, 3, 5, 40])
@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("probed", [(), (0, 2, 11), (16,)])
def test_the_latest_and_the_probed_are_held_and_nothing_else(recent: int, size: int, probed: tuple[int, ...]) -> None:
    heard, n = QueryRecorder(None, torch.float64, recent, lambda n: probed), 17  # type: ignore[arg-type]
    heard.begin(n)
    for start in range(0, n, size):
        hear(heard, start, min(size, n - start))
    want = sorted({*probed, *range(max(0, n - recent), n)})
    assert heard.pos == want
    q, pos = heard.of(0, torch.zeros(1, 1, 1))
    assert (q.flatten().tolist(), pos.tolist()) == (want, want)
    heard.forget()
    assert heard.pos == want[len(want) - min(len(want), recent) :]
