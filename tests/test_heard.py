"""Which queries are held for a boundary: exactly the latest, and those at probed positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcli.heard import Heard


def chunk(start: int, hear: list[int] | None, n: int) -> Any:
    """A pass of n rows from `start` on, one layer, whose query is its position."""
    pos = torch.arange(start, start + n)
    heard = pos[hear or []].double().view(1, -1, 1)
    return SimpleNamespace(hear=hear, rows=SimpleNamespace(pos=pos), queries=[heard])


@pytest.mark.parametrize("recent", [0, 1, 3, 5, 40])
@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("probed", [(), (0, 2, 11), (16,)])
def test_the_latest_and_the_probed_are_held_and_nothing_else(recent: int, size: int, probed: tuple[int, ...]) -> None:
    heard, n = Heard(recent, lambda n: probed), 17
    heard.begin(n)
    for start in range(0, n, size):
        rows = min(size, n - start)
        heard.take(chunk(start, heard.of_chunk(start, rows), rows), range(rows))
    want = sorted({*probed, *range(max(0, n - recent), n)})
    assert heard.pos == want
    q, pos = heard.of(0, torch.zeros(1, 1, 1))
    assert (q.flatten().tolist(), pos.tolist()) == (want, want)
    heard.forget()
    assert heard.pos == want[len(want) - min(len(want), recent) :]
