"""What is left of a slot's worth in few bits, and where recall reads a part: the constants of
kvcli/methods/policies/precision/plan.py.

    python tests/bench/rounding.py [--model demo] [--length 1024] [--slots 64] [--recall sketch,minmax]

Of each layer and KV head slots are drawn by the attention that the newest 32 queries pay them; each is rounded alone
(in the groups that it would share scales with), and left out alone. What is left is one less the error of the head's
output when it is rounded over that when it is left out, both as norms over queries, summed over slots. Where recall
reads a share of the slots, one is left out for the queries that do not choose it, and there is no error for the others;
nothing is read but what is chosen.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.texts import text_of
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.heads.sample import samples
from kvcli.kv.cache.precision_budget import keys_in
from kvcli.kv.slots import AttentionParams, LayerShape, Slots
from kvcli.kv.sparse.pages import PageBudget, Pages
from kvcli.kv.sparse.sparse_tier import _choose
from kvcli.kv.tiers.dense import Dense
from kvcli.settings.resolve import method_class
from kvcli.settings.schema import registries
from tests import make
from tests.bench.harness import Rows, Words, measurement
from tests.bench.kv_quality import opened

QUERIES = 32
SINKS = 4  # first tokens, which always stay
HELD_OUT = 5_000  # seed of the text
SHARES = (0.03, 0.0625, 0.125, 0.25)  # that recall reads
Way = int | str  # bits, 0 = left out; or a method of recall and the share that it reads


def rounded(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """k, v [S, D] as a rung of so many bits gives them back."""
    shape = LayerShape(1, k.shape[1], v.shape[1])
    tier = make.quantized([shape], (keys_in(bits), bits), k.dtype)
    tier.take(0, Slots(k[None], v[None], torch.arange(len(k), dtype=torch.int32)[None]))
    s = tier.slots(0)
    return s.k[0], s.v[0]


def reads(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, method: str, share: float) -> Tensor:
    """Which slots of k, v [K, S, D] each row of q [K, G, N, D] reads, [K, N, S]."""
    tier = Dense([LayerShape(k.shape[0], k.shape[2], v.shape[2])], k.dtype)
    tier.append(0, k, v, 0)
    index = method_class(registries()["sparse"][method])()
    pages = Pages(index, PageBudget(share, 1, 0, 0))
    pages.settle(0, tier)
    score = index.score(q.flatten(1, 2), pages.kept, pages.shared, params).view(*q.shape[:3], -1)
    found = _choose(score, pages, -float("inf")).repeat_interleave(index.selection_unit, 2)  # whole pages alone
    return torch.nn.functional.pad(found, (0, k.shape[1] - found.shape[2]), value=True)


def errors(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slots: int, g: torch.Generator, read: dict[str, Tensor]
) -> dict[Way, Tensor]:
    """q [N, D] over k, v [S, D] -> by what is done to it the error of each drawn slot [m], as a norm over queries.

    `read`: by way of recall which slots a query reads [N, S]."""
    q, k, v = q.double(), k.double(), v.double()
    p = (q @ k.T * scale).softmax(1)  # [N, S]
    out = p @ v
    at = SINKS + torch.multinomial(p.mean(0)[SINKS:], slots, generator=g)
    gone = ((p[:, at] / (1 - p[:, at]))[..., None] * (out[:, None] - v[at])).square().sum(2)  # [N, m]
    found: dict[Way, Tensor] = {0: gone.sum(0).sqrt()}
    found |= {way: gone.masked_fill(mask[:, at], 0).sum(0).sqrt() for way, mask in read.items()}
    for bits in (8, 4, 2):
        rk, rv = (t.double() for t in rounded(k.float(), v.float(), bits))
        grow = (q @ (rk[at] - k[at]).T * scale).exp()  # of a slot's weight before it is normed again
        share = p[:, at] * grow / (1 + p[:, at] * (grow - 1))
        rest = (out[:, None] - p[:, at, None] * v[at]) / (1 - p[:, at])[..., None]
        new = share[..., None] * rv[at] + (1 - share)[..., None] * rest
        found[bits] = (new - out[:, None]).square().sum((0, 2)).sqrt()
    return found


@measurement("What is left of a slot's worth in so many bits: {model}, {length} tokens", is_counts=True)
def rounding(
    model: str = "demo",
    length: int = 1024,
    slots: Annotated[int, "drawn of each head"] = 64,
    recall: Annotated[Words, "methods of [sparse]"] = (),
) -> Rows:
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    haystack = text_of("prose") if model != "demo" else None
    sample = samples(loaded, 1, length, HELD_OUT, haystack)[0]
    rows = PassRows.chain(sample.context[:-1], 0)
    (made,) = run(
        [
            ForwardRequest(
                loaded.lm, rows, loaded.new_session().cache, record_queries=range(rows.n_rows - QUERIES, rows.n_rows)
            )
        ]
    )
    total: dict[Way, float] = {}
    g = torch.Generator().manual_seed(0)
    for layer, q in enumerate(made.queries):
        fresh = made.fresh[layer]
        sight, old = loaded.lm.attention_params[layer], (fresh.k[:, :-QUERIES], fresh.v[:, :-QUERIES])
        groups = q.view(fresh.k.shape[0], -1, *q.shape[1:])  # [K, G, N, D]
        read = {
            f"{method} {share:.1%}": reads(groups, *old, sight, method, share) for method in recall for share in SHARES
        }
        for head, of in enumerate(groups):
            mine = {way: mask[head].repeat(of.shape[0], 1) for way, mask in read.items()}
            k, v = (t[head] for t in old)
            for way, each in errors(of.flatten(0, 1), k, v, sight.scale, slots, g, mine).items():
                total[way] = total.get(way, 0.0) + float(each.sum())
    for way, error in total.items():
        if way:
            yield {"in": way, "left": round(1 - error / total[0], 4)}


if __name__ == "__main__":
    rounding.main()
