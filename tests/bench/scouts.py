"""What scouts bring, by look-back, window, n-gram and view: tokens a pass on the demo model, in counts, not in times.

    python tests/bench/scouts.py [--new 96] [--out FILE]

Scouts alone, in every pass (adaptive off, no other source), greedy, on three of the demo model's texts: a summary, a
copy and the continuation of a report. Counts do not depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvcli.bench.profile_side import ProfileSide
from tests.bench.fafo import tasks_of
from tests.bench.harness import Rows, measurement

BASE: dict[str, Any] = {"method": "lookahead", "adaptive": False, "ngram": 5, "window": 4, "key_max": 4, "view": "all"}
STREAM = {"view": "stream", "sinks": 16}
RUNS: dict[str, dict[str, Any]] = {
    "5-grams, window 4, keys up to 4, everything seen": {},
    "keys of 1 (Lookahead)": {"key_max": 1},
    "keys up to 2": {"key_max": 2},
    "keys up to 3 (FAFO)": {"key_max": 3},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window 8": {"window": 8},
    "window 16": {"window": 16},
    "3-grams": {"ngram": 3},
    "4-grams": {"ngram": 4},
    "7-grams": {"ngram": 7},
    "view: 16 + 496 tokens": {**STREAM, "recent": 496},
    "view: 16 + 112 tokens": {**STREAM, "recent": 112},
    "view: 16 + 16 tokens": {**STREAM, "recent": 16},
    "view: 128 tokens, no sinks": {"view": "stream", "sinks": 0, "recent": 128},
    "view: 16 + 48 tokens and 32 pages of 16": {"view": "quest", "sinks": 16, "recent": 48, "page": 16, "pages": 32},
}


@measurement("Tokens a pass with scouts alone, fp32", is_counts=True)
def scouts(new: int = 96) -> Rows:
    chosen = tasks_of(("summary", "copy", "free"))
    for name, changes in RUNS.items():
        row: dict[str, Any] = {"setting": name}
        for task in chosen:
            assert task.same32 is not None
            profile = task.same32.profile.replace(spec=BASE | changes)
            side = ProfileSide(name, task.same32.with_profile(profile), torch.get_num_threads())
            stats = [side.run(prompt, new).stats for prompt in task.prompts[:3]]
            row[task.name] = round(sum(s.new for s in stats) / sum(s.passes for s in stats), 3)
        row["rows"] = round(1 + sum(s.draft_tokens + s.lookahead_rows for s in stats) / sum(s.passes for s in stats), 1)
        yield row


if __name__ == "__main__":
    scouts.main()
