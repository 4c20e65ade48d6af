"""What it costs that rows of recall and of Hadamard-turned tiers read apart: native reads against torch's, one layer.

    python tests/bench/rows_apart.py [--slots 16384] [--rows 1,8] [--repeats 15] [--threads 1]

bf16, random keys with loud channels, 4 KV heads of 128 with 4 query heads each; the sides take turns, and times are
medians of this process's CPU seconds. Torch's side is what runs where no native kernels are, with all rows over the
union of what they chose.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels import native
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kernels.page_scores.reference import log_masses
from kvcli.kv.slots import AttentionParams, KVCache, Tier, empty_like
from kvcli.kv.sparse import sparse_tier
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseCache
from kvcli.kv.tiers import dense_layer, quantized
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from tests import make
from tests.bench.harness import Ints, Rows, Words, in_turns, measurement

K, G, D = 4, 4, 128
BUDGET = PageBudget(0.03, 1024, 16, 64)
INDEXES: dict[str, Callable[[], PageIndex]] = {
    "minmax 16": lambda: MinMax(page=16),
    "sketch 4": lambda: Sketch(page=4),
    "certified 4": lambda: Certified(page=4),
}
# bits of keys and of values, and whether they are turned
PACKED = {"hadamard 4 4": (4, 4, "hadamard"), "hadamard 8 8": (8, 8, "hadamard"), "8 8": (8, 8, "none")}
PACKED["sketch on 4 4"] = (4, 4, "none")


@contextmanager
def torch_alone() -> Iterator[None]:
    """As where no native kernels are."""
    with ExitStack() as stack:
        for module in (sparse_tier, dense_layer):
            stack.enter_context(mock.patch.object(module, "serves", return_value=False))
        stack.enter_context(mock.patch.object(quantized, "serves_packed", return_value=False))
        stack.enter_context(mock.patch("kvcli.kernels.page_scores.why_not", return_value="not asked"))
        stack.enter_context(mock.patch.object(sparse_tier, "log_masses", log_masses))
        yield


def stored(name: str, slots: int) -> Tier:
    torch.manual_seed(0)
    loud = torch.where(torch.rand(K, 1, D) < 0.1, 6.0, 1.0)
    k = ((torch.randn(K, slots, D) + torch.randn(K, 1, D)) * loud).bfloat16()
    v = torch.randn(K, slots, D).bfloat16()
    dense = make.dense((1, K, D), torch.bfloat16)
    if name in PACKED:
        k_bits, v_bits, turn = PACKED[name]
        held = make.quantized((1, K, D), (k_bits, v_bits), torch.bfloat16, group=64, rotate=turn)
        held.append(0, k, v, 0)
        if not name.startswith("sketch"):
            return held
        reads = sparse_tier.SparseTier(held, INDEXES["sketch 4"](), BUDGET, [0], source=held)
        reads.take(0, empty_like(held.slots(0)))  # a boundary
        return reads
    kv: KVCache = dense
    if name in INDEXES:
        epsilon = 0.5 if name.startswith("certified") else None
        kv = SparseCache(dense, INDEXES[name](), BUDGET, [0], epsilon=epsilon, source=dense)
    kv.append(0, k, v, 0)
    kv.compress()
    kv.append(0, k[:, :30], v[:, :30], slots)
    return kv


@measurement("Native reads of rows apart against torch's, milliseconds of one layer")
def rows_apart(
    slots: int = 16384, rows: Ints = (1, 8), repeats: int = 15, threads: int = 1, only: Words = (*INDEXES, *PACKED)
) -> Rows:
    torch.set_num_threads(threads)
    functions = native.native()
    assert functions is not None, native.why_not()
    functions.use_threads(threads)
    for name in only:
        kv = stored(name, slots)
        for n in rows:
            q, k, v = (torch.randn(heads, n, D).bfloat16() for heads in (K * G, K, K))
            pos, sees = [slots + 30 + i for i in range(n)], torch.ones(n, n, dtype=torch.bool).tril()
            own = NewRows(k, v, pos, sees if n > 1 else None, sees if n > 1 else None)

            def once(own: NewRows = own, q: torch.Tensor = q, kv: Tier = kv, pos: list[int] = pos) -> float:
                began = time.process_time()
                merge_attention(kv.attend(0, q, AttentionParams(D**-0.5), pos, own))
                return (time.process_time() - began) * 1e3

            found = in_turns({"native": once, "torch": torch_alone()(once)}, repeats, 2)
            took = {side: round(median(each), 3) for side, each in found.items()}
            yield {"store": name, "rows": n, **took, "ratio": round(took["native"] / took["torch"], 2)}


if __name__ == "__main__":
    rows_apart.main()
