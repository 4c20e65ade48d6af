"""What the probes measure, held against whole attention maps and against the model's own."""

from __future__ import annotations

import pytest
import torch

from kvcli import load
from kvcli.chat.transcript import kinds_by_id
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.policy.policy import LayerContext
from kvcli.engine.sequence.state import END, NEWLINE, PUNCT, SPECIAL
from kvcli.heads.ablate import ablate, answers, open_past, right
from kvcli.heads.attention import FAR, SHARES, gaze, normaliser
from kvcli.heads.needle import OFFSETS, needle
from kvcli.heads.query_probe import QueryProbe, whole
from kvcli.heads.reason import TASK, reason, score, sentence
from kvcli.heads.repeat import ROWS, repeat, twice
from kvcli.heads.restricted_heads import HeadWindow, RestrictedHeads
from kvcli.heads.sample import samples
from kvcli.kernels.attend.reference import attend
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.slots import AttentionParams, Slots
from kvcli.models.text import decode
from tests import make

K, G, D, S = 2, 3, 8, 41


@pytest.fixture(scope="module")
def model():
    return load("demo", "exact", {"load.dtype": "fp32", "load.verify": False})


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment(rows, softcap=0.0, window=None, seed=1):
    kinds = torch.tensor([0, SPECIAL, PUNCT, END, NEWLINE, 0, 0])[torch.arange(S) % 7].to(torch.int8)
    q, pos = 3 * drawn(K * G, len(rows), D, seed=seed), torch.tensor(rows)
    nothing = torch.zeros(K, S, dtype=torch.bool)
    return LayerContext(0, 1, "read", S, S, q, pos, kinds, nothing, D**-0.5, softcap, window)


def slots(seed=0):
    """In no order: positions say where a slot belongs."""
    order = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(seed + j)) for j in range(K)])
    return Slots(drawn(K, S, D, seed=seed), drawn(K, S, D, seed=seed + 9), order.int())


def naive(s, at, head):
    """[G, w, S] the whole map."""
    score = torch.einsum("gwd,sd->gws", at.q[head * G : (head + 1) * G], s.k[head]) * at.scale
    if at.softcap:
        score = at.softcap * torch.tanh(score / at.softcap)
    far = at.q_pos.unsqueeze(1) - s.pos[head]
    hidden = (far < 0) | (s.pos[head] < 0)
    if at.window is not None:
        hidden |= far >= at.window
    return score.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("most", [1, 5_000, 1 << 26])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (1.5, None), (0.0, 17)])
def test_a_gaze_is_that_of_the_whole_map_in_any_pieces(most, softcap, window):
    s, at = slots(), moment([5, 19, 20, 33, 40], softcap, window)
    for head in range(K):
        p, found = naive(s, at, head), gaze(s, at, head, sinks=2, recent=6, most=most)
        far, first = at.q_pos.unsqueeze(1) - s.pos[head], s.pos[head] < 2
        near = (far < 6) & ~first
        assert found.entropy == pytest.approx(float(-(p * p.clamp_min(1e-30).log()).sum(-1).mean()), abs=1e-5)
        assert found.sink == pytest.approx(float(p[..., first].sum(-1).mean()), abs=1e-6)
        assert found.local == pytest.approx(float((p * near).sum(-1).mean()), abs=1e-6)
        beyond = (p * ~(near | first)).sum(-1)
        assert found.far == pytest.approx(float(beyond.mean()), abs=1e-6)
        assert found.worst == pytest.approx(float(beyond.mean(0).max()), abs=1e-6)  # a tenth of five rows is one
        for share, needed in zip(SHARES, found.needed, strict=True):
            rows = [
                next(n for n in range(1, S + 1) if row.topk(n).values.sum() >= share - 1e-6) for row in p.flatten(0, 1)
            ]
            assert needed == pytest.approx(sum(rows) / len(rows), abs=0.21)  # sums of floats end a token apart
        bins = [0 if d == 0 else int(d).bit_length() for d in far.clamp(min=0).flatten()]
        hist = torch.zeros(FAR).index_add_(0, torch.tensor(bins), p.mean(0).flatten() / p.shape[1])
        assert found.distances == pytest.approx(hist.tolist()[: len(found.distances)], abs=1e-6)
        assert sum(found.distances) == pytest.approx(1, abs=1e-5)
        kinds = at.kinds[s.pos[head].long()]
        punct = ((kinds == PUNCT) | (kinds == END)) & ~first
        assert found.kinds["punct"] == pytest.approx(float(p[..., punct].sum(-1).mean()), abs=1e-6)
        best = p.mean((0, 1)).argmax()
        assert found.top[0][0] == int(s.pos[head][best])


def test_the_normaliser_is_that_of_the_whole_row():
    s, at = slots(), moment([7, 30])
    score = torch.einsum("gwd,sd->gws", at.q[:G], s.k[0]) * at.scale
    score = score.masked_fill(s.pos[0] > at.q_pos.unsqueeze(1), -torch.inf)
    for most in (1, 1 << 26):
        torch.testing.assert_close(normaliser(s, at, 0, most), score.logsumexp(-1))


@pytest.mark.parametrize(
    "sight", [AttentionParams(0.3), AttentionParams(0.3, softcap=2.0), AttentionParams(0.3, window=13)]
)
def test_a_head_in_blinkers_sees_first_and_newest_tokens_only(sight):
    store, reach = make.dense((2, K, D), torch.float32), HeadWindow(sinks=2, recent=7)
    k, v, pos = drawn(K, S, D), drawn(K, S, D, seed=2), torch.arange(S)
    for layer in range(2):
        store.append(layer, k, v, 0)
    blind = torch.tensor([[False, False], [False, True]])
    q, rows = drawn(K * G, 3, D, seed=3), torch.tensor([S, S + 1, S + 4])
    in_window = torch.ones(3, S, dtype=torch.bool)
    if sight.window is not None:
        in_window = pos > (rows - sight.window).unsqueeze(1)
    near = (pos < 2) | (pos > (rows - 7).unsqueeze(1))
    for layer, shown in ((0, in_window.expand(K, -1, -1)), (1, torch.stack([in_window, in_window & near]))):
        out = merge_attention(RestrictedHeads(store, blind, reach).attend(layer, q, sight, rows))
        want, _ = attend(q, k, v, sight.scale, sight.softcap, shown, S)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_the_probe_records_the_rows_asked_for_and_keeps_everything():
    heard = []
    policy = QueryProbe(lambda n: [n // 2, n - 1], lambda s, at: heard.append(at.phase))
    assert policy.requirements(None).probes(40) == [20, 39]
    s, at = slots(), moment([5])
    assert bool(policy.mask(s, at).all())
    assert heard == ["read"]


def test_samples_know_where_their_values_stand(model):
    made = list(samples(model, 2, 300, seed=3))
    assert [len(sample.asked) > 0 for sample in made] == [True, True]
    for sample in made:
        for one in sample.asked:
            value = [one.ids[i] for i in one.value]
            assert sample.context[one.needle : one.needle + len(value)] == value
            assert len(value) >= 5  # five digits
        rows = sample.rows()
        for (row, token), target in zip(sample.scored(), sample.targets(), strict=True):
            assert sample.context[target] == token
            at = rows.pos[row]
            assert at >= len(sample.context) - 1
            assert rows.ids[row] == sample.context[-1] or at > len(sample.context) - 1


def test_all_questions_in_one_pass_are_as_each_alone(model):
    (sample,) = samples(model, 1, 200, seed=0)
    session = open_past(model, sample)
    together = answers(session, sample)
    alone = []
    for one in sample.asked:
        rows = Rows.chain([session.ids[-1], *one.ids[:-1]], session.committed)
        want = list(one.value)  # the row in front of each
        (made,) = run([ForwardRequest(model.lm, rows, session.cache, want=want)])
        alone.append(torch.log_softmax(made.logits.float(), -1))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-3, rtol=1e-3)
    assert right(together, sample) == len(sample.asked)


def test_ablation_leaves_the_kv_cache_whole_and_finds_the_layer_that_retrieves(model):
    (sample,) = samples(model, 1, 300, seed=1)
    session = open_past(model, sample)
    before = [session.cache.slots(layer).pos.clone() for layer in range(6)]
    heads, passes = [(layer, head) for layer in range(6) for head in range(2)], []
    loss = ablate(session, sample, heads, HeadWindow(4, 32), passes.append)
    assert len(passes) == 12
    assert all(torch.equal(a, session.cache.slots(i).pos) for i, a in enumerate(before))
    assert {heads[i] for i in loss.topk(2).indices.tolist()} == {(2, 0), (2, 1)}
    assert float(loss.sort().values[-2]) > 10 * float(loss.sort().values[-3])


def eager_maps(model, ids):
    """[L, H, n, n] the attention of transformers' own code."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model.info.path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.stack([a[0] for a in stock(torch.tensor([ids]), output_attentions=True).attentions])


def test_needle_weights_are_the_models_own(model):
    (sample,) = samples(model, 1, 150, seed=0)
    found = needle(open_past(model, sample), sample)
    want = torch.zeros_like(found)
    n = 0
    for one in sample.asked:  # each question alone behind the text: branches do not see each other
        maps = eager_maps(model, sample.context + one.ids)
        for i, j in enumerate(one.value):
            row = len(sample.context) + j - 1
            for o, offset in enumerate(OFFSETS):
                at = one.needle + i + offset
                if at < len(sample.context) - 1:  # what is not stored yet belongs to the question
                    want[:, :, o] += maps[:, :, row, at]
            n += 1
    torch.testing.assert_close(found, want / n, atol=1e-4, rtol=1e-3)


def test_reasoning_heads_are_those_whose_highest_weights_fall_on_the_fact(model):
    """HeadKV-R2, by transformers' own maps: 10 x what of a row's top n falls on the n tokens of a fact, by n x rows."""
    kinds = torch.frombuffer(bytearray(kinds_by_id(model.tokenizer, model.lm.vocab)), dtype=torch.int8)
    (sample,) = samples(model, 1, 200, seed=0, task=TASK)
    (one,) = sample.asked
    at = sentence(sample, kinds)
    text = decode(model.tokenizer, sample.context[at.start : at.stop])
    assert "access code of depot" in text
    assert text.count(".") == 1
    found = score(open_past(model, sample), sample, at)
    maps = eager_maps(model, sample.context + one.ids)
    want = torch.zeros_like(found)
    for j in one.value:
        row = maps[:, :, len(sample.context) + j - 1]
        best, where = row.topk(len(at), dim=-1)
        want += 10 * (best * ((where >= at.start) & (where < at.stop))).sum(-1)
    torch.testing.assert_close(found, want / (len(at) * len(one.value)), atol=1e-4, rtol=1e-3)
    mean, n = reason(model, [sample], kinds, lambda passes: None)
    assert n in (0, 1)
    torch.testing.assert_close(mean, n * found.double())


def test_induction_is_the_models_own_and_shows_in_the_layer_that_retrieves(model):
    found = repeat(model, 66, seed=0)
    half = 32
    ids, start = twice(model, half, 0)
    maps = eager_maps(model, ids[:-1])
    rows = sorted({start + half + i * (half - 1) // ROWS for i in range(ROWS)})
    want = torch.stack([maps[:, :, row, row - half + 1] for row in rows]).mean(0)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-3)
    assert ids[start : start + half] == ids[start + half : start + 2 * half]
    assert divmod(int(found.argmax()), 4)[0] == 2


def test_whole_drops_the_profiles_policy():
    lean = load("demo", "streaming", {"load.verify": False})
    assert whole(lean).policy is None
