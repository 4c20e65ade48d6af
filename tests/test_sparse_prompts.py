"""Sparse attention of a prompt: rows of a segment select pages together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.engine import Engine, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig, BadModel
from kvcli.kernels.attend_invariant import SelectedPages, StoredKV, attend_part, reference
from kvcli.kernels.native import native
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.pages import PageBudget, Pages
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.methods.sparse.critiprefill import CritiPrefill
from kvcli.methods.sparse.segments import PromptSegments, SegmentCache, select
from kvcli.methods.sparse.xattention import XAttention
from kvcli.settings.profile import Profile
from tests import make

SEGMENT = 16
PARAMS = AttentionParams(0.3, is_prompt=True)
INDEXES: dict[str, PageIndex] = {"xattention": XAttention(page=4, stride=2), "critiprefill": CritiPrefill(page=4)}
IDS = [(7 * i * i + 3 * i) % 90 for i in range(90)]


def sparse(lm: LM, name: str) -> SegmentCache:
    """A cache whose layers all select."""
    dense, mass = make.dense(lm), 0.6 if name == "xattention" else 1.0
    budget = PageBudget(0.0, 8, 2, 3)
    return SegmentCache(dense, INDEXES[name], budget, range(len(lm.shapes)), source=dense, mass=mass)


def opened(lm: LM, name: str, **options: Any) -> GenerationSession:
    options = {"chunk": 64, **options}
    return make.session(lm, sparse(lm, name), companions=[PromptSegments(lm, SEGMENT)], **options)


@cache
def small() -> LM:
    return make.model("llama", torch.bfloat16 if native() is not None else torch.float32, kernels=True)


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


def chosen_pages(index: PageIndex, q: Tensor, k: Tensor, budget: PageBudget, mass: float = 1.0) -> list[int]:
    """The pages of one head that the rows q [N, D] select of the keys k [S, D]."""
    dense = make.dense((1, 1, k.shape[1]), torch.float32)
    cache = SegmentCache(dense, index, budget, [0], source=dense, mass=mass)
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
    assert chosen_pages(XAttention(page=8, stride=stride), q, k, PageBudget(0.0, 0, 2, 3), mass) == sorted(found)
    assert len(found) < 8 or mass == 0.9


def test_a_mass_leaves_the_floor_and_counts_no_page_that_a_shorter_head_lacks() -> None:
    torch.manual_seed(7)
    score = torch.randn(2, 1, 2, 8) - 8
    score[0, ..., 4:] = 0.0  # as summaries of zeros give
    held, always = torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    held[0, 4:], always[:, 0] = False, True
    pages = Pages(INDEXES["xattention"], PageBudget(0.0, 0, 1, 1))
    pages.last, pages.always, pages.open, pages.most = held.int().unsqueeze(2) - 1, always, held & ~always, 0
    of_its_own = Pages(pages.index, pages.budget)
    of_its_own.last, of_its_own.always, of_its_own.open = pages.last[:1, :4], always[:1, :4], pages.open[:1, :4]
    alone = select(score[:1, ..., :4], of_its_own, 0.6)
    assert 1 < int(alone.sum()) < 4
    assert torch.equal(select(score, pages, 0.6)[:1, :, :4], alone)
    assert int(select(score, pages, 1e-9).sum()) == 2, "those always read"
    pages.most = 3
    assert select(score, pages, 1e-9).sum(2).flatten().tolist() == [4, 4]


def test_critiprefill_selects_by_the_published_rule() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(16, 6), torch.randn(64, 6)
    score = middle_scores(q, k, 4)
    score[0] = score[15] = -math.inf
    best = {0, 15, *score.topk(5).indices.tolist()}
    assert chosen_pages(CritiPrefill(page=4), q, k, PageBudget(0.01, 20, 2, 3)) == sorted(best)


@pytest.mark.parametrize("name", INDEXES)
def test_a_segment_attends_to_the_pages_that_it_selects(name: str) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 5, 6), torch.randn(1, 40, 6), torch.randn(1, 40, 6)
    dense = make.dense((1, 1, 6), torch.float32)
    mass = 0.4 if name == "xattention" else 1.0
    cache = SegmentCache(dense, INDEXES[name], PageBudget(0.01, 8, 2, 3), [0], source=dense, mass=mass)
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


# The KV of a prompt depends on its own tokens alone.


def kv(session: GenerationSession, n: int) -> Tensor:
    """The keys of the first n tokens in all layers."""
    return torch.cat([session.cache.slots(layer).k[:, :n].flatten() for layer in range(len(session.lm.shapes))])


def read(session: GenerationSession, ids: Sequence[int]) -> GenerationSession:
    """Read a prompt as a question of a chat is."""
    session.start_answer(ids, Sampler(), replays=True)
    while run_to_end(session.prefill(ids)):
        pass
    return session


def answered(session: GenerationSession, n: int) -> GenerationSession:
    for _ in range(n):
        run_to_end(session.step(most=1))
    return session


@pytest.mark.parametrize("name", INDEXES)
def test_a_long_prompt_is_read_in_part(name: str) -> None:
    lm = small()
    alone, dense = read(opened(lm, name), IDS), read(make.session(lm), IDS)
    assert not torch.equal(kv(alone, 89), kv(dense, 89)), "nothing was left out"
    assert torch.equal(kv(alone, SEGMENT), kv(dense, SEGMENT)), "the first segment has nothing to select from"


@pytest.mark.parametrize("chunk", [16, 23, 40, 1000])
def test_chunks_do_not_matter(chunk: int) -> None:
    lm = small()
    some, one = read(opened(lm, "xattention", chunk=chunk), IDS), read(opened(lm, "xattention"), IDS)
    assert torch.equal(kv(some, 89), kv(one, 89))


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("answer", [0, 1, 9])
@pytest.mark.parametrize("shared", [0, 15, 16, 33, 40, 41, 44])
def test_a_prompt_behind_the_first_tokens_of_another(name: str, answer: int, shared: int) -> None:
    lm = small()
    session = answered(read(opened(lm, name), IDS[:41]), answer)
    shared = min(shared, len(session.ids) - (answer > 0))
    ids = [*session.ids[:shared], *([i + 1 for i in IDS[shared:]])]
    read(session, ids)
    assert session.committed == 89
    assert torch.equal(kv(session, 89), kv(read(opened(lm, name), ids), 89))


def test_the_same_prompt_again_reads_nothing() -> None:
    session = answered(read(opened(small(), "xattention"), IDS), 4)
    before = kv(session, 89)
    assert session.start_answer(IDS, Sampler(), replays=True) == 89
    assert torch.equal(kv(session, 89), before)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("turn", [41, 48, 49])
def test_a_chat_keeps_its_answers_and_gets_the_same_bits_again(turn: int, drafts: bool) -> None:
    lm = small()
    session = opened(lm, "xattention", drafter=Ngram().drafter() if drafts else None)
    answered(read(session, IDS[:turn]), 7)
    asked = [*session.ids[: turn + 7], *IDS[turn:]]
    edited = [*asked[:-9], *range(20, 60)]
    for ids in (asked, edited):
        assert session.start_answer(ids, Sampler(), replays=True) >= turn + 5, "the answer is kept"
        answered(read(session, ids), 3)
        n, text = len(ids) + 2, session.ids[: len(ids) + 3]
        before = kv(session, n)
        session.rewind(0)  # its memory goes to another answer
        run_to_end(session.compute(text))
        assert torch.equal(kv(session, n), before)
        alone = read(opened(lm, "xattention"), text[:turn])
        run_to_end(alone.replay(text[: turn + 7]))
        assert torch.equal(kv(read(alone, ids), len(ids) - 1), kv(session, len(ids) - 1))


@pytest.mark.parametrize("n", [33, 41, 49])
@pytest.mark.parametrize("answer", [0, 1, 5])
def test_a_saved_prompt_goes_on_from_whole_segments(n: int, answer: int) -> None:
    lm = small()
    source = answered(read(opened(lm, "critiprefill"), IDS[:n]), answer)
    ids = [*source.ids, *IDS[n:]]
    session = opened(lm, "critiprefill")
    session.start_answer(ids, Sampler(), replays=True)
    session.restore(source.state(), ids[source.committed])
    session.resume(ids)
    stored = session.skip_loaded()
    assert stored == (source.committed if answer > 1 else (n - 1) // SEGMENT * SEGMENT)
    while run_to_end(session.prefill(ids)):
        pass
    assert torch.equal(kv(session, len(ids) - 1), kv(read(source, ids), len(ids) - 1)), "as where it was never saved"
    if answer < 2:
        assert torch.equal(kv(session, len(ids) - 1), kv(read(opened(lm, "critiprefill"), ids), len(ids) - 1))


def test_beside_answers_no_segment_is_cut() -> None:
    lm = small()
    engine, sessions = Engine(rows=5, longest=1e-9), [opened(lm, "xattention") for _ in range(3)]
    texts = [IDS, IDS[:30], IDS[5:80]]
    read(sessions[1], texts[1])
    works = [sessions[0].read(texts[0]), sessions[1].stream(40), sessions[2].read(texts[2])]
    tasks = [engine.add(work) for work in works]
    while not all(task.is_over for task in tasks):
        engine.step()
    for session, ids in zip(sessions, texts, strict=True):
        assert torch.equal(kv(session, len(ids) - 1), kv(read(opened(lm, "xattention"), ids), len(ids) - 1))


def test_what_a_policy_evicted_is_computed_again() -> None:
    lm, policy = small(), StreamingLLM(sinks=2, window=40)
    session = answered(read(opened(lm, "xattention", policy=policy, every=8), IDS[:60]), 3)
    ids = [*IDS[:50], *range(40)]
    fresh = read(opened(lm, "xattention", policy=policy, every=8), ids)
    assert torch.equal(kv(read(session, ids), 89), kv(fresh, 89))
    goes_on = [*answered(session, 3).ids, *range(30)]
    assert session.start_answer(goes_on, Sampler(), replays=True) == len(ids) + 2


def test_models_with_recurrent_layers_are_refused() -> None:
    with pytest.raises(BadModel, match="recurrent layers") as refused:
        PromptSegments(make.model("qwen3_next"), SEGMENT)
    assert refused.value.code == "no_segments"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefill.order": "layers"}, '"layers" is impossible'),
        ({"prefill.chunk": 128}, "a pass has too few tokens"),
        ({"memory.fallbacks": ["prefill.chunk=-50%"] * 4}, 'after "prefill.chunk=-50%" a pass has too few tokens'),
        ({"memory.fallbacks": ["prefill.chunk=64", "kv.v_bits=8"]}, 'after "prefill.chunk=64" a pass has too few'),
        ({"prune": {"method": "lazy"}}, "needs prompts that are read from first to last token"),
        ({"reuse": {"method": "pie"}}, "needs prompts that are read from first to last token"),
        ({"policy": {"name": "kvzip"}}, "needs a repetition that reads all of the text"),
        ({"policy": {"name": "budget"}, "memory": {"budget": "25%", "disk": "1GiB"}}, '"kvzip" needs a repetition'),
        ({"exactness": "exact", "spec": {"method": "self"}}, '"exact" is impossible'),
        ({"exactness": "exact", "spec": {"method": "self"}, "kv": {"k_bits": 8}}, "only a part of the text"),
        ({"policy": {"name": "snap"}, "memory": {"evicted": "demote"}}, '"demote" has no tier to move to'),
        ({"policy": {"name": "budget"}, "memory": {"budget": "25%"}}, "has no lower tier to read"),
    ],
)
def test_what_reads_a_prompt_otherwise_is_refused(changes: dict[str, Any], says: str) -> None:
    profile = Profile.load("exact").replace(exactness="approx", sparse={"method": "xattention"})
    with pytest.raises(BadConfig, match=says):
        profile.replace(**changes)


def test_a_session_of_a_profile_reads_in_segments() -> None:
    lm = make.model("llama", max_position_embeddings=4096)
    table = {"method": "critiprefill", "segment": SEGMENT, "page": 4, "floor": 8, "fraction": 0.1, "dense_layers": 1}
    table |= {"sinks": 2, "recent": 3}
    profile = Profile.load("exact").replace(exactness="approx", sparse=table)
    session = assemble.session(lm, profile)
    assert session.find(PromptSegments) is not None
    assert not assemble.is_lossless(profile)
    assert not assemble.plan(lm, profile).batch_variant_reason, "answers may be drafted"
    whole = read(session, IDS)
    assert not torch.equal(kv(whole, 89), kv(read(make.session(lm), IDS), 89))
