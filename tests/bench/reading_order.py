"""Reading a prompt layer by layer, chunk by chunk, and as transformers does: seconds, and the most memory it takes.

    python tests/bench/reading_order.py [--model NAME] [--quant none] [--tokens 8192] [--chunks 512,2048] [--reps 3]
        [--only speed|memory] [--threads 2] [--out FILE]

Seconds: both orders by turns in one process, from an empty session. Memory: each side in a process of its own, which
reads once; beside the peak of the process, what it had before it read. transformers reads the same weights by its own
loop, SDPA and cache, in one pass, as its `generate` does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import Ints, Rows, alone, in_turns, measurement, quotients, seconds

ORDERS = ("chunks", "layers")


def opened(name: str, quant: str, threads: int) -> Any:
    from kvcli import load

    return load(name, "exact", {"load.quant": quant, "load.threads": threads, "load.device": "cpu"})


def text(vocab: int, n: int) -> list[int]:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(1)).tolist()


def session(model: Any, order: str, chunk: int) -> Any:
    return model.open(set={"prefill.order": order, "prefill.chunk": chunk, "context.limit": model.lm.limit}).session


def speed(
    name: str, quant: str, threads: int, tokens: int, chunks: Sequence[int], reps: int
) -> Iterator[dict[str, Any]]:
    """By chunk: seconds of both orders, and how many times as fast layers are."""
    from kvcli.engine.engine import run_to_end

    model = opened(name, quant, threads)
    ids = text(model.lm.vocab, tokens)

    def once(order: str, chunk: int) -> float:
        one = session(model, order, chunk)
        return seconds(lambda: run_to_end(one.read(ids)))

    for chunk in chunks:
        took = in_turns({order: partial(once, order, chunk) for order in ORDERS}, reps)
        low, gain, high = quotients(took["chunks"], took["layers"])
        row = {order: median(took[order]) for order in ORDERS}
        yield row | {"chunk": chunk, "gain": gain, "low": low, "high": high}


def measure(side: str, name: str, quant: str, threads: int, n: int) -> dict[str, Any]:
    """In a process of its own. `side`: an order with its chunk, or transformers."""
    from kvcli.engine.resources import peak_bytes

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
    return {"side": side, "before": given, "peak": peak_bytes(cpu)}


def before() -> int:
    """Bytes of the process now, from which on its peak counts: loading had one of its own."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def memory(name: str, quant: str, threads: int, tokens: int, chunks: Sequence[int]) -> list[dict[str, Any]]:
    """By side: the most that its process took while it read, and what of it reading brought."""
    sides = [f"{order} {chunk}" for chunk in chunks for order in ORDERS]
    sides += ["transformers"] if quant == "none" else []
    rows = [alone(measure, side, name, quant, threads, tokens) for side in sides]
    for row in rows:
        row["reading"] = row["peak"] - row["before"]
    theirs = next((row for row in rows if row["side"] == "transformers"), None)
    for row in rows:
        row["of_transformers"] = {key: row[key] / theirs[key] for key in ("peak", "reading")} if theirs else {}
    return rows


@measurement(
    "Reading a prompt layer by layer, chunk by chunk, and as transformers does",
    schema="kvcli.bench.reading_order/1",
)
def reading_order(
    model: Annotated[str, "anything kvcli loads; speed alone for demo"] = "random-152M",
    quant: str = "none",
    tokens: int = 8192,
    chunks: Ints = (512, 2048),
    reps: int = 3,
    only: Annotated[Literal["", "speed", "memory"], "one of both"] = "",
    threads: int = 0,
) -> Rows:
    found: dict[str, Any] = {"model": model, "quant": quant, "tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        name = model
        if name == "random-152M":
            from tests.bench.random_model import write

            write(Path(name := str(Path(folder, name))))
        if only != "memory":
            found["speed"] = []
            for row in speed(name, quant, threads, tokens, chunks, reps):
                found["speed"].append(row)
                yield row
        if only != "speed":
            found["memory"] = memory(name, quant, threads, tokens, chunks)
            yield from found["memory"]
    return found


if __name__ == "__main__":
    reading_order.main()
