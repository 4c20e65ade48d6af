"""Rules by which a second model stops guessing, by pretended clocks: speed over plain decoding; last line JSON.

    python tests/bench/stops.py [--passes 1500] [--out FILE]

Texts are easy, hard, or change between the two every 150 tokens. Right guesses lead by 1 to 6 nats, wrong ones by 0.1
to 3.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import machine
from tests.drafts.test_model_draft import COSTS, Run

TEXTS: dict[str, Callable[[int], float]] = {  # position -> share of guesses that are right
    "hard": lambda at: 0.4,
    "easy": lambda at: 0.9,
    "changing": lambda at: 0.9 if at // 150 % 2 else 0.4,
}
RULES: dict[str, dict[str, Any]] = {
    "marginal": {},
    **{f"reject {risk}": {"stop": "reject", "risk": risk} for risk in (0.5, 0.7, 0.9)},
    **{f"disco {risk}": {"stop": "disco", "risk": risk} for risk in (0.3, 0.5, 0.7)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for rule, settings in RULES.items():
        row: dict[str, Any] = {"rule": rule}
        for text, share in TEXTS.items():
            for cost in ("cheap", "cliff"):
                for each in (0.05, 0.2):
                    with pytest.MonkeyPatch.context() as patch:
                        run = Run(patch, each, share, COSTS[cost], {"branches": 1, **settings}).run(args.passes)
                    row[f"{text}, {cost} rows, guess {each}"] = round(run.gain, 2)
        rows.append(row)
        print("  ".join(map(str, row.values())), flush=True)
    title = "Stop rules by pretended clocks, times the speed of plain decoding"
    result = {"title": title, "command": "python tests/bench/stops.py", "environment": machine(), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
