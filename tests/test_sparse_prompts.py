"""Sparse attention of a prompt: rows of a segment select pages together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.hf.lm import LM
from kvcli.engine.prefill.prompt_pieces import PromptPieces
from kvcli.kernels.attend_invariant import SelectedPages, StoredKV, attend_part, reference
from kvcli.kernels.native import native
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.index_sketch import Sketch
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseCache
from kvcli.methods.sparse.antidiagonal import Antidiagonal
from kvcli.methods.sparse.middles import Middles
from tests import make

SEGMENT = 16
PARAMS = AttentionParams(0.3, is_prompt=True)
INDEXES: dict[str, PageIndex] = {"xattention": Antidiagonal(4, 2), "critiprefill": Middles(4), "sketch": Sketch(4)}


def sparse(lm: LM, index: PageIndex, of_prompts: bool = True, mass: float = 1.0, most: int = 8) -> SparseCache:
    """A cache whose layers all select."""
    dense, budget = make.dense(lm), PageBudget(0.01 if mass == 1 else 1.0, most, 2, 3, mass)
    return SparseCache(dense, index, budget, range(len(lm.shapes)), source=dense, of_prompts=of_prompts)


def antidiagonal_shares(q: Tensor, k: Tensor, block: int, stride: int, scale: float) -> Tensor:
    """Return what the published rule gives the blocks of k [S, D] for the rows q [N, D], score by score."""
    n_groups, n_keys = len(q) // stride, len(k) // stride
    score = torch.zeros(n_groups, n_keys, dtype=torch.float64)
    for a, b, i in product(range(n_groups), range(n_keys), range(stride)):
        score[a, b] += q[a * stride + stride - 1 - i].double() @ k[b * stride + i].double() * scale / stride
    return score.softmax(-1).unflatten(1, (-1, block // stride)).sum((0, 2)) / n_groups


def middle_scores(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Return the published criticality of the blocks of k [S, D] for the rows q [N, D]."""
    both = torch.stack([q.amax(0), q.amin(0)])
    high, low = (both @ k.unflatten(0, (-1, block)).amax(1).T, both @ k.unflatten(0, (-1, block)).amin(1).T)
    return torch.maximum(high.mean(0), low.mean(0))


def chosen_pages(index: PageIndex, q: Tensor, k: Tensor, budget: PageBudget) -> list[int]:
    """The pages of one head that the rows q [N, D] select of the keys k [S, D]."""
    dense = make.dense((1, 1, k.shape[1]), torch.float32)
    cache = SparseCache(dense, index, budget, [0], source=dense, of_prompts=True)
    cache.append(0, k.unsqueeze(0), torch.randn_like(k).unsqueeze(0), 0)
    cache.compress()
    cache.attend(0, q.unsqueeze(0), PARAMS, range(len(k), len(k) + len(q)))
    return cache._chosen[0][0].nonzero().flatten().tolist()


@pytest.mark.parametrize("mass", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("stride", [2, 4])
def test_xattention_selects_by_the_published_rule(mass: float, stride: int) -> None:
    torch.manual_seed(stride)
    q, k = torch.randn(16, 6) * 2, torch.randn(64, 6) * 2
    share = antidiagonal_shares(q, k, 8, stride, PARAMS.scale)
    first, last = {0}, {7}  # pages with sinks and with the newest tokens
    held, found = sum(float(share[p]) for p in first | last), first | last
    for page in share.argsort(descending=True).tolist():
        if page not in found and held < mass:
            found.add(page)
            held += float(share[page])
    assert chosen_pages(Antidiagonal(8, stride), q, k, PageBudget(1.0, 8, 2, 3, mass)) == sorted(found)
    assert len(found) < 8 or mass == 0.9


def test_critiprefill_selects_by_the_published_rule() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(16, 6), torch.randn(64, 6)
    score = middle_scores(q, k, 4)
    score[0] = score[15] = -math.inf
    best = {0, 15, *score.topk(5).indices.tolist()}
    assert chosen_pages(Middles(4), q, k, PageBudget(0.01, 20, 2, 3)) == sorted(best)


@pytest.mark.parametrize("name", INDEXES)
def test_a_segment_attends_to_the_pages_that_it_selects(name: str) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 5, 6), torch.randn(1, 40, 6), torch.randn(1, 40, 6)
    dense = make.dense((1, 1, 6), torch.float32)
    cache = SparseCache(dense, INDEXES[name], PageBudget(0.01, 8, 2, 3), [0], source=dense, of_prompts=True)
    cache.append(0, k, v, 0)
    cache.compress()
    (part,) = cache.attend(0, q, PARAMS, range(40, 45))
    mask = cache._chosen[0][0].repeat_interleave(4)
    assert 0 < int(mask.sum()) < 40
    score = (q @ k[0].T * PARAMS.scale).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(part.out.float(), score.softmax(-1) @ v[0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(native() is None, reason="native kernels are missing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_selection_of_all_rows_has_the_bits_of_one_for_each(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(6, 70, 16).to(dtype), torch.randn(2, 400, 16).to(dtype), torch.randn(2, 400, 16).to(dtype)
    run = StoredKV(k.flatten(0, 1), v.flatten(0, 1), torch.arange(400).int(), [0, 400], [400, 400], [0, 0])
    pages = torch.rand(2, 1, 25) < 0.4
    one = SelectedPages(pages, 16, [400, 400], [0, 0])
    each = SelectedPages(pages.expand(-1, 70, -1).contiguous(), 16, [400, 400], [0, 0])
    a, b = (attend_part(q, run, range(70), 0.2, chosen=chosen) for chosen in (one, each))
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    exact = reference.attend_invariant(q, run, None, range(70), 0.2, chosen=one)
    torch.testing.assert_close(a.out.float(), exact.out.float(), atol=2e-2, rtol=2e-2)


def kv_after(lm: LM, cache: SparseCache, reads: Sequence[Sequence[int]]) -> tuple[Tensor, list[ForwardRequest]]:
    """The keys of all layers after a prompt was read in these parts, and the requests for passes."""
    session = make.session(lm, cache, chunk=SEGMENT, is_whole=True)
    requests = list[ForwardRequest]()
    for part in reads:
        work, result = session.read(part), None
        with suppress(StopIteration):
            while True:
                asked = work.send(result)
                result = None
                if isinstance(asked, ForwardRequest):
                    requests.append(asked)
                    (result,) = run([asked])
    return torch.cat([cache.slots(layer).k.flatten() for layer in range(len(lm.shapes))]), requests


@pytest.mark.parametrize("name", INDEXES)
def test_segments_lie_at_fixed_positions_of_the_text(name: str) -> None:
    lm = make.model("llama", torch.bfloat16 if native() is not None else torch.float32, kernels=True)
    ids = [(7 * i * i + 3 * i) % 90 for i in range(90)]
    mass = 0.6 if name == "xattention" else 1.0
    whole, _ = kv_after(lm, sparse(lm, INDEXES[name], mass=mass), [ids])
    dense, _ = kv_after(lm, sparse(lm, INDEXES[name], of_prompts=False, mass=mass), [ids])
    assert not torch.equal(whole, dense), "nothing was left out"
    for reads in ([ids[:33], ids[33:]], [ids[:17], ids[17:81], ids[81:]]):
        assert torch.equal(kv_after(lm, sparse(lm, INDEXES[name], mass=mass), reads)[0], whole)


def test_passes_end_at_multiples_of_the_segment_and_none_is_cut() -> None:
    lm = make.model("llama", torch.bfloat16 if native() is not None else torch.float32, kernels=True)
    ids = list(range(90))
    _, requests = kv_after(lm, sparse(lm, INDEXES["sketch"]), [ids[:21], ids[21:]])
    assert [request.rows.pos[-1] + 1 for request in requests] == [16, 20, 32, 48, 64, 80, 89]
    assert not any(map(PromptPieces.can_cut, requests))
    if native() is not None:
        assert PromptPieces.can_cut(replace(requests[0], is_whole=False))
