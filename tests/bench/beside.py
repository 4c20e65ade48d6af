"""Reading and plain decoding beside llama.cpp and transformers' `generate`: texts are read once and written by turns.

    python tests/bench/beside.py [--prompts 512,4096,16384] [--threads 1] [--kinds none] [--hf] [--turns 12] [--new 6]

The random Llama of 152M parameters: bf16 against BF16; with --kinds also int8 against Q8_0 and int4 against Q4_0, each
side in its own rounding. Short prompts are read several times. A turn is a few tokens of each side on its own text, who
begins alternates; a ratio is of the medians of one turn. Then passes of 1, 8 and 16 rows of ours by turns, of which
nothing is kept. So 32k takes minutes where `kvcli bench`, which reads again in each repetition, takes an hour.
Prints a line of JSON for each comparison, then all of it on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.bench.llama_cpp import BATCH
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.threads import use_threads
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.off import Off
from kvcli.models.source import find
from tests.bench.decode import Clock
from tests.bench.harness import machine, spread
from tests.bench.kv_speed import pass_seconds
from tests.bench.quantized import KINDS, llama_of, quantized
from tests.bench.random_model import write
from tests.recipes.gguf_export import export

NAMES = {"none": "bf16", "int8": "int8", "int4": "int4"}
ROWS = (1, 8, 16)
READ = 12288  # tokens in all readings of one prompt, or one reading


class Side(Protocol):
    """One program with one text."""

    def read(self, ids: list[int], room: int) -> float:
        """Begin anew with these, with room for so many tokens more -> seconds to the first token."""

    def write(self, n: int) -> list[float]:
        """Go on by n tokens -> seconds of each; of which the first may pay for what a turn costs to begin."""


class Ours:
    def __init__(self, lm: LM) -> None:
        self.lm = lm

    def read(self, ids: list[int], room: int) -> float:
        began = time.perf_counter()
        self.session = GenerationSession(self.lm, Dense(self.lm.shapes, self.lm.dtype), Off(), Sampler())
        run_to_end(self.session.read(ids))
        list(iterate_events(self.session.stream(1)))
        return time.perf_counter() - began

    def write(self, n: int) -> list[float]:
        return [step.seconds for step in iterate_events(self.session.stream(n))]


class Llama:
    def __init__(self, file: Path, threads: int, cache: Path) -> None:
        self.side = llama_of(file, threads, cache)

    def read(self, ids: list[int], room: int) -> float:
        side = self.side
        side._make_room(len(ids) + room)
        side._lib.llama_memory_clear(side._lib.llama_get_memory(side._context), True)
        began = time.perf_counter()
        for first in range(0, len(ids), BATCH):
            side._feed(ids[first : first + BATCH])
        self.last = side._next()
        return time.perf_counter() - began

    def write(self, n: int) -> list[float]:
        found = []
        for _ in range(n):
            began = time.perf_counter()
            self.side._feed([self.last])
            self.last = self.side._next()
            found.append(time.perf_counter() - began)
        return found


class Transformers:
    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def read(self, ids: list[int], room: int) -> float:
        from transformers import DynamicCache

        self.ids, self.cache = ids, DynamicCache(config=self.model.config)
        began = time.perf_counter()
        self._generate(1)
        return time.perf_counter() - began

    def write(self, n: int) -> list[float]:
        at = self._generate(n + 1).at  # the prompt, then each token
        return [b - a for a, b in pairwise(at[1:])]

    def _generate(self, n: int) -> Clock:
        clock = Clock()
        out = self.model.generate(
            torch.tensor([self.ids]),
            past_key_values=self.cache,
            max_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        self.ids = out[0].tolist()
        return clock


def measure(sides: dict[str, Side], n: int, turns: int, new: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by side of each reading, and the median of a token's by turn."""
    ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    found: dict[str, dict[str, list[float]]] = {name: {"read": [], "write": []} for name in sides}
    for rep in range(max(1, min(5, READ // n))):
        for name in list(sides)[:: -1 if rep % 2 else 1]:
            found[name]["read"].append(sides[name].read(ids, (turns + 1) * (new + 1)))
    for turn in range(turns + 1):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            steps = median(sides[name].write(new))
            if turn:  # the first is a warm-up
                found[name]["write"].append(steps)
    return found


def rows_of(session: Any, reps: int) -> dict[str, list[float]]:
    """Passes of several rows in passes of one."""
    took = [[pass_seconds(session, rows) for rows in ROWS] for _ in range(reps + 2)][2:]
    return {f"{m} rows": spread([t[i] / t[0] for t in took]) for i, m in enumerate(ROWS) if i}


def ratios(mine: dict[str, list[float]], other: dict[str, list[float]], n: int) -> dict[str, Any]:
    """How many times as fast, and tokens a second."""
    row: dict[str, Any] = {}
    for name, what, unit, tokens in (("reading", "read", "read/s", n), ("decoding", "write", "tok/s", 1)):
        row[name] = spread([b / a for a, b in zip(mine[what], other[what], strict=True)])
        row[unit], row[f"its {unit}"] = (round(tokens / median(x[what]), 1) for x in (mine, other))
    return row


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--prompts", default="512,4096,16384")
    ask.add_argument("--threads", type=int, default=1)
    ask.add_argument("--kinds", default="none", help=f"of {', '.join(KINDS)}")
    ask.add_argument("--hf", action="store_true", help="transformers as well, in bf16")
    ask.add_argument("--turns", type=int, default=12)
    ask.add_argument("--new", type=int, default=6, help="tokens of a turn")
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    kinds, rows = args.kinds.split(","), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), dict[str, Side]()
        write(folder)
        whole = export(find(name), "bfloat16", folder)
        for kind in kinds:
            sides[kind] = Ours(LM.load(find(name), quant=kind, device="cpu", threads=args.threads))
            sides[KINDS[kind]] = Llama(quantized(whole, KINDS[kind]), args.threads, folder)
        if args.hf:
            sides["hf"] = Transformers(name)
        use_threads(args.threads)
        prompts, limit = [int(n) for n in args.prompts.split(",")], sides[kinds[0]].lm.limit  # type: ignore[attr-defined]
        if max(prompts) + (args.turns + 1) * (args.new + 1) + max(ROWS) > limit:
            ask.error(f"--prompts {args.prompts}: what is written behind them ends beyond the model's {limit:,} tokens")
        about = machine()
        measure(sides, 64, 1, 3)
        for n in prompts:
            took = measure(sides, n, args.turns, args.new)
            for mine, other in [*((kind, KINDS[kind]) for kind in kinds), *[("none", "hf")] * args.hf]:
                rows.append({"prompt": n, "ours": NAMES[mine], "beside": other, **ratios(took[mine], took[other], n)})
                rows[-1] |= rows_of(sides[mine].session, 15) if other != "hf" else {}  # type: ignore[attr-defined]
                print(json.dumps(rows[-1]), flush=True)
    found = {
        "title": f"Reading and plain decoding of the random 152M Llama, {args.threads} threads, times as fast",
        "machine": ", ".join(f"{key} {value}" for key, value in about.items()),
        "command": "python tests/bench/beside.py " + " ".join(sys.argv[1:]).split(" --out")[0],
        "columns": ["prompt", "ours", "beside", "reading", "decoding", "8 rows", "16 rows", "tok/s", "its tok/s"],
        "rows": rows,
        "note": "In brackets: least and most of all turns. Passes of 8 and 16 rows: in passes of one.",
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
