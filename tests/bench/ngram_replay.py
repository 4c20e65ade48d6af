"""What n-gram drafting would gain on given texts at given costs of rows, had a model written them; last line JSON.

python tests/bench/ngram_replay.py [--out RESULT] [FILE ...]     by default six modules of the standard library

The first half of each file is the prompt. Pass times are pretended, so the figures are the same on any machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.drafts.ngram import Ngram
from tests.drafts.conftest import PLAIN, Engine

COSTS: dict[str, Callable[[int], float]] = {  # rows -> plain passes
    "nearly free up to 8": lambda rows: 1 + 0.02 * (rows - 1) if rows <= 8 else 1.3 + 0.06 * (rows - 8),
    "a third each": lambda rows: 1 + 0.35 * (rows - 1),
}
CONFIGS = {
    "default": Ngram(),
    "min_match = 2": Ngram(min_match=2),
    "branches = 1": Ngram(branches=1),
    "max = 7": Ngram(max=7),
    "adaptive = false": Ngram(adaptive=False),
}
FILES = ("argparse.py", "ast.py", "ctypes/util.py", "dataclasses.py", "tarfile.py", "typing.py")
LONGEST = 5000  # tokens of a file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    library = Path(re.__file__).parents[1]
    texts = [tokens(path) for path in args.files or [library / f for f in FILES]]
    table = []
    print(f"{'rows cost':22} {'settings':18} gain   tokens/pass   drafted share   guesses/pass")
    for cost_name, cost in COSTS.items():
        for name, config in CONFIGS.items():
            runs = [Engine(config.drafter(), text, len(text) // 2, cost).finish() for text in texts]
            steps = [step for run in runs for step in run.steps]
            new = sum(len(s.new) for s in steps)
            row = {
                "a further row": cost_name,
                "settings": name,
                "gain": new * PLAIN / sum(run.true_seconds for run in runs),
                "tokens_per_pass": new / len(steps),
                "drafted_share": sum(s.n_drafted > 0 for s in steps) / len(steps),
                "guesses_per_pass": sum(s.n_drafted for s in steps) / len(steps),
            }
            table.append(row)
            print(
                f"{cost_name:22} {name:18} {row['gain']:.2f} {row['tokens_per_pass']:10.2f}"
                f" {row['drafted_share']:15.2f} {row['guesses_per_pass']:14.1f}"
            )
    environment = {"python": platform.python_version()}
    result = {"schema": "kvcli.bench.ngram_replay/1", "environment": environment, "rows": table}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def tokens(path: Path) -> list[int]:
    """Words of the file, numbered as they appear: letters, digits, blanks and single marks."""
    number: dict[str, int] = {}
    words = re.findall(r"[A-Za-z]+|\d+|\n\s*|[^\S\n]+|[^\w\s]", path.read_text(encoding="utf-8"))
    return [number.setdefault(word, len(number)) for word in words[:LONGEST]]


if __name__ == "__main__":
    main()
