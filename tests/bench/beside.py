"""Reading and plain decoding beside llama.cpp and transformers' `generate`: texts are read once and written by turns.

    python tests/bench/beside.py [--prompts 512,4096,16384] [--threads 1] [--kinds none] [--hf] [--turns 12] [--new 6]

The random Llama of 152M parameters: bf16 against BF16; with --kinds also int8 against Q8_0 and int4 against Q4_0, each
side in its own rounding. Short prompts are read several times. A turn is a few tokens of each side on its own text, who
begins alternates; a ratio is of the medians of one turn. Then passes of 1, 8 and 16 rows of ours by turns, of which
nothing is kept. So 32k takes minutes where `kvcli bench`, which reads again in each repetition, takes an hour.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.llama_cpp import BATCH
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import open_lm
from kvcli.engine.resources import use_threads
from kvcli.models.source import find
from tests.bench.decode import Clock
from tests.bench.harness import (
    Ints,
    Rows,
    Words,
    in_turns,
    measurement,
    picked,
    quotients,
    ran,
    spread,
)
from tests.bench.kv_speed import pass_seconds
from tests.bench.quantized import KINDS, llama_of, quantized
from tests.bench.random_model import noise, opened, write
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
        self.session = opened(self.lm)
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
    ids = noise(n)
    readings = {name: partial(side.read, ids, (turns + 1) * (new + 1)) for name, side in sides.items()}
    read = in_turns(readings, max(1, min(5, READ // n)), 0)
    wrote = in_turns({name: lambda side=side: median(side.write(new)) for name, side in sides.items()}, turns)
    return {name: {"read": read[name], "write": wrote[name]} for name in sides}


def rows_of(session: Any, reps: int) -> dict[str, list[float]]:
    """Passes of several rows in passes of one."""
    took = [[pass_seconds(session, rows) for rows in ROWS] for _ in range(reps + 2)][2:]
    return {f"{m} rows": spread([t[i] / t[0] for t in took]) for i, m in enumerate(ROWS) if i}


def ratios(mine: dict[str, list[float]], other: dict[str, list[float]], n: int) -> dict[str, Any]:
    """How many times as fast, and tokens a second."""
    row: dict[str, Any] = {}
    for name, what, unit, tokens in (("reading", "read", "read/s", n), ("decoding", "write", "tok/s", 1)):
        row[name] = quotients(other[what], mine[what])
        row[unit], row[f"its {unit}"] = (round(tokens / median(x[what]), 1) for x in (mine, other))
    return row


@measurement(
    "Reading and plain decoding of the random 152M Llama, {threads} threads, times as fast",
    columns=["prompt", "ours", "beside", "reading", "decoding", "8 rows", "16 rows", "tok/s", "its tok/s"],
    note="In brackets: least and most of all turns. Passes of 8 and 16 rows: in passes of one.",
)
def beside(
    prompts: Ints = (512, 4096, 16384),
    threads: int = 1,
    kinds: Annotated[Words, f"of {', '.join(KINDS)}"] = ("none",),
    hf: Annotated[bool, "transformers as well, in bf16"] = False,
    turns: int = 12,
    new: Annotated[int, "tokens of a turn"] = 6,
) -> Rows:
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), dict[str, Side]()
        write(folder)
        whole = export(find(name), "bfloat16", folder)
        for kind in picked(kinds, KINDS):
            sides[kind] = Ours(ran(open_lm(find(name), quant=kind, device="cpu", threads=threads)))
            sides[KINDS[kind]] = Llama(quantized(whole, KINDS[kind]), threads, folder)
        if hf:
            sides["hf"] = Transformers(name)
        use_threads(threads)
        limit = sides[kinds[0]].lm.limit  # type: ignore[attr-defined]
        if max(prompts) + (turns + 1) * (new + 1) + max(ROWS) > limit:
            sys.exit(f"what is written behind {max(prompts):,} tokens ends beyond the model's {limit:,} tokens")
        measure(sides, 64, 1, 3)
        for n in prompts:
            took = measure(sides, n, turns, new)
            for mine, other in [*((kind, KINDS[kind]) for kind in kinds), *[("none", "hf")] * hf]:
                row = {"prompt": n, "ours": NAMES[mine], "beside": other, **ratios(took[mine], took[other], n)}
                yield row | (rows_of(sides[mine].session, 15) if other != "hf" else {})  # type: ignore[attr-defined]


if __name__ == "__main__":
    beside.main()
