"""What recall over the rungs of a ladder takes in memory, and what it costs in right answers, on the demo model.

    python tests/bench/recall_tiers.py [--facts 24] [--floor 256] [--only dense,k4v4,...] [--out FILE]

The demo model answers questions about facts of its report of 4,400 tokens, once for each way of storing the report and
each way of reading it. "right": the answer holds the fact's value; "same": it is the answer of the side "dense" without
recall. Bytes are those allocated for each token, by tier: "near" is what a pass keeps of a far tier for the next one.
Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.kv.slots import nbytes
from kvcli.settings.profile import Profile, load_profile
from tests.bench.harness import machine

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
            yield store, method, plain.replace(exactness="approx", recall=recall, **STORES[store])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, default=24, help="questions asked, one after another")
    parser.add_argument("--floor", type=int, default=256, help="tokens that a head reads at least")
    parser.add_argument("--only", default=",".join(STORES), help="ways of storing; dense comes first in any case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import kvcli
    from tests.demo_model.example import example_report

    only = ["dense", *(name for name in args.only.split(",") if name != "dense")]
    if unknown := set(only) - set(STORES):
        parser.error(f"no such store: {', '.join(sorted(unknown))}; there are {', '.join(STORES)}")
    about, report = machine(), example_report()
    facts = report.facts[:: max(1, len(report.facts) // args.facts)][: args.facts]
    model = kvcli.load("demo", profile="exact")
    first: list[str] = []
    rows: list[dict[str, Any]] = []
    print(f"{'store':10} {'recall':10} {'right':>7} {'same':>7} {'bytes a token':>14}   by tier")
    for store, method, profile in profiles(only, args.floor):
        under = model.with_profile(profile)
        said = [
            under.generate(f"{report.text}\n\nWhat is the {fact.attribute} of {fact.entity}?", ANSWER).text
            for fact in facts
        ]
        first = first or said
        held = {tier: n / under.text.session.committed for tier, n in nbytes(under.text.session.cache).items() if n}
        row = {
            "store": store,
            "recall": method,
            "right": sum(str(fact.value) in text for fact, text in zip(facts, said, strict=True)) / len(facts),
            "same": sum(a == b for a, b in zip(first, said, strict=True)) / len(facts),
            "bytes": round(sum(held.values()), 1),
            **{tier: round(n, 1) for tier, n in held.items()},
        }
        rows.append(row)
        tiers = "  ".join(f"{tier} {n:,.0f}" for tier, n in held.items())
        print(
            f"{store:10} {method:10} {row['right']:7.1%} {row['same']:7.1%} {row['bytes']:14,.0f}   {tiers}", flush=True
        )
    ran = {"facts": len(facts), "floor": args.floor}
    result = {"schema": "kvcli.bench.recall_tiers/1", "environment": about, **ran, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
