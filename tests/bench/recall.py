"""How much softmax mass recall misses, and what its bound says of that, by index and by how peaked attention is.

    python tests/bench/recall.py [--slots 32768] [--fraction 0.03] [--dim 128] [--heads 8] [--rows 8] [--threads 2]

Random keys with loud channels, read by queries whose scores spread over 1 (diffuse), 2.5 (mixed) or 5 units (peaked) of
the softmax, and the demo model answering a question about its report of 4,000 tokens. "missed" is the mass of what was
not read, mean over rows, heads and layers; "bound" what the index said of it, "worst" the most by which a bound fell
short of the truth (never above 0). For random keys also the time of one attention over what was chosen against one over
everything, as CPU seconds of this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, nbytes
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.pages import PageBudget, padded
from kvcli.kv.sparse.sparse_tier import SparseCache
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.cluster import Cluster
from kvcli.methods.sparse.lowrank import LowRank
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from tests import make
from tests.bench.harness import Rows, measurement
from tests.bench.random_model import opened

SPREADS = {"diffuse": 1.0, "mixed": 2.5, "peaked": 5.0}  # standard deviation of scores
INDEXES: dict[str, Callable[[], PageIndex]] = {
    "minmax 16": lambda: MinMax(page=16),
    "minmax 4": lambda: MinMax(page=4),
    "sketch 16": lambda: Sketch(page=16),
    "sketch 4": lambda: Sketch(page=4),
    "sketch 1": lambda: Sketch(page=1),
    "certified 16": lambda: Certified(page=16),
    "certified 4": lambda: Certified(page=4),
    "certified 1": lambda: Certified(page=1),
    "cluster 16": lambda: Cluster(window=512, size=16),
    "lowrank 8": lambda: LowRank(page=8, rank=32),
}
ANSWER = 24  # tokens of the demo model


class Watched(SparseCache):
    """Notes what each read missed, and the bound on it."""

    def watch(self) -> None:
        self.missed: list[Tensor] = []
        self.bound: list[Tensor] = []
        self.took = [0.0, 0.0]  # CPU seconds of recall, and of reading everything

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Tensor, own: NewRows | None = None
    ) -> list[PartialAttention]:
        """One row a pass."""
        began = time.process_time()
        parts = super().attend(layer, q, params, pos, own)
        middle = time.process_time()
        self._tier.attend(layer, q, params, pos)
        if layer in self._chosen:
            self.took = [self.took[0] + middle - began, self.took[1] + time.process_time() - middle]
            self._note(layer, q, params)
        return parts

    def _note(self, layer: int, q: Tensor, params: AttentionParams) -> None:
        pages, s = self._pages[layer], self.slots(layer)
        rows = q.reshape(s.k.shape[0], -1, q.shape[2])  # [K, G, D]
        score = rows.double() @ s.k.double().transpose(1, 2) * params.scale
        left = padded(pages.held & ~self._chosen[layer])  # pages that were not read
        unread = torch.zeros(s.k.shape[0], s.n_slots + 1, dtype=torch.bool)
        unread.scatter_(1, pages.slots_of(left) + 1, True)  # what is no slot has index -1
        unread = unread[:, 1:].unsqueeze(1)
        full, read = score.logsumexp(2), score.masked_fill(unread, -torch.inf).logsumexp(2)
        self.missed.append(1 - (read - full).exp().flatten())
        if self._index.is_bound:
            bound = self._index.score(rows, pages.kept, pages.shared, params).double()
            bound = bound.masked_fill((self._chosen[layer] | ~pages.held).unsqueeze(1), -torch.inf).logsumexp(2)
            # as of the boundary, as certificates are
            end = int(pages.ends.max())
            read = score[..., :end].masked_fill(unread[..., :end], -torch.inf).logsumexp(2)
            self.bound.append(torch.sigmoid(bound - read).flatten())

    def figures(self) -> dict[str, float | None]:
        """Means, and the worst bound."""
        missed, bound = torch.cat(self.missed), torch.cat(self.bound) if self.bound else None
        return {
            "missed": float(missed.mean()),
            "bound": None if bound is None else float(bound.mean()),
            "worst": None if bound is None else float((missed - bound).max()),
            "time": self.took[0] / max(self.took[1], 1e-9),
        }


def fill(slots: int, dim: int, heads: int) -> tuple[Dense, Tensor]:
    """A bf16 store of one layer, and how loud its channels are: a tenth of them six times the others."""
    torch.manual_seed(0)
    loud = torch.where(torch.rand(heads, 1, dim) < 0.1, 6.0, 1.0)
    store = make.dense((1, heads, dim), torch.bfloat16)
    k = (torch.randn(heads, slots, dim) + torch.randn(heads, 1, dim)) * loud
    store.append(0, k.bfloat16(), torch.randn(heads, slots, dim).bfloat16(), 0)
    return store, loud


def queries(store: Dense, loud: Tensor, spread: float, n: int) -> Tensor:
    """[H, n, D] with scores of this standard deviation over all slots of their KV head, at a scale of 1 / sqrt(D)."""
    k = store.slots(0).k.float()
    q = torch.randn(k.shape[0], 4, n, k.shape[2]) / loud.unsqueeze(1)
    score = torch.einsum("kgnd,ksd->kgns", q, k) * k.shape[2] ** -0.5
    return (q * spread / score.std(-1, keepdim=True)).flatten(0, 1).bfloat16()


def over(kv: Watched, q: Tensor) -> dict[str, float | None]:
    """Each row of q [H, n, D] by itself."""
    kv.watch()
    for i in range(q.shape[1]):
        kv.attend(0, q[:, i : i + 1], AttentionParams(q.shape[2] ** -0.5), [kv.n_slots(0)])
    return kv.figures()


def demo() -> tuple[Any, list[int]]:
    """The demo model in float32, and a question about its report."""
    import kvcli
    from tests.demo_model.example import example_report

    model = kvcli.load("demo", profile="exact", set={"load.dtype": "fp32"})
    report = example_report()
    fact = report.facts[len(report.facts) // 2]
    return model, model.encode(f"{report.text}\n\nWhat is the {fact.attribute} of {fact.entity}?")


def answer(model: Any, prompt: list[int], index: PageIndex, budget: PageBudget) -> dict[str, float | None]:
    """Of the first tokens of the answer, all layers."""
    lm = model.lm
    store = make.dense(lm)
    kv = Watched(store, index, budget, range(lm.n_layers))
    kv.watch()
    session = opened(lm, kv, every=8)
    run_to_end(session.read(prompt))
    list(iterate_events(session.stream(ANSWER)))
    return kv.figures()


@measurement("Softmax mass that recall misses, and what its bound says of that")
def recall(
    slots: int = 32768,
    fraction: float = 0.03,
    dim: int = 128,
    heads: Annotated[int, "KV heads, of 4 query heads each"] = 8,
    rows: Annotated[int, "queries measured, one a pass"] = 8,
    no_demo: Annotated[bool, "random keys only"] = False,
    threads: int = 2,
) -> Rows:
    torch.set_num_threads(threads)
    store, loud = fill(slots, dim, heads)
    budget = PageBudget(fraction, 1, 4, 64)
    model, prompt = (None, []) if no_demo else demo()
    for name, index in INDEXES.items():
        kv = Watched(store, index(), budget, [0])
        kv.compress()
        held = nbytes(kv)["index"] / nbytes(store)["cpu"]
        for kind, spread in SPREADS.items():
            yield {"index": name, "queries": kind, "bytes": held} | over(kv, queries(store, loud, spread, rows))
        if model is not None:
            yield {"index": name, "queries": "demo", "bytes": None} | answer(model, prompt, index(), budget)


if __name__ == "__main__":
    recall.main()
