"""Heads of unequal length against a plain list per head, whatever happens to them; sessions over either agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kv.slots import AttentionParams, LayerShape, Masks, Slots, Usage, alike, attend_new_only, empty_like, nbytes
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.dense_ragged import HeadExtents
from kvcli.methods.drafts.off import Off
from tests import drafters, families
from tests.policies import Ragged, Recent, masks
from tests.test_kv import allocated

torch.set_num_threads(1)
Slot = tuple[int, Tensor, Tensor]  # position, k [D], v [D]


class Listed:
    """The plainest store: for each layer and head a list of slots, as they were stored. Attends one row at a time."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype) -> None:
        self.dtype, self.dim, self.changes = dtype, shapes[0].k_dim, 0
        self.held: list[list[list[Slot]]] = [[[] for _ in range(shape.n_kv_heads)] for shape in shapes]

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Tensor, own: NewRows | None = None
    ) -> list[PartialAttention]:
        group, (h, n, _) = q.shape[0] // len(self.held[layer]), q.shape
        out, lse = torch.zeros(h, n, self.dim, dtype=self.dtype), torch.full((h, n), -torch.inf, dtype=self.dtype)
        for head in range(h):
            for row in range(n):
                at = int(pos[row])
                near = [s for s in self.held[layer][head // group] if sight.window is None or s[0] > at - sight.window]
                if near:
                    score = torch.stack([k for _, k, _ in near]) @ q[head, row] * sight.scale
                    if sight.softcap:
                        score = sight.softcap * torch.tanh(score / sight.softcap)
                    lse[head, row] = torch.logsumexp(score, 0)
                    out[head, row] = torch.softmax(score, 0) @ torch.stack([v for *_, v in near])
        return [PartialAttention(out, lse), *attend_new_only(q, sight, own)]

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        pos = torch.arange(start, start + k.shape[1]).expand(k.shape[0], -1)
        self.take(layer, Slots(k, v, pos), moved=False)

    def take(self, layer: int, slots: Slots, moved: bool = True) -> None:
        self.changes += moved
        for head, held in enumerate(self.held[layer]):
            for i, at in enumerate(slots.pos[head].tolist()):
                if at >= 0:
                    held.append((at, slots.k[head, i].to(self.dtype), slots.v[head, i].to(self.dtype)))

    def n_slots(self, layer: int) -> int:
        return max(map(len, self.held[layer]))

    def slots(self, layer: int) -> Slots:
        heads, n = self.held[layer], self.n_slots(layer)
        k = torch.zeros(len(heads), n, self.dim, dtype=self.dtype)
        v, pos = torch.zeros_like(k), torch.full((len(heads), n), -1, dtype=torch.int32)
        for head, held in enumerate(heads):
            for i, (at, key, value) in enumerate(held):
                k[head, i], v[head, i], pos[head, i] = key, value, at
        return Slots(k, v, pos)

    def newest(self, layer: int, n: int) -> Slots:
        raise NotImplementedError

    def keep(self, layer: int, mask: Tensor) -> Slots:
        before = self.slots(layer)
        for head, held in enumerate(self.held[layer]):
            self.held[layer][head] = [s for i, s in enumerate(held) if mask[head, i]]
        self.changes += 1
        return empty_like(before)

    def crop(self, n: int) -> None:
        self.held = [[[s for s in held if s[0] < n] for held in heads] for heads in self.held]
        self.changes += 1

    def reserve(self, n: int) -> None:
        return

    def reaches(self, n: int) -> bool:
        return True

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        before = sum(len(held) for heads in self.held for held in heads)
        for layer, mask in enumerate(masks):
            if mask is not None:
                self.keep(layer, mask)
        return sum(len(held) for heads in self.held for held in heads) < before

    def usage(self) -> list[Usage]:
        return []


# ---- the store by itself ----


def same(kv: Dense, plain: Listed, layer: int) -> None:
    got, want = kv.slots(layer), plain.slots(layer)
    assert got.pos.tolist() == want.pos.tolist()
    held = want.pos >= 0
    assert torch.equal(got.k[held], want.k[held])
    assert torch.equal(got.v[held], want.v[held])
    assert kv.n_slots(layer) == plain.n_slots(layer)
    assert nbytes(kv)["cpu"] == allocated(kv)


def reads_the_same(kv: Dense, plain: Listed, layer: int, q: Tensor, sight: AttentionParams, pos: Tensor) -> None:
    nothing = PartialAttention(torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype))
    got = [*kv.attend(layer, q, sight, pos.tolist()), nothing]
    (want,) = plain.attend(layer, q, sight, pos)
    torch.testing.assert_close(merge_attention([*got, nothing]), want.out, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(torch.logsumexp(torch.stack([p.lse for p in got]), 0), want.lse, atol=1e-10, rtol=1e-10)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_happens_a_store_is_a_list_per_head(data: st.DataObject) -> None:
    n_kv, group, dim, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2)), 4, 2
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kv = Dense(alike(layers, n_kv, dim), torch.float64, step=data.draw(st.sampled_from([1, 4, 64, 256])))
    plain = Listed(alike(layers, n_kv, dim), torch.float64)
    at = 0

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    for verb in data.draw(st.lists(st.sampled_from(["append", "append", "keep", "settle", "take", "crop", "reserve"]))):
        layer = data.draw(st.integers(0, layers - 1))
        if verb == "append":  # as a pass commits: the same rows in every layer
            m = data.draw(st.integers(1, 40))
            for each in range(layers):
                k, v = rand(n_kv, m, dim), rand(n_kv, m, dim)
                kv.append(each, k, v, at)
                plain.append(each, k, v, at)
            at += m
        elif verb == "keep":
            before = plain.slots(layer)
            share = torch.rand(n_kv, 1, generator=noise) if data.draw(st.booleans()) else torch.zeros(n_kv, 1)
            mask = torch.rand(before.pos.shape, generator=noise) < share
            fell = kv.keep(layer, mask)
            plain.keep(layer, mask)
            for head, pos in enumerate(fell.pos):
                assert pos[pos >= 0].tolist() == before.pos[head][~mask[head] & (before.pos[head] >= 0)].tolist()
        elif verb == "settle":
            window = data.draw(st.integers(1, 50))
            for store in (kv, plain):
                store.compress(masks(store, lambda each, s, first=at - window: (s.pos < 2) | (s.pos > first), 1))
        elif verb == "take":  # what another tier let go: any number a head, in any order, empty slots anywhere
            pos = torch.full((n_kv, 9), -1)
            for head in range(n_kv):
                n = data.draw(st.integers(0, 9))
                pos[head, torch.randperm(9, generator=noise)[:n]] = torch.arange(at + n - 1, at - 1, -1)
            k, v = rand(n_kv, 9, dim), rand(n_kv, 9, dim)
            for store in (kv, plain):
                store.take(layer, Slots(k, v, pos))
            at += 9
        elif verb == "crop":
            at = data.draw(st.integers(0, at))
            for store in (kv, plain):
                store.crop(at)
        else:
            kv.reserve(data.draw(st.integers(0, 80)))
        n = data.draw(st.sampled_from([1, 3, 70]))
        sight = AttentionParams(
            0.4, data.draw(st.sampled_from([0.0, 1.5])), data.draw(st.sampled_from([None, 1, 7, 30]))
        )
        same(kv, plain, layer)
        reads_the_same(kv, plain, layer, rand(n_kv * group, n, dim), sight, torch.arange(at, at + n))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=9), st.sampled_from([1, 16, 64, 256]), st.integers(0, 99))
def test_every_head_has_its_own_place_and_little_spare_room(lengths: list[int], step: int, least: int) -> None:
    lay = HeadExtents.of(lengths, step, least)
    places = sorted((start, start + room) for start, room in zip(lay.start, lay.room, strict=True))
    assert places[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(places))
    assert places[-1][1] == lay.total
    assert sorted(head for run in lay.runs() for head in run) == list(range(len(lengths)))
    for n, room in zip(lengths, lay.room, strict=True):
        assert max(n, least) <= room <= max(least, n + max(24, n // 21))
        assert room <= max(least, n + 1.5 * max(1, step // 4))


def test_heads_of_equal_length_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal slots in equal numbers, as most methods keep them: one product over all heads, no mask."""
    import kvcli.kv.tiers.dense_ragged as ragged

    calls: list[tuple[int, object]] = []
    attend = ragged.attend

    def noted(q: Tensor, k: Tensor, *args: Any, **more: Any) -> PartialAttention:
        calls.append((k.shape[0], more.get("mask")))
        return attend(q, k, *args, **more)

    monkeypatch.setattr(ragged, "attend", noted)
    kv = Dense(alike(1, 3, 4), torch.float64)
    kv.append(0, torch.ones(3, 60, 4), torch.ones(3, 60, 4), 0)
    kv.compress(masks(kv, lambda layer, s: (s.pos + torch.arange(3).view(-1, 1)) % 3 == 0))
    kv.attend(0, torch.ones(6, 1, 4, dtype=torch.float64), AttentionParams(1.0), [60])
    assert calls == [(3, None)]
    calls.clear()
    kv.compress(masks(kv, lambda layer, s: (s.pos < 12) | (torch.arange(3).view(-1, 1) == 1)))
    kv.attend(0, torch.ones(6, 1, 4, dtype=torch.float64), AttentionParams(1.0), [60])
    assert sorted(calls) == [(1, None), (2, None)]


def test_numbers_that_are_not_finite_go_with_their_text() -> None:
    """Spare room is read along: what was there must not come back."""
    kv = Dense(alike(1, 3, 4), torch.float64)
    ones = torch.ones(3, 60, 4, dtype=torch.float64)
    bad = ones.clone()
    bad[:, 30:] = torch.nan
    kv.append(0, bad, bad / 0, 0)
    kv.compress(masks(kv, lambda layer, s: s.pos < 10 * (1 + torch.arange(3).view(-1, 1))))
    kv.append(0, ones[:, :1], ones[:, :1] * torch.inf, 60)
    kv.crop(60)
    q = torch.ones(6, 1, 4, dtype=torch.float64)
    assert not bool(merge_attention(kv.attend(0, q, AttentionParams(1.0), [60])).isnan().any())
    for window in (45, 32):
        out = merge_attention(kv.attend(0, q, AttentionParams(1.0, 0.0, window), [60]))
        assert not bool(out.isnan().any())


# ---- a session over it ----

MODELS = {"dense": "llama", "sliding": "gemma3", "bent": "gemma2"}


@cache
def lm(name: str) -> LM:
    return LM.of(families.build(MODELS[name], torch.float64))


def text(
    name: str, kind: type[Dense] | type[Listed], drafter: Drafter, keep: object, every: int, chunk: int
) -> GenerationSession:
    model = lm(name)
    kv = kind(model.shapes, torch.float64)
    session = GenerationSession(model, kv, drafter, Sampler(), policy=keep, every=every, chunk=chunk)  # type: ignore[arg-type]
    run_to_end(session.read(families.prompt(30)))
    for _ in iterate_events(session.stream(16)):
        assert session.committed == len(session.ids) - 1
    return session


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_sessions_store_what_a_list_per_head_stores(data: st.DataObject) -> None:
    """Any accept length, compression point and chunk, over evicted, sliding and soft-capped layers."""
    name, every, chunk = (
        data.draw(st.sampled_from(list(MODELS))),
        data.draw(st.integers(1, 12)),
        data.draw(st.integers(1, 31)),
    )
    keep = data.draw(st.sampled_from([Ragged(), Ragged(recent=1), Recent(sinks=1, last=9)]))
    plain = text(name, Listed, Off(), keep, every, chunk)
    moody = data.draw(st.sampled_from([drafters.Moody, drafters.Bush]))(plain.ids, 97, -1)
    moody.random.seed(data.draw(st.integers(0, 999)))
    got = text(name, Dense, moody, keep, every, chunk)
    assert got.ids == plain.ids
    for layer in range(lm(name).n_layers):
        a, b = got.cache.slots(layer), plain.cache.slots(layer)
        assert a.pos.tolist() == b.pos.tolist()
        torch.testing.assert_close(a.k[a.pos >= 0], b.k[b.pos >= 0], atol=1e-9, rtol=1e-9)
