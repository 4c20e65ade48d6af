"""How much softmax mass recall misses, and what its bound says of that, by index and by how peaked attention is.

    python tests/bench/recall.py [--slots 32768] [--fraction 0.03] [--dim 128] [--heads 8] [--rows 8] [--threads 2]

Random keys with loud channels, read by queries whose scores spread over 1 (diffuse), 2.5 (mixed) or 5 units (peaked) of
the softmax. "missed" is the mass of what was not read, mean over rows and heads; "bound" what the index said of it,
"worst" the most by which a bound fell short of the truth (never above 0). Beside them the time of one attention over
what was chosen against one over everything, as CPU seconds of this process. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kv.dense import Dense
from kvcli.kv.index import Index
from kvcli.kv.index_certified import Certified
from kvcli.kv.index_minmax import MinMax
from kvcli.kv.index_sketch import Sketch
from kvcli.kv.recall_pages import Budget
from kvcli.kv.recall_store import RecallStore
from kvcli.kv.slots import Sight, nbytes

SPREADS = {"diffuse": 1.0, "mixed": 2.5, "peaked": 5.0}  # standard deviation of scores
INDEXES: dict[str, Callable[[], Index]] = {
    "minmax 16": lambda: MinMax(16),
    "minmax 4": lambda: MinMax(4),
    "sketch 16": lambda: Sketch(16),
    "sketch 4": lambda: Sketch(4),
    "sketch 1": lambda: Sketch(1),
    "certified 16": lambda: Certified(16),
    "certified 4": lambda: Certified(4),
    "certified 1": lambda: Certified(1),
}


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--slots", type=int, default=32768)
    ask.add_argument("--fraction", type=float, default=0.03)
    ask.add_argument("--dim", type=int, default=128)
    ask.add_argument("--heads", type=int, default=8, help="KV heads, of 4 query heads each")
    ask.add_argument("--rows", type=int, default=8, help="queries measured, one a pass")
    ask.add_argument("--threads", type=int, default=2)
    args = ask.parse_args()
    torch.set_num_threads(args.threads)
    store, loud = fill(args)
    kv_bytes = nbytes(store)["cpu"]
    table: list[dict[str, Any]] = []
    print(f"{'index':14}{'queries':10}{'bytes':>7}{'missed':>9}{'bound':>9}{'worst':>9}{'time':>7}")
    for name, make in INDEXES.items():
        kv = RecallStore(store, make(), Budget(args.fraction, 1, 4, 64), [0])
        kv.settle(None)
        for kind, spread in SPREADS.items():
            row = {"index": name, "queries": kind, "bytes": nbytes(kv)["index"] / kv_bytes}
            row |= measure(kv, queries(store, loud, spread, args.rows))
            table.append(row)
            bound, worst = (f"{row[key]:9.4f}" if row[key] is not None else f"{'-':>9}" for key in ("bound", "worst"))
            print(
                f"{name:14}{kind:10}{row['bytes']:7.1%}{row['missed']:9.4f}{bound}{worst}{row['time']:7.2f}", flush=True
            )
    print(json.dumps({"machine": platform.processor(), "torch": torch.__version__} | vars(args) | {"table": table}))


def fill(args: argparse.Namespace) -> tuple[Dense, Tensor]:
    """A bf16 store of one layer, and how loud its channels are: a tenth of them six times the others."""
    torch.manual_seed(0)
    loud = torch.where(torch.rand(args.heads, 1, args.dim) < 0.1, 6.0, 1.0)
    store = Dense(1, args.heads, args.dim, torch.bfloat16)
    k = (torch.randn(args.heads, args.slots, args.dim) + torch.randn(args.heads, 1, args.dim)) * loud
    store.append(0, k.bfloat16(), torch.randn(args.heads, args.slots, args.dim).bfloat16(), torch.arange(args.slots))
    return store, loud


def queries(store: Dense, loud: Tensor, spread: float, n: int) -> Tensor:
    """[H, n, D] with scores of this standard deviation over all slots of their KV head, at a scale of 1 / sqrt(D)."""
    k = store.slots(0).k.float()
    q = torch.randn(k.shape[0], 4, n, k.shape[2]) / loud.unsqueeze(1)
    score = torch.einsum("kgnd,ksd->kgns", q, k) * k.shape[2] ** -0.5
    return (q * spread / score.std(-1, keepdim=True)).flatten(0, 1).bfloat16()


def measure(kv: RecallStore, q: Tensor) -> dict[str, Any]:
    """Means over rows and heads of what is missed and of its bound; seconds of recall over those of reading it all."""
    sight, pages, index = Sight(q.shape[2] ** -0.5), kv._pages[0], kv._index
    missed, bounds, took = [], [], [0.0, 0.0]
    n_kv = pages.whole.shape[0]
    for i in range(q.shape[1]):
        row, pos = q[:, i : i + 1], torch.tensor([kv.n_slots(0)])
        kv._chosen.clear()
        began = time.process_time()
        (part,) = kv.attend(0, row, sight, pos)
        middle = time.process_time()
        kv._tier.attend(0, row, sight, pos)
        took = [took[0] + middle - began, took[1] + time.process_time() - middle]
        lse = part.lse.double().view(n_kv, 4)
        s = kv.slots(0)
        score = torch.einsum("kgd,ksd->kgs", row.double().view(n_kv, 4, -1), s.k.double()) * sight.scale
        full = score.logsumexp(2)
        missed.append(1 - (lse - full).exp())
        if index.is_bound:
            score = index.score(row.view(n_kv, 4, -1), pages.kept, pages.shared, sight).double()
            left = score.masked_fill(kv._chosen[0].unsqueeze(1), -torch.inf).logsumexp(2)
            bounds.append(torch.sigmoid(left - lse))
    truth = torch.stack(missed)
    found = torch.stack(bounds) if bounds else None
    return {
        "missed": float(truth.mean()),
        "bound": None if found is None else float(found.mean()),
        "worst": None if found is None else float((truth - found).max()),
        "time": took[0] / max(took[1], 1e-9),
    }


if __name__ == "__main__":
    main()
