"""`lazy-paper` is LazyLLM as published: beside a plain form of the paper's rule, which shares no code with it."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.methods.prune.aux_cache import AuxCache
from kvcli.methods.prune.lazy import LazyLLM
from kvcli.settings.profile import Profile
from tests import drafters, families, make

torch.set_num_threads(1)
N, LAYERS, STEPS = 45, 10, 12


@cache
def lm(name: str = "llama") -> LM:
    more = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)} if name == "gemma3" else {}
    return make.model(name, torch.float64, num_hidden_layers=LAYERS, **more)


def paper(**changes: object) -> LazyLLM:
    """The profile's own settings."""
    profile = Profile.load("lazy-paper")
    return profile.replace(prune={"method": "lazy", **vars(profile.prune.settings), **changes}).prune.settings


def session(model: LM, pruning: LazyLLM, **more: object) -> GenerationSession:
    return make.session(model, chunk=16, pruning=pruning, **more)


def read(s: GenerationSession, ids: list[int]) -> GenerationSession:
    s.start_answer(ids, Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass
    return s


class Paper:
    """LazyLLM by the paper's text: every pass prunes progressively from all tokens, by the attention of its newest one
    in the layer below; a pruned token's hidden state waits, and is taken up where it is chosen again."""

    def __init__(self, model: LM, cuts: dict[int, float]) -> None:
        self.model, self.cuts, self.n = model.model, cuts, 0
        self.depth: dict[int, int] = {}
        self.waiting: dict[int, Tensor] = {}  # position -> input of layer `depth`
        self.kv: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(LAYERS)]
        self.revived = self.rested = 0

    @torch.no_grad()
    def run(self, ids: list[int]) -> Tensor:
        inner, c = self.model.model, self.model.config
        carried = list(range(self.n, self.n + len(ids)))
        self.n += len(ids)
        active, newest, mass = list(range(self.n)), self.n - 1, torch.empty(0)
        h = dict(zip(carried, inner.embed_tokens(torch.tensor(ids)), strict=True))
        for i, layer in enumerate(inner.layers):
            if i in self.cuts:
                best = mass.argsort(descending=True)[: math.ceil(self.cuts[i] * self.n)].tolist()
                chosen = {active[j] for j in best} | {newest}
                self.waiting |= {p: h[p] for p in carried if p not in chosen}
                active = sorted(chosen)
                back = [p for p in active if p in self.waiting and self.depth[p] == i]
                self.revived += len(back)
                self.rested += sum(p not in chosen for p in self.kv[i])
                h |= {p: self.waiting.pop(p) for p in back}
                carried = sorted({*(p for p in carried if p in chosen), *back})
            x, at = torch.stack([h[p] for p in carried]), layer.self_attn
            normed = layer.input_layernorm(x)
            q, k, v = (
                f(normed).unflatten(-1, (-1, at.head_dim)).transpose(0, 1) for f in (at.q_proj, at.k_proj, at.v_proj)
            )
            cos, sin = inner.rotary_emb(x, torch.tensor([carried]))
            q, k = (t[0] for t in apply_rotary_pos_emb(q[None], k[None], cos, sin))
            self.kv[i] |= {p: (k[:, j], v[:, j]) for j, p in enumerate(carried)}
            self.depth |= dict.fromkeys(carried, i + 1)
            keys, values = (torch.stack([self.kv[i][p][j] for p in active], 1) for j in (0, 1))
            heads = c.num_attention_heads // c.num_key_value_heads
            scores = q @ keys.repeat_interleave(heads, 0).transpose(1, 2) * at.scaling
            hidden = torch.tensor(active) > torch.tensor(carried).view(-1, 1)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            mass = shares[:, -1].mean(0)
            x = x + at.o_proj((shares @ values.repeat_interleave(heads, 0)).transpose(0, 1).flatten(1))
            normed, mlp = layer.post_attention_layernorm(x), layer.mlp
            x = x + mlp.down_proj(silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
            h |= dict(zip(carried, x, strict=True))
        return self.model.lm_head(inner.norm(h[newest]))


@pytest.mark.parametrize("seed", range(6))
def test_it_writes_what_the_papers_rule_writes(seed: int) -> None:
    ids = families.prompt(N, seed=seed)
    s = read(session(lm(), paper()), ids)
    cuts = {3: 0.7, 6: 0.4, 9: 0.1}  # its figure 4, of ten layers
    assert {layer: round(share, 9) for layer, share in paper().cuts(lm()).items()} == cuts
    plain = Paper(lm(), cuts)
    plain.run(ids[:-1])
    for _ in range(STEPS):
        logits = plain.run(s.ids[-1:])
        torch.testing.assert_close(run_to_end(s.step()).logits[0], logits, rtol=0, atol=1e-9)
    assert plain.revived > STEPS
    assert plain.rested > STEPS
    run_to_end(
        s.complete()
    )  # what rests is there again: every token has its layers, those that the paper's has or more
    aux = s.find(AuxCache)
    assert aux is not None
    for layer in range(LAYERS):
        held = sorted(s.cache.slots(layer).pos[0].tolist())
        assert held == [p for p in range(s.committed) if layer < aux.depth.get(p, LAYERS)]
        assert {*plain.kv[layer]} - {plain.n - 1} <= {*held}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_layer_has_what_is_selected_and_nothing_is_lost(name: str) -> None:
    ids = families.prompt(N)
    s = read(session(lm(name), paper()), ids)
    for _ in range(STEPS):
        run_to_end(s.step())
        held = [{*s.cache.slots(layer).pos[0].tolist()} for layer in range(LAYERS)]
        for layer, share in paper().cuts(lm(name)).items():
            assert len(held[layer]) <= math.ceil(share * (s.committed + 1))
            assert held[layer] <= held[layer - 1]
    run_to_end(s.find(AuxCache).revive_all(s.cache, s.ids))  # type: ignore[union-attr]
    for layer in range(LAYERS):
        assert sorted(s.cache.slots(layer).pos[0].tolist()) == list(range(s.committed))


def test_it_goes_on_from_a_snapshot_and_a_fork() -> None:
    ids = families.prompt(N)
    s = read(session(lm(), paper()), ids)
    list(iterate_events(s.stream(5)))
    fork, other = s.fork(), session(lm(), paper())
    other.restore(s.state(), s.ids[-1])
    for each in (s, fork, other):
        list(iterate_events(each.stream(10)))
    assert s.ids == fork.ids == other.ids
    assert any(use.tier == "deferred" and use.slots for use in s.find(AuxCache).usage())  # type: ignore[union-attr]


@pytest.mark.parametrize("drafter", drafters.ADVERSARIES)
def test_drafts_change_nothing_where_it_selects_less_often(drafter: type) -> None:
    found = []
    for guesses in (None, drafter):
        s = session(lm(), paper(revive_interval=4), drafter=guesses and guesses(found[0].ids, 97, 96))
        read(s, families.prompt(N))
        list(iterate_events(s.stream(30)))
        found.append(s)
    assert found[0].ids == found[1].ids
    for layer in range(LAYERS):
        assert torch.equal(*(s.cache.slots(layer).pos for s in found))


def test_a_pass_that_breaks_midway_ends_in_a_text_that_is_read_anew() -> None:
    """Layers would have what different tokens selected."""
    s = read(session(lm(), paper()), families.prompt(N))
    evict, calls = s.cache.evict_except, []

    def broken(layer: int, mask: Tensor) -> object:
        calls.append(layer)
        if len(calls) == 3:
            raise MemoryError
        return evict(layer, mask)

    s.cache.evict_except = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError):
        run_to_end(s.step())
    assert s.rewind(len(s.ids)) == 0
    assert not any(s.cache.n_slots(layer) for layer in range(LAYERS))
