"""Speed and memory of plain decoding against transformers' `generate`: same weights, sides interleaved in one run.

    python tests/bench/decode.py [--prompts 512,4096,16384] [--new 24] [--reps 3] [--out FILE]

A random bf16 Llama of 152M parameters. Per prompt length and repetition each side reads the prompt and decodes, then
the other. Also one pass of 8 rows against one of 1 row on the same past, alternating, and the peak memory of each side
in a process of its own. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def build() -> Any:
    """The model as transformers has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=16384,
        intermediate_size=2816,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def ours_of(model: Any) -> Any:
    """The same model as kvcli loads it."""
    from kvcli.engine.hf.lm import LM

    lm = LM.of(model)
    lm.install_kernels()
    return lm


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
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.tiers.dense import Dense
    from kvcli.methods.drafts.off import Off

    session = GenerationSession(lm, Dense(lm.shapes, lm.dtype), Off(), Sampler())
    began = time.perf_counter()
    run_to_end(session.read(ids))
    steps = [step.seconds for step in iterate_events(session.stream(1))]
    first = time.perf_counter() - began
    steps = [step.seconds for step in iterate_events(session.stream(new - 1))]
    return first, steps, session


def rows_against_row(session: Any, rows: int, reps: int) -> tuple[list[float], list[float]]:
    """Seconds of passes of 1 row and of `rows` rows on the same past, alternating; nothing is kept."""
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import ForwardRequest
    from kvcli.engine.rows import Draft, Rows

    def seconds(guesses: int) -> float:
        built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain(list(range(9, 9 + guesses))))
        began = time.perf_counter()
        run([ForwardRequest(session.lm, built, session.cache, want=range(built.n_rows))])
        return time.perf_counter() - began

    pairs = [(seconds(0), seconds(rows - 1)) for _ in range(reps + 2)][2:]
    return [a for a, _ in pairs], [b for _, b in pairs]


def peak(side: str, folder: str, n: int, new: int, pipe: Any) -> None:
    """Peak resident memory of a process that loads the model, reads n tokens and decodes, MiB."""
    from kvcli.engine.process_memory import peak_bytes

    ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    if side == "kvcli":
        from kvcli.engine.hf.lm import LM
        from kvcli.models.source import find

        ours(LM.load(find(folder), device="cpu"), ids, new)
    else:
        from transformers import AutoModelForCausalLM

        theirs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), ids, new)
    pipe.send(peak_bytes(torch.device("cpu")) / 2**20)


def peaks(folder: str, n: int, new: int) -> dict[str, float]:
    found = {}
    spawn = multiprocessing.get_context("spawn")
    for side in ("transformers", "kvcli"):
        here, there = spawn.Pipe()
        process = spawn.Process(target=peak, args=(side, folder, n, new, there))
        process.start()
        found[side] = round(here.recv(), 1)
        process.join()
    return found


def spread(values: list[float]) -> list[float]:
    return [round(min(values), 5), round(statistics.median(values), 5), round(max(values), 5)]


def measure(model: Any, lm: Any, n: int, new: int, reps: int) -> dict[str, Any]:
    ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    sides: dict[str, dict[str, list[float]]] = {s: {"first": [], "step": []} for s in ("transformers", "kvcli")}
    for _ in range(reps):
        first, steps, their_ids = theirs(model, ids, new)
        sides["transformers"]["first"].append(first)
        sides["transformers"]["step"].append(statistics.median(steps))
        first, steps, session = ours(lm, ids, new)
        sides["kvcli"]["first"].append(first)
        sides["kvcli"]["step"].append(statistics.median(steps))
    one, eight = rows_against_row(session, 8, 15)
    pairs = zip(sides["transformers"]["step"], sides["kvcli"]["step"], strict=True)
    firsts = zip(sides["transformers"]["first"], sides["kvcli"]["first"], strict=True)
    same = next((i for i, (a, b) in enumerate(zip(their_ids, session.ids[n:], strict=True)) if a != b), new)
    return {
        "prompt": n,
        "decode_speedup": spread([a / b for a, b in pairs]),
        "read_speedup": spread([a / b for a, b in firsts]),
        "rows8_over_row1": round(statistics.median(eight) / statistics.median(one), 3),
        "same_tokens": f"{same} of {new}",
        "seconds": {side: {k: spread(v) for k, v in found.items()} for side, found in sides.items()},
        "pass_seconds": {"1": spread(one), "8": spread(eight)},
    }


def machine() -> dict[str, Any]:
    """Where it runs; refuses a checkout that would time torch in the place of its kernels."""
    import transformers

    from kvcli.bench.run import refuse_unbuilt

    refuse_unbuilt()

    about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in about if "model name" in line), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "cpu": cpu or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.strip(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="512,4096,16384")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = machine()
    model, lm = build(), ours_of(build())
    print(f"{lm.info.parameters / 1e6:.0f}M parameters, {before['threads']} threads, load {before['load_average']}")
    print("prompt   decode (min med max)   read (min med max)   8 rows / 1 row   same    peak MiB theirs / ours")
    measure(model, lm, 64, 4, 1)  # warm-up
    found = []
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    for n in map(int, args.prompts.split(",")):
        row = measure(model, lm, n, args.new, args.reps)
        if args.memory:
            row["peak_mib"] = peaks(folder.name, n, args.new)
        found.append(row)
        decode, read = ("  ".join(f"{x:.2f}" for x in row[k]) for k in ("decode_speedup", "read_speedup"))
        memory = " / ".join(f"{x:,.0f}" for x in row.get("peak_mib", {}).values())
        eight = f"{row['rows8_over_row1']:.2f}"
        print(f"{n:6,}   {decode}       {read}     {eight}             {row['same_tokens']}  {memory}", flush=True)
    result = {"schema": "kvcli.bench.decode/1", "environment": before, "rows": found}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
