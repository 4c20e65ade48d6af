"""Reading a prompt layer by layer, chunk by chunk, and as transformers does: seconds, and the most memory it takes.

    python tests/bench/reading_order.py [--model NAME] [--quant none] [--tokens 8192] [--chunks 512,2048] [--reps 3]
        [--only speed|memory] [--threads 2] [--out FILE]

Seconds: both orders by turns in one process, from an empty session. Memory: each side in a process of its own, which
reads once; beside the peak of the process, what it had before it read. transformers reads the same weights by its own
loop, SDPA and cache, in one pass, as its `generate` does. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import machine

ORDERS = ("chunks", "layers")
MIB = 1 << 20


def opened(name: str, quant: str, threads: int) -> Any:
    from kvcli import load

    return load(name, "exact", {"load.quant": quant, "load.threads": threads, "load.device": "cpu"})


def text(vocab: int, n: int) -> list[int]:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(1)).tolist()


def session(model: Any, order: str, chunk: int) -> Any:
    return model.open(set={"prefill.order": order, "prefill.chunk": chunk, "context.limit": model.lm.limit}).session


def speed(name: str, args: argparse.Namespace, chunks: list[int]) -> list[dict[str, Any]]:
    """By chunk: seconds of both orders, and how many times as fast layers are."""
    from kvcli.engine.engine import run_to_end

    model = opened(name, args.quant, args.threads)
    ids, rows = text(model.lm.vocab, args.tokens), []
    for chunk in chunks:
        took: dict[str, list[float]] = {order: [] for order in ORDERS}
        for rep in range(args.reps + 1):
            for order in ORDERS[:: 1 if rep % 2 else -1]:
                one = session(model, order, chunk)
                began = time.perf_counter()
                run_to_end(one.read(ids))
                if rep:  # the first turn counts for nothing
                    took[order].append(time.perf_counter() - began)
        gains = [a / b for a, b in zip(took["chunks"], took["layers"], strict=True)]
        row = {order: statistics.median(took[order]) for order in ORDERS}
        row |= {"chunk": chunk, "gain": statistics.median(gains), "low": min(gains), "high": max(gains)}
        rows.append(row)
        print(
            f"chunk {chunk:>5}  chunks {row['chunks']:.3f} s  layers {row['layers']:.3f} s  "
            f"{row['gain']:.3f}x ({row['low']:.3f}-{row['high']:.3f})",
            flush=True,
        )
    return rows


def measure(side: str, name: str, quant: str, threads: int, n: int, pipe: Any) -> None:
    """In a process of its own. `side`: an order with its chunk, or transformers."""
    from kvcli.engine.process_memory import peak_bytes

    cpu = torch.device("cpu")
    if side == "transformers":
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads or torch.get_num_threads())
        plain = AutoModelForCausalLM.from_pretrained(name, dtype="auto", attn_implementation="sdpa").eval()
        ids = torch.tensor([text(plain.config.vocab_size, n)])
        given = before()
        with torch.inference_mode():
            out = plain(ids, use_cache=True, logits_to_keep=1)
        assert out.past_key_values.get_seq_length() == n
    else:
        from kvcli.engine.engine import run_to_end

        order, _, chunk = side.partition(" ")
        model = opened(name, quant, threads)
        one = session(model, order, int(chunk))
        given = before()
        run_to_end(one.read(text(model.lm.vocab, n)))
        assert one.committed == n - 1
    pipe.send({"side": side, "before": given, "peak": peak_bytes(cpu)})


def before() -> int:
    """Bytes of the process now, from which on its peak counts: loading had one of its own."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def memory(name: str, args: argparse.Namespace, chunks: list[int]) -> list[dict[str, Any]]:
    """By side: the most that its process took while it read, and what of it reading brought."""
    spawn, rows = multiprocessing.get_context("spawn"), []
    sides = [f"{order} {chunk}" for chunk in chunks for order in ORDERS]
    for side in [*sides, *(["transformers"] if args.quant == "none" else [])]:
        here, there = spawn.Pipe()
        process = spawn.Process(target=measure, args=(side, name, args.quant, args.threads, args.tokens, there))
        process.start()
        there.close()  # a child that dies ends the wait
        try:
            row = dict(here.recv())
        except EOFError:
            sys.exit(f"{side} could not be measured; its error is above")
        finally:
            process.join()
        row["reading"] = row["peak"] - row["before"]
        rows.append(row)
    theirs = next((row for row in rows if row["side"] == "transformers"), None)
    for row in rows:
        shares = {key: row[key] / theirs[key] for key in ("peak", "reading")} if theirs else {}
        row["of_transformers"] = shares
        told = f"  {shares['peak']:.0%} of transformers', reading {shares['reading']:.0%}" if shares else ""
        print(f"{row['side']:<14} peak {row['peak'] / MIB:7,.0f} MiB, reading {row['reading'] / MIB:7,.0f} MiB{told}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-152M", help="anything kvcli loads; speed alone for demo")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", default="512,2048")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", choices=("speed", "memory"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, chunks = machine(), [int(chunk) for chunk in args.chunks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        if name == "random-152M":
            from tests.bench.random_model import write

            write(Path(name := str(Path(folder, name))))
        found: dict[str, Any] = {}
        if args.only != "memory":
            found["speed"] = speed(name, args, chunks)
        if args.only != "speed":
            found["memory"] = memory(name, args, chunks)
    command = f"python tests/bench/reading_order.py --model {args.model} --tokens {args.tokens} --chunks {args.chunks}"
    command += f" --quant {args.quant} --reps {args.reps} --threads {args.threads}"
    result = {"schema": "kvcli.bench.reading_order/1", "environment": about, "command": command, **found}
    result |= {"model": args.model, "quant": args.quant, "tokens": args.tokens}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
