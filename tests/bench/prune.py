"""Reading a long prompt with tokens left behind, against reading all of it in the same engine.

    python tests/bench/prune.py [--model NAME] [--tokens 4096] [--profiles lazy,lazy-fast] [--reps 3] [--out FILE]

Sides by turns in one process. `kept` is the mean share of tokens that a layer was given, so 1 / kept is the speed-up to
expect where a layer costs the same for each of them. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-152M")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--profiles", default="lazy,lazy-fast,lazy-paper")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from kvcli.bench.texts import text_of
    from kvcli.chat.local import load
    from tests.bench.decode import machine
    from tests.bench.random_model import write

    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        if name == "random-152M":
            name = str(Path(folder, name))
            write(Path(name))
        model = load(name, "exact", {"load.threads": args.threads})
    ids = (model.tokenizer.encode(text_of("prose") + text_of("manual")) * 9)[: args.tokens]
    sides = ["exact", *args.profiles.split(",")]
    read: dict[str, list[float]] = {side: [] for side in sides}
    first: dict[str, list[float]] = {side: [] for side in sides}
    kept: dict[str, float] = {}
    for rep in range(args.reps + 1):
        for side in sides[:: -1 if rep % 2 else 1]:
            with model.open(side, {"spec.method": "off"}) as text:
                began = time.perf_counter()
                turn = text.generate(ids, max_new_tokens=2, ignore_eos=True)
                took = time.perf_counter() - began
                slots = [text.session.kv.n_slots(i) for i in range(model.lm.n_layers)]
            kept[side] = sum(slots) / len(slots) / turn.stats.context
            if rep:
                read[side].append(turn.stats.read)
                first[side].append(turn.stats.first_token)
            assert took >= turn.stats.read
    rows = []
    for side in sides:
        gains = [a / b for a, b in zip(read["exact"], read[side], strict=True)]
        row = {
            "side": side,
            "kept": kept[side],
            "read_s": statistics.median(read[side]),
            "gain": statistics.median(gains),
        }
        row |= {"gain_low": min(gains), "gain_high": max(gains), "first_token_s": statistics.median(first[side])}
        rows.append(row)
        print(
            f"{side:<12} kept {row['kept']:.2f}  read {row['read_s']:.2f} s  {row['gain']:.2f}x "
            f"({row['gain_low']:.2f}-{row['gain_high']:.2f}), expected {1 / row['kept']:.2f}x"
        )
    about = machine()
    result = {
        "title": "Reading with tokens left behind",
        "command": f"python tests/bench/prune.py --model {args.model} --tokens {args.tokens} --reps {args.reps}",
        "machine": f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, commit {about['commit']}",
        "model": args.model,
        "tokens": args.tokens,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
