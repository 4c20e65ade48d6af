"""A KV cache is a list of slots per layer and head, whatever is done to it: each storage against plain tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvcli.engine.hf.lm import LM
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.slots import AttentionParams, KVCache, Slots, storing_layer_of
from kvcli.kv.snapshot import SnapshotReader, leaves, tree_of
from tests import make

GROUP = 2  # query heads of a KV head
MOST, TAKEN = 90, 9  # tokens of a text, and those that another tier demotes at once
FEW = {"num_hidden_layers": 2, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Kind:
    """What is asked of a storage."""

    family: str = "llama"
    within: float | None = 0.0  # how far a stored number may be from the given one; None = at any distance
    drops: str = "evict"  # what a mask does to a slot: "evict", "demote" out of `slots`, or both, as "draft" and "full"
    is_sparse: bool = False  # only the rows of a prompt read everything
    levels: int = 0  # > 0: masks name one of so many levels below the top
    heads_apart: bool = True  # heads may keep different slots


KINDS = {
    "dense": Kind(),
    "uneven": Kind("gemma4_shared"),
    "given": Kind("gemma3"),
    "two_dense": Kind(),
    "on_disk": Kind(),
    "demoted": Kind(drops="demote"),
    "three": Kind(within=0.02),
    "packed_8": Kind(within=0.03),
    "checked": Kind(within=1.0, drops="full"),
    "rungs": Kind(within=3.0, levels=3),
}
CORE = ("dense", "packed_8")
LONG = {
    **{name: Kind(is_sparse=True) for name in make.INDEXES},
    **{name: Kind(within=None) for name in make.FORMS},
    **{name: Kind() for name in ("short steps", "disk", "by kernel", "by stream")},
    **{name: Kind(within=0.03) for name in ("rounding", "halves", "by query", "by rule")},
    **{name: Kind(within=1.0) for name in ("turned", "packed_16_4")},
    "uneven turned": Kind("gemma4_shared", within=1.0),
    "packed_4_2": Kind(within=4.0),
    "lowered": Kind(within=0.03, drops="demote"),
    "recalled": Kind(drops="demote", is_sparse=True),
    "rungs recalled": Kind(within=3.0, levels=4, is_sparse=True),
}


@cache
def lm(family: str) -> LM:
    return make.model(family, torch.float64, **(FEW if family == "llama" else {}))


class Plain:
    """All keys and values by layer [K, N, D], and which of them are shown to policies, and which are read [K, N]."""

    def __init__(self, model: LM) -> None:
        self.n = self.fresh = 0  # tokens; those since the last compression point
        empty = [torch.empty(of.n_kv_heads, 0, 1, dtype=torch.float64) for of in model.shapes]
        self.k = [e.expand(-1, -1, of.k_dim) for e, of in zip(empty, model.shapes, strict=True)]
        self.v = [e.expand(-1, -1, of.v_dim) for e, of in zip(empty, model.shapes, strict=True)]
        self.shown, self.read = ([e[..., 0].bool() for e in empty] for _ in "ab")

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        every = torch.ones(k.shape[:2], dtype=torch.bool)
        for held, new in ((self.k, k), (self.v, v), (self.shown, every), (self.read, every)):
            held[layer] = torch.cat([held[layer], new], 1)

    def crop(self, n: int) -> None:
        self.n, self.fresh = n, max(0, self.fresh - (self.n - n))
        for held in (self.k, self.v, self.shown, self.read):
            held[:] = [t[:, :n] for t in held]

    def attend(self, layer: int, q: Tensor, params: AttentionParams, rows: list[int], own: NewRows) -> Tensor:
        head = torch.arange(q.shape[0]) // GROUP
        k, v = torch.cat([self.k[layer], own.k], 1)[head], torch.cat([self.v[layer], own.v], 1)[head]
        pos, row = torch.arange(k.shape[1]), torch.tensor(rows).unsqueeze(1)
        stored = torch.nn.functional.pad(self.read[layer], (0, len(rows)), value=True)[head].unsqueeze(1)
        seen = stored & (pos <= row) & (pos > row - (params.window or k.shape[1]))
        score = q @ k.transpose(1, 2) * params.scale
        score = params.softcap * torch.tanh(score / params.softcap) if params.softcap else score
        return torch.softmax(score.masked_fill(~seen, -torch.inf), 2) @ v


class Caches(RuleBasedStateMachine):
    """A cache beside what it should hold, and at times a copy of both."""

    name: str
    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.noise = lm(self.kind.family), torch.Generator()
        self.owners = [layer for layer, of in enumerate(self.lm.shapes) if of.shared_from is None]
        self.pasts: list[tuple[KVCache, Plain]] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise, dtype=torch.float64)

    def new(self) -> KVCache:
        if self.name == "short steps":
            return make.dense(self.lm, step=4)
        return make.cache({"uneven": "dense", "uneven turned": "turned"}.get(self.name, self.name), self.lm)

    @property
    def is_plain(self) -> bool:
        """Slots may come and go at any time."""
        return self.kind.drops == "evict" and not self.kind.levels and self.name != "given"

    @initialize(seed=st.integers(0, 999), n=st.integers(1, 40))
    def begin(self, seed: int, n: int) -> None:
        self.noise.manual_seed(seed)
        self.pasts = [(self.new(), Plain(self.lm))]
        self.append(n)

    @rule(n=st.integers(1, 24))
    def append(self, n: int) -> None:
        kv, plain = self.pasts[-1]
        n, changes = min(n, MOST - plain.n), kv.changes
        for layer in self.owners:
            of = self.lm.shapes[layer]
            k, v = self.randn(of.n_kv_heads, n, of.k_dim), self.randn(of.n_kv_heads, n, of.v_dim)
            kv.append(layer, k, v, plain.n)
            plain.append(layer, k, v)
        plain.n, plain.fresh = plain.n + n, plain.fresh + n
        assert kv.changes == changes

    @rule(share=st.sampled_from([0.0, 0.3, 0.8, 1.0]), is_alike=st.booleans(), behind=st.integers(0, 30))
    def compress(self, share: float, is_alike: bool, behind: int) -> None:
        """A compression point: heads keep such a share, or all the same slots; `behind`: to where one may go back."""
        kv, plain = self.pasts[-1]
        masks: list[Tensor | None] = [None] * self.lm.n_layers
        drops = False
        for layer in self.owners if share < 1 else ():
            s = kv.slots(layer)
            at = s.pos.clamp(min=0).long()
            draw = torch.rand(at.shape[0], MOST, generator=self.noise, dtype=torch.float64)
            draw = (draw[:1] if is_alike or not self.kind.heads_apart else draw).expand_as(draw)
            stays, mask = draw < share, (draw < share).gather(1, at)
            if self.kind.levels:  # each slot stays, goes to any lower level, or is evicted
                here = torch.cat([torch.full((at.shape[0], span.n), span.level) for span in s.levels], 1)
                to = ((draw * (self.kind.levels + 4)).long() - 2).clamp(min=0)
                mask = torch.maximum(here, to.gather(1, at))
                drops |= bool(((mask > here) & (s.pos >= 0)).any())
                mask, stays = mask.to(torch.int8), to <= self.kind.levels
            masks[layer] = mask
            drops |= bool((plain.shown[layer] & ~stays[:, : plain.n]).any())
            plain.shown[layer] = plain.shown[layer] & stays[:, : plain.n]
            if self.kind.drops == "evict":
                plain.read[layer] = plain.shown[layer]
        changes, plain.fresh = kv.changes, 0
        assert kv.compress(masks if share < 1 else (), max(0, plain.n - behind)) == drops
        assert not drops or kv.changes > changes

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        kv, plain = self.pasts[-1]
        n = int(share * plain.n)
        n = n if kv.reaches(n) else 0
        kv.crop(n)
        plain.crop(n)

    @rule(n=st.integers(0, 120))
    def reserve(self, n: int) -> None:
        self.pasts[-1][0].reserve(n)

    @rule()
    def save_and_restore(self) -> None:
        kv, plain = self.pasts[-1]
        given = {name: leaf.clone() if isinstance(leaf, Tensor) else leaf for name, leaf in leaves(kv.snapshot())}
        restored = self.new()
        restored.restore(SnapshotReader(tree_of(given), plain.n))
        self.pasts[-1] = restored, plain

    @rule()
    def fork(self) -> None:
        self.pasts = [self.pasts[-1], copy.deepcopy(self.pasts[-1])]

    @precondition(lambda self: len(self.pasts) > 1)
    @rule()
    def go_on_with_the_other(self) -> None:
        self.pasts.reverse()

    @precondition(lambda self: self.is_plain)
    @rule()
    def move(self) -> None:
        """Into another cache."""
        kv, plain = self.pasts[-1]
        other, plain.fresh = self.new(), 0
        for layer in self.owners:
            other.take(layer, kv.slots(layer))
        self.pasts[-1] = other, plain

    @precondition(lambda self: self.is_plain and self.pasts[-1][1].n + TAKEN <= MOST)
    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        """What another tier demotes: any number of slots by head, in any order, with empty ones among them."""
        kv, plain = self.pasts[-1]
        for layer in self.owners:
            of = self.lm.shapes[layer]
            k, v = self.randn(of.n_kv_heads, TAKEN, of.k_dim), self.randn(of.n_kv_heads, TAKEN, of.v_dim)
            there = torch.rand(of.n_kv_heads, TAKEN, generator=self.noise) < share
            there = there if self.kind.heads_apart else there[:1].expand_as(there)
            order = torch.randperm(TAKEN, generator=self.noise)
            pos = torch.where(there, torch.arange(plain.n, plain.n + TAKEN), -1)[:, order]
            kv.take(layer, Slots(k[:, order], v[:, order], pos))
            plain.append(layer, k, v)
            for marks in (plain.shown, plain.read):
                marks[layer][:, plain.n :] = there
        plain.n, plain.fresh = plain.n + TAKEN, 0

    @precondition(lambda self: self.is_plain)
    @rule(share=st.floats(0, 1), is_alike=st.booleans())
    def keep(self, share: float, is_alike: bool) -> None:
        """As between two compression points; what is evicted comes back."""
        kv, plain = self.pasts[-1]
        plain.fresh = 0
        for layer in self.owners:
            pos, stays = kv.slots(layer).pos, torch.rand(*plain.shown[layer].shape, generator=self.noise) < share
            stays = (stays[:1] if is_alike or not self.kind.heads_apart else stays).expand_as(stays)
            mask = stays.gather(1, pos.clamp(min=0).long()) if plain.n else pos >= 0
            for fell, gone in zip(kv.evict_except(layer, mask).pos, plain.shown[layer] & ~stays, strict=True):
                assert sorted(fell[fell >= 0].tolist()) == gone.nonzero().flatten().tolist()
            plain.shown[layer] = plain.read[layer] = plain.shown[layer] & stays

    @invariant()
    def holds_each_slot_once(self) -> None:
        for kv, plain in self.pasts:
            held = dict.fromkeys(self.owners, 0)
            for use in kv.usage():
                held[use.layer] += use.slots if use.tier != "index" else 0
            for layer in self.owners:
                s, window = kv.slots(layer), self.lm.attention_params[layer].window if self.name == "given" else None
                assert s.n_slots == kv.n_slots(layer)
                assert s.n_slots == held[layer] or self.kind.drops != "evict" or self.kind.within != 0
                assert held[layer] >= int(plain.read[layer].sum(1).max()) or window
                first = max(0, plain.n - window + 1) if window else 0  # no row sees older ones
                for head, pos in enumerate(s.pos):
                    at = pos[pos >= 0].long()
                    want = plain.shown[layer][head].nonzero().flatten().tolist()
                    assert [p for p in sorted(at.tolist()) if p >= first] == [p for p in want if p >= first]
                    for got, given in ((s.k, plain.k), (s.v, plain.v)):
                        far = (got[head, : len(pos)][pos >= 0] - given[layer][head, at]).abs()
                        assert self.kind.within is None or not len(at) or float(far.max()) <= self.kind.within
                for pos in kv.newest(layer, plain.fresh).pos:
                    assert sorted(pos[pos >= 0].tolist()) == list(range(plain.n - plain.fresh, plain.n))

    @invariant()
    def reads_what_it_holds(self) -> None:
        """Attention is that over the given numbers, or where they were rounded over those that are shown."""
        for kv, plain in self.pasts:
            for layer, source in enumerate(storing_layer_of(self.lm.shapes)):
                of, rows = self.lm.shapes[layer], [plain.n, plain.n + 1, plain.n + 2]
                q = self.randn(of.n_kv_heads * GROUP, 3, of.k_dim)
                new = self.randn(of.n_kv_heads, 3, of.k_dim), self.randn(of.n_kv_heads, 3, of.v_dim)
                own, usual = (
                    NewRows(*new, rows, None, torch.ones(3, 3, dtype=torch.bool).tril()),
                    self.lm.attention_params[layer],
                )
                given = self.shown(kv, plain, source)
                within = 2 * (self.kind.within or 0.0) if self.kind.drops == "demote" else 1e-6
                for sight in (usual, AttentionParams(0.3, 1.5, usual.window or 20)):
                    sight = replace(sight, is_prompt=self.kind.is_sparse)
                    got = merge_attention(kv.attend(layer, q, sight, rows, own))
                    want = given.attend(source, q, sight, rows, own)
                    torch.testing.assert_close(got, want, rtol=0, atol=max(1e-6, within))

    def shown(self, kv: KVCache, plain: Plain, layer: int) -> Plain:
        if self.kind.drops != "evict" or self.kind.within == 0:
            return plain
        found, s = copy.deepcopy(plain), kv.slots(layer)
        for head, pos in enumerate(s.pos):
            found.k[layer][head, pos[pos >= 0].long()] = s.k[head][pos >= 0]
            found.v[layer][head, pos[pos >= 0].long()] = s.v[head][pos >= 0]
        return found


def holds(of_name: str, of_kind: Kind, n: int, steps: int) -> None:
    class Named(Caches):
        name, kind = of_name, of_kind

    usual = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Named, settings=settings(usual, max_examples=n, stateful_step_count=steps))


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.core] * (k in CORE)) for k in KINDS])
def test_a_cache_is_a_list_of_slots_per_head(name: str) -> None:
    holds(name, KINDS[name], 12, 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS | LONG)
def test_a_cache_is_a_list_of_slots_per_head_at_length(name: str) -> None:
    holds(name, (KINDS | LONG)[name], 60, 40)
