"""Speed and memory of plain decoding against transformers' `generate`: same weights, sides interleaved in one run.

    python tests/bench/decode.py [--prompts 512,4096,16384] [--new 24] [--reps 3] [--out FILE]

A random bf16 Llama of 152M parameters. Per prompt length and repetition each side reads the prompt and decodes, then
the other. Also one pass of 8 rows against one of 1 row on the same past, alternating, and the peak memory of each side
in a process of its own.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import Ints, Rows, alone, in_turns, measurement, quotients, spread
from tests.bench.random_model import build, noise, opened, ours_of


class Clock:
    """A transformers streamer that only looks at the clock: once for the prompt, once for each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _: object) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        return


def theirs(model: Any, ids: list[int], new: int) -> tuple[float, list[float], list[int]]:
    """transformers' generate -> seconds to the first token, seconds of each later token, the tokens."""
    clock = Clock()
    given = torch.tensor([ids], device=model.device)
    out = model.generate(given, max_new_tokens=new, do_sample=False, pad_token_id=0, streamer=clock)
    steps = [b - a for a, b in zip(clock.at, clock.at[1:], strict=False)]
    return steps[0], steps[1:], out[0, len(ids) :].tolist()


def ours(lm: Any, ids: list[int], new: int) -> tuple[float, list[float], Any]:
    """The same by our engine, no drafting -> seconds to the first token, of each later token, the session."""
    from kvcli.engine.engine import iterate_events, run_to_end

    session = opened(lm)
    began = time.perf_counter()
    run_to_end(session.read(ids))
    steps = [step.seconds for step in iterate_events(session.stream(1))]
    first = time.perf_counter() - began
    steps = [step.seconds for step in iterate_events(session.stream(new - 1))]
    return first, steps, session


def rows_against_row(session: Any, rows: int, reps: int) -> tuple[list[float], list[float]]:
    """Seconds of passes of 1 row and of `rows` rows on the same past, alternating; nothing is kept."""
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import Draft, ForwardRequest, Rows

    def seconds(drafted: int) -> float:
        built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain(list(range(9, 9 + drafted))))
        began = time.perf_counter()
        run([ForwardRequest(session.lm, built, session.cache, want=range(built.n_rows))])
        return time.perf_counter() - began

    pairs = [(seconds(0), seconds(rows - 1)) for _ in range(reps + 2)][2:]
    return [a for a, _ in pairs], [b for _, b in pairs]


def peak(side: str, folder: str, n: int, new: int) -> float:
    """Peak resident memory of a process that loads the model, reads n tokens and decodes, MiB."""
    from kvcli.engine.resources import peak_bytes

    ids = noise(n)
    if side == "kvcli":
        from kvcli.engine.loading.open_lm import open_lm
        from kvcli.models.source import find

        ours(open_lm(find(folder), device="cpu"), ids, new)
    else:
        from transformers import AutoModelForCausalLM

        theirs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), ids, new)
    return round(peak_bytes(torch.device("cpu")) / 2**20, 1)


def measure(model: Any, lm: Any, n: int, new: int, reps: int) -> dict[str, Any]:
    ids = noise(n)
    found = in_turns({"transformers": lambda: theirs(model, ids, new), "kvcli": lambda: ours(lm, ids, new)}, reps, 0)
    sides = {
        side: {"first": [first for first, _, _ in each], "step": [statistics.median(steps) for _, steps, _ in each]}
        for side, each in found.items()
    }
    their_ids, session = found["transformers"][-1][2], found["kvcli"][-1][2]
    one, eight = rows_against_row(session, 8, 15)
    same = next((i for i, (a, b) in enumerate(zip(their_ids, session.ids[n:], strict=True)) if a != b), new)
    return {
        "prompt": n,
        "decode_speedup": quotients(sides["transformers"]["step"], sides["kvcli"]["step"]),
        "read_speedup": quotients(sides["transformers"]["first"], sides["kvcli"]["first"]),
        "rows8_over_row1": round(statistics.median(eight) / statistics.median(one), 3),
        "same_tokens": f"{same} of {new}",
        "seconds": {side: {k: spread(v) for k, v in found.items()} for side, found in sides.items()},
        "pass_seconds": {"1": spread(one), "8": spread(eight)},
    }


@measurement(
    "Plain decoding, times transformers' speed",
    schema="kvcli.bench.decode/1",
    columns=["prompt", "decode_speedup", "read_speedup", "rows8_over_row1", "same_tokens", "peak_mib"],
)
def decode(prompts: Ints = (512, 4096, 16384), new: int = 24, reps: int = 3, memory: bool = True) -> Rows:
    model, lm = build(), ours_of(build())
    measure(model, lm, 64, 4, 1)  # warm-up
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for n in prompts:
            peaks = {side: alone(peak, side, folder, n, new) for side in ("transformers", "kvcli") if memory}
            yield measure(model, lm, n, new, reps) | ({"peak_mib": peaks} if memory else {})


if __name__ == "__main__":
    decode.main()
