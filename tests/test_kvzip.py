"""KVzip: what repeating a text looks at is what is kept, and nothing of the repetition stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.session import GenerationSession, commit
from kvcli.errors import KvcliError
from kvcli.kernels.attention_mass import attention_mass
from kvcli.methods.policies.kvzip import KVzip
from kvcli.settings.profile import load_profile
from tests import families, make

torch.set_num_threads(1)
TINY = make.model("llama", torch.float64)
N = 61


def session(lm: LM = TINY, **more: object) -> GenerationSession:
    policy = {"name": "kvzip", "piece": 25, "lead": 3, "sinks": 2, "recent": 4, **more}
    return assemble.session(lm, load_profile("exact").replace(exactness="approx", policy=policy, prefill={"chunk": 32}))


def scored(s: GenerationSession) -> dict[int, Tensor]:
    found: dict[int, Tensor] = s.policy_record.state.own.total
    return found


def test_scores_are_the_most_that_a_repeated_piece_looks_at() -> None:
    ids, s = families.prompt(N + 1), session(keep=1.0)
    run_to_end(s.read(ids))

    for start, end in ((0, 25), (25, 50), (50, N)):
        kv = make.dense(TINY)
        first = Rows.chain(ids[:N], 0)
        commit(kv, first, *run([ForwardRequest(TINY, first, kv)]), range(N))
        rows = Rows.chain(ids[max(0, start - 3) : end], N)
        (again,) = run([ForwardRequest(TINY, rows, kv, record_queries=range(rows.n_rows))])
        for layer in range(TINY.n_layers):
            there = [p for p in range(N) if p < 2 or start <= p < end]
            k = torch.cat((kv.slots(layer).k[:, there], again.fresh[layer].k), 1)
            pos = torch.cat((torch.tensor(there), where := torch.tensor(rows.pos))).expand(TINY.n_kv_heads, -1)
            every = attention_mass(again.queries[layer], where, k, pos, TINY.attention_params[layer].scale, over="none")
            want = every.amax((1, 2))[:, [i for i, p in enumerate(there) if start <= p < end and p >= 2]]
            torch.testing.assert_close(scored(s)[layer][:, max(2, start) : end], want)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])  # two that multiply what they embed, and where
def test_plus_weighs_what_a_value_adds_beside_the_stream_that_asks_for_it(family: str) -> None:
    """KVzip+ by transformers' own hidden states: max of mass x |W_o v| / |h| over queries and heads."""
    more = {"layer_types": ["full_attention"] * TINY.n_layers} if family == "gemma2" else {}
    lm = make.model(family, torch.float64, **more)
    ids, s = families.prompt(N + 1), session(lm, keep=1.0, plus=True, piece=100)
    run_to_end(s.read(ids))
    kv = make.dense(lm)
    first = Rows.chain(ids[:N], 0)
    commit(kv, first, *run([ForwardRequest(lm, first, kv)]), range(N))
    rows = Rows.chain(ids[:N], N)
    (again,) = run([ForwardRequest(lm, rows, kv, record_queries=range(N))])
    plain = families.build(family, torch.float64, **more)
    twice = torch.tensor([[*ids[:N], *ids[:N]]])
    streams = plain(twice, output_hidden_states=True).hidden_states
    for layer in range(lm.n_layers):
        weight = plain.model.layers[layer].self_attn.o_proj.weight.view(-1, lm.n_heads, lm.head_dim)
        k = torch.cat((kv.slots(layer).k, again.fresh[layer].k), 1)
        pos = torch.arange(2 * N).expand(lm.n_kv_heads, -1)
        where = torch.arange(N, 2 * N)
        mass = attention_mass(
            again.queries[layer],
            where,
            k,
            pos,
            lm.attention_params[layer].scale,
            softcap=lm.attention_params[layer].softcap,
            over="none",
        )[..., :N]
        v = kv.slots(layer).v.repeat_interleave(lm.n_heads // lm.n_kv_heads, 0)
        adds = torch.einsum("hsd,ehd->hse", v, weight).norm(dim=-1).view(*mass.shape[:2], 1, N)
        want = (mass * adds / streams[layer][0, N:].norm(dim=-1).view(-1, 1)).amax((1, 2))
        torch.testing.assert_close(scored(s)[layer], want, rtol=1e-5, atol=1e-8)  # norms are taken in fp32


def test_nothing_of_the_repetition_is_stored() -> None:
    ids, s, plain = families.prompt(N + 1), session(keep=1.0), assemble.session(TINY, load_profile("exact"))
    for each in (s, plain):
        run_to_end(each.read(ids))
        list(iterate_events(each.stream(12)))
    assert s.ids == plain.ids
    assert s.cache.slots(0).pos.tolist() == plain.cache.slots(0).pos.tolist()


def test_what_scores_highest_stays_over_all_layers_and_heads() -> None:
    s, whole = session(keep=0.4), session(keep=1.0)
    for each in (s, whole):
        run_to_end(each.read(families.prompt(N + 1)))
    kept, gone = [], []
    for layer, score in scored(whole).items():
        for j, pos in enumerate(s.cache.slots(layer).pos):
            there = set(pos[pos >= 0].tolist())
            free = range(2, N - 4)
            kept += [float(score[j, p]) for p in free if p in there]
            gone += [float(score[j, p]) for p in free if p not in there]
    assert kept
    assert min(kept) >= max(gone)


def test_a_second_prompt_repeats_only_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session(keep=0.5)
    run_to_end(s.read(families.prompt(N + 1)))
    list(iterate_events(s.stream(6)))
    seen = []
    inner = KVzip.pieces
    monkeypatch.setattr(KVzip, "pieces", lambda *args: seen.append(inner(*args)) or seen[-1])
    run_to_end(s.read(families.prompt(20, seed=4)))
    assert seen == [[(61, 86), (86, 87)]]


def test_a_text_that_leaves_no_room_behind_it_is_refused() -> None:
    short = make.model("llama", max_position_embeddings=64)
    s = session(short)
    with pytest.raises(KvcliError, match="repeats the text after itself") as refused:
        run_to_end(s.read(families.prompt(N + 1)))
    assert refused.value.code == "context_overflow"
    fits = session(short)
    run_to_end(fits.read(families.prompt(50)))
    assert KVzip(piece=25, lead=3).pieces(0, 49, 64)[0] == (0, 12), "as long as the room behind the text allows"
