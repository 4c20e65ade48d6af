"""What is left of a slot's worth in 8, 4 and 2 bits: the constants of kvcli/policies/plan.py.

    python tests/bench/rounding.py [--model demo] [--length 1024] [--slots 64]

Of each layer and KV head slots are drawn by the attention that the newest 32 queries pay them; each is rounded alone
(in the groups that it would share scales with), and left out alone. What is left is one less the error of the head's
output when it is rounded over that when it is left out, both as norms over queries, summed over slots. Prints a row for
each number of bits, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.bench.texts import text_of  # noqa: E402
from kvcli.engine.engine import run  # noqa: E402
from kvcli.engine.feed import Feed  # noqa: E402
from kvcli.engine.rows import Rows  # noqa: E402
from kvcli.heads.sample import samples  # noqa: E402
from kvcli.kv.budget import keys_in  # noqa: E402
from kvcli.kv.packed import Packed  # noqa: E402
from kvcli.kv.slots import LayerShape, Slots  # noqa: E402
from tests.bench.decode import machine  # noqa: E402
from tests.bench.kv_quality import opened  # noqa: E402

QUERIES = 32
SINKS = 4  # first tokens, which always stay
HELD_OUT = 5_000  # seed of the text


def rounded(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """k, v [S, D] as a rung of so many bits gives them back."""
    shape = LayerShape(1, k.shape[1], v.shape[1])
    tier = Packed([shape], k.dtype, k_bits=keys_in(bits), v_bits=bits)
    tier.take(0, Slots(k[None], v[None], torch.arange(len(k), dtype=torch.int32)[None]))
    s = tier.slots(0)
    return s.k[0], s.v[0]


def errors(q: Tensor, k: Tensor, v: Tensor, scale: float, slots: int, g: torch.Generator) -> dict[int, Tensor]:
    """q [N, D] over k, v [S, D] -> by bits (0 = left out) the error of each drawn slot [m], as a norm over queries."""
    q, k, v = q.double(), k.double(), v.double()
    p = (q @ k.T * scale).softmax(1)  # [N, S]
    out = p @ v
    at = SINKS + torch.multinomial(p.mean(0)[SINKS:], slots, generator=g)
    found = {0: ((p[:, at] / (1 - p[:, at]))[..., None] * (out[:, None] - v[at])).square().sum((0, 2)).sqrt()}
    for bits in (8, 4, 2):
        rk, rv = (t.double() for t in rounded(k.float(), v.float(), bits))
        grow = (q @ (rk[at] - k[at]).T * scale).exp()  # of a slot's weight before it is normed again
        share = p[:, at] * grow / (1 + p[:, at] * (grow - 1))
        rest = (out[:, None] - p[:, at, None] * v[at]) / (1 - p[:, at])[..., None]
        new = share[..., None] * rv[at] + (1 - share)[..., None] * rest
        found[bits] = (new - out[:, None]).square().sum((0, 2)).sqrt()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=64, help="drawn of each head")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model: Any = opened(args.model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    haystack = text_of("prose") if args.model != "demo" else None
    sample = samples(model, 1, args.length, HELD_OUT, haystack)[0]
    rows = Rows.chain(sample.context[:-1], 0)
    (made,) = run([Feed(model.lm, rows, model.new_session().kv, hear=range(rows.n_rows - QUERIES, rows.n_rows))])
    total: dict[int, float] = {}
    g = torch.Generator().manual_seed(0)
    for layer, q in enumerate(made.queries):
        fresh = made.fresh[layer]
        kv = fresh.k.shape[0]
        for head in range(kv):
            of = q.view(kv, -1, *q.shape[1:])[head].flatten(0, 1)
            sight = model.lm.sights[layer]
            for bits, each in errors(
                of, fresh.k[head, :-QUERIES], fresh.v[head, :-QUERIES], sight.scale, args.slots, g
            ).items():
                total[bits] = total.get(bits, 0.0) + float(each.sum())
    found = [{"bits": bits, "left": round(1 - total[bits] / total[0], 4)} for bits in (8, 4, 2)]
    for row in found:
        print(json.dumps(row))
    about = machine()
    result = {
        "title": f"What is left of a slot's worth in so many bits: {args.model}, {args.length} tokens",
        "machine": f"torch {about['torch']}, commit {about['commit']}",
        "command": " ".join(["python tests/bench/rounding.py", *sys.argv[1:]]).partition(" --out")[0],
        "rows": found,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
