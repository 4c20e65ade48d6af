"""The heads called retrieval heads are those that answers hang on: evicted for real, against as many others."""

from __future__ import annotations

from tests.bench.retrieval_heads import measure


def test_named_heads_lose_at_least_five_times_what_others_lose():
    found = measure(texts=2, n_draws=2)
    assert found["accuracy"]["none"] >= 0.75
    assert found["lost_named"] > 0.5
    assert found["lost_named"] >= 5 * found["lost_by_lot"]
    assert not {tuple(head) for head in found["heads"]} & {tuple(head) for lot in found["lots"] for head in lot}
    assert all(len(lot) == len(found["heads"]) for lot in found["lots"])
