"""Rules by which a second model stops drafting, by pretended clocks: speed over plain decoding.

    python tests/bench/stops.py [--passes 1500] [--out FILE]

Texts are easy, hard, or change between the two every 150 tokens. Right draft tokens lead by 1 to 6 nats, wrong ones by
0.1 to 3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import Rows, measurement
from tests.drafts.test_model_draft import COSTS, Run

TEXTS: dict[str, Callable[[int], float]] = {  # position -> share of draft tokens that are right
    "hard": lambda at: 0.4,
    "easy": lambda at: 0.9,
    "changing": lambda at: 0.9 if at // 150 % 2 else 0.4,
}
RULES: dict[str, dict[str, Any]] = {
    "marginal": {},
    **{f"reject {risk}": {"stop": "reject", "risk": risk} for risk in (0.5, 0.7, 0.9)},
    **{f"disco {risk}": {"stop": "disco", "risk": risk} for risk in (0.3, 0.5, 0.7)},
}


@measurement("Stop rules by pretended clocks, times the speed of plain decoding", is_counts=True)
def stops(passes: int = 1500) -> Rows:
    for rule, settings in RULES.items():
        row: dict[str, Any] = {"rule": rule}
        for (text, share), cost, each in product(TEXTS.items(), ("cheap", "cliff"), (0.05, 0.2)):
            with pytest.MonkeyPatch.context() as patch:
                run = Run(patch, each, share, COSTS[cost], {"branches": 1, **settings}).run(passes)
            row[f"{text}, {cost} rows, draft {each}"] = round(run.gain, 2)
        yield row


if __name__ == "__main__":
    stops.main()
