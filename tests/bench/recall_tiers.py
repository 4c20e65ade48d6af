"""Memory of sparse attention over the levels of a tiered cache, and the right answers that it costs, on the demo model.

    python tests/bench/recall_tiers.py [--facts 24] [--floor 256] [--only dense,k4v4,...] [--out FILE]

The demo model answers questions about facts of its report of 4,400 tokens, once for each way of storing the report and
each way of reading it. "right": the answer holds the fact's value; "same": it is the answer of the side "dense" without
recall. Bytes are those allocated for each token, by tier: "near" is what a pass keeps of a far tier for the next one.

"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kv.slots import nbytes
from kvcli.settings.profile import Profile, load_profile
from tests.bench.harness import Rows, Words, measurement, picked

STORES: dict[str, dict[str, dict[str, object]]] = {
    "dense": {},
    "k8v8": {"kv": {"k_bits": 8, "v_bits": 8}},
    "k4v4": {"kv": {"k_bits": 4, "v_bits": 4}},
    "disk": {"memory": {"disk": "1GiB", "device": "6MiB"}, "prefill": {"chunk": 256}},
    "k4v4 disk": {
        "kv": {"k_bits": 4, "v_bits": 4},
        "memory": {"disk": "1GiB", "device": "6MiB"},
        "prefill": {"chunk": 256},
    },
}
METHODS = ("none", "minmax", "sketch", "certified", "cluster", "lowrank")
ANSWER = 24  # tokens


def profiles(stores: list[str], floor: int) -> Iterator[tuple[str, str, Profile]]:
    plain = load_profile("exact")
    for store in stores:
        for method in METHODS:
            recall: dict[str, object] = {"method": method}
            if method != "none":
                recall["floor"] = floor
            yield store, method, plain.replace(exactness="approx", sparse=recall, **STORES[store])


@measurement(
    "Facts of a report of 4,400 tokens found again by the demo model, and bytes of a token",
    schema="kvcli.bench.recall_tiers/1",
)
def recall_tiers(
    facts: Annotated[int, "questions asked, one after another"] = 24,
    floor: Annotated[int, "tokens that a head reads at least"] = 256,
    only: Annotated[Words, "ways of storing; dense comes first in any case"] = tuple(STORES),
) -> Rows:
    import kvcli
    from tests.demo_model.example import example_report

    report = example_report()
    asked = report.facts[:: max(1, len(report.facts) // facts)][:facts]
    model = kvcli.load("demo", profile="exact")
    first: list[str] = []
    stores = ["dense", *(name for name in picked(only, STORES) if name != "dense")]
    for store, method, profile in profiles(stores, floor):
        under = model.with_profile(profile)
        said = [
            under.generate(f"{report.text}\n\nWhat is the {fact.attribute} of {fact.entity}?", ANSWER).text
            for fact in asked
        ]
        first = first or said
        held = {
            tier: n / under.text_session.session.committed
            for tier, n in nbytes(under.text_session.session.cache).items()
            if n
        }
        yield {
            "store": store,
            "recall": method,
            "right": sum(str(fact.value) in text for fact, text in zip(asked, said, strict=True)) / len(asked),
            "same": sum(a == b for a, b in zip(first, said, strict=True)) / len(asked),
            "bytes": round(sum(held.values()), 1),
            **{tier: round(n, 1) for tier, n in held.items()},
        }
    return {"facts": len(asked), "floor": floor}


if __name__ == "__main__":
    recall_tiers.main()
