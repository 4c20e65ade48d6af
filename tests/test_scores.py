"""Scores of slots: each that of its paper's formula, written as loops over ragged, shuffled slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.kv.slots import Slots
from kvcli.methods.policies.curdkv import CurDKV
from kvcli.methods.policies.expected_attention import Expected, expected
from kvcli.methods.policies.h2o import H2O, add_recorded
from kvcli.methods.policies.keydiff import KeyDiff
from kvcli.methods.policies.knorm import KNorm
from kvcli.methods.policies.lagkv import Lag
from kvcli.methods.policies.snapkv import Snap
from kvcli.methods.policies.tova import Tova
from kvcli.methods.policies.vatp import Vatp
from kvcli.policies.scoring import token_units
from kvcli.policies.scoring.running_scores import RunningScores
from kvcli.policies.scoring.topk import ScoreState
from tests.policies import moment

K, G, D, N = 3, 2, 8, 23
NO_MODEL: Any = None


def ragged(seed: int = 0) -> Slots:
    """Head j holds N - 2 j of N + 5 positions, in any order; the rest is empty."""
    r = torch.Generator().manual_seed(seed)
    pos = torch.full((K, N), -1)
    for j in range(K):
        held = torch.randperm(N + 5, generator=r)[: N - 2 * j]
        pos[j, torch.randperm(N, generator=r)[: N - 2 * j]] = held
    k, v = (torch.randn(K, N, D, generator=r, dtype=torch.float64) for _ in "kv")
    return Slots(k, v, pos)


def queries(w: int, seed: int = 1) -> Tensor:
    return torch.randn(K * G, w, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(s: Slots, j: int) -> dict[int, int]:
    """Position -> slot of head j, in the order of the text."""
    return dict(sorted((p, i) for i, p in enumerate(s.pos[j].tolist()) if p >= 0))


def same(got: Tensor, s: Slots, want: Callable[[int], dict[int, float]]) -> None:
    """Each head's scores by position."""
    for j in range(K):
        found = {p: float(got[j, i]) for p, i in of(s, j).items()}
        expected = want(j)
        assert found.keys() == expected.keys()
        for p in found:
            assert math.isclose(found[p], expected[p], rel_tol=1e-9, abs_tol=1e-12), (j, p)


def attention(s: Slots, q: Tensor, q_pos: Tensor, j: int, scale: float) -> dict[int, float]:
    """Mean mass by position over rows and the heads of group j."""
    total = dict.fromkeys(of(s, j), 0.0)
    for h in range(j * G, (j + 1) * G):
        for row, at in enumerate(q_pos.tolist()):
            seen = {p: math.exp(float(q[h, row] @ s.k[j, i]) * scale) for p, i in of(s, j).items() if p <= at}
            for p, weight in seen.items():
                total[p] += weight / sum(seen.values()) / (G * len(q_pos))
    return total


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("width", [1, 5])
def test_snap_is_the_smoothed_attention_of_the_newest_queries(kind: token_units.Pooling, width: int) -> None:
    s, q = ragged(), queries(4)
    at = moment(s, q)

    def want(j: int) -> dict[int, float]:
        one = attention(s, q, at.q_pos, j, at.scale)
        near = {p: [v for o, v in one.items() if abs(o - p) <= width // 2] for p in one}
        return {p: max(v) if kind == "max" else sum(v) / len(v) for p, v in near.items()}

    same(Snap(queries=4, pool=width, pooling=kind).score(s, at), s, want)


def test_tova_is_the_attention_of_the_last_query_over_all_heads() -> None:
    s, q = ragged(), queries(1)
    at = moment(s, q)
    by_head = [attention(s, q, at.q_pos, j, at.scale) for j in range(K)]

    def want(j: int) -> dict[int, float]:
        held = {p: [one[p] for one in by_head if p in one] for p in of(s, j)}
        return {p: sum(v) / len(v) for p, v in held.items()}

    same(Tova().score(s, at), s, want)


def test_vatp_is_attention_times_the_l1_norm_of_the_value() -> None:
    s, q = ragged(), queries(7)
    at = moment(s, q)

    def want(j: int) -> dict[int, float]:
        one = attention(s, q, at.q_pos, j, at.scale)
        return {p: one[p] * sum(abs(x) for x in s.v[j, i].tolist()) for p, i in of(s, j).items()}

    same(Vatp().score(s, at), s, want)


def test_knorm_prefers_short_keys() -> None:
    s = ragged()
    same(KNorm().score(s, moment(s)), s, lambda j: {p: -float(s.k[j, i].norm()) for p, i in of(s, j).items()})


def test_keydiff_prefers_keys_unlike_the_mean_direction() -> None:
    s = ragged()

    def want(j: int) -> dict[int, float]:
        way = {p: s.k[j, i] / s.k[j, i].norm() for p, i in of(s, j).items()}
        anchor = torch.stack(list(way.values())).mean(0)
        return {p: -float(one @ anchor / anchor.norm()) for p, one in way.items()}

    same(KeyDiff().score(s, moment(s)), s, want)


@pytest.mark.parametrize("part", [1, 4, 16, 99])
def test_curdkv_compares_lengths_among_neighbours(part: int) -> None:
    s = ragged()

    def want(j: int) -> dict[int, float]:
        held, out = list(of(s, j).items()), {}
        for first in range(0, len(held), part):
            near = held[first : first + part]
            whole = [sum(float(x[j, i].square().sum()) for _, i in near) for x in (s.k, s.v)]
            shares = {
                p: [float(x[j, i].square().sum()) / n for x, n in zip((s.k, s.v), whole, strict=True)] for p, i in near
            }
            out |= {p: math.prod(each) for p, each in shares.items()}
        return out

    same(CurDKV(part=part).score(s, moment(s)), s, want)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("sinks", "size"), [(0, 3), (2, 5), (4, 10), (2, 30), (60, 4)])
def test_lag_measures_a_part_in_the_range_of_the_next(sinks: int, size: int, across: bool) -> None:
    s = ragged()

    def want(j: int) -> dict[int, float]:
        held = list(of(s, j).items())
        body = held[sinks:]
        parts = [body[a : a + size] for a in range(0, len(body) // size * size, size)]
        out = dict.fromkeys((p for p, _ in held), 1.0)
        for part, behind in pairwise(parts):
            spread = torch.zeros(size, dtype=torch.float64)
            for x in (s.k, s.v):
                ref = torch.stack([x[j, i] for _, i in behind])
                low, high = ref.min(0).values, ref.max(0).values
                one = torch.stack([((x[j, i] - low) / (high - low)).std() for _, i in part])
                spread += torch.softmax(one, 0) / 2
            ranks = spread.argsort().argsort().double() / size
            for n, (p, _) in enumerate(part):
                out[p] = float(spread[n] if across else ranks[n])
        return out

    same(Lag(sinks=sinks, part=size, across=across).score(s, moment(s)), s, want)


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_expected_integrates_over_normal_queries(covariance: bool, softcap: float) -> None:
    s, r = ragged(), torch.Generator().manual_seed(4)
    mean = torch.randn(K * G, D, generator=r, dtype=torch.float64)
    root = torch.randn(K * G, D, D, generator=r, dtype=torch.float64) / 3
    cov = root @ root.transpose(1, 2)
    scale, epsilon = 0.6, 0.01

    def want(j: int) -> dict[int, float]:
        share = dict.fromkeys(of(s, j), 0.0)
        for h in range(j * G, (j + 1) * G):
            z = {}
            for p, i in of(s, j).items():
                k = s.k[j, i] * scale
                exponent = float(mean[h] @ k) + (float(k @ cov[h] @ k) / 2 if covariance else 0.0)
                z[p] = math.exp(softcap * math.tanh(exponent / softcap) if softcap else exponent)
            for p in z:
                share[p] += z[p] / sum(z.values()) / G
        return {p: (share[p] + epsilon) * float(s.v[j, i].norm()) for p, i in of(s, j).items()}

    same(expected(s, mean, cov if covariance else None, scale, softcap, epsilon), s, want)


@pytest.mark.parametrize(("heard", "counts"), [(64, True), (63, False)])
def test_expected_takes_recorded_queries_if_there_are_some(heard: int, counts: bool) -> None:
    """64 of 256 will do: what else was heard, as of a chunk's end, says more of one place than of the text."""
    s, how, n = ragged(), Expected(sinks=0), 5120
    memory = ScoreState(known=[None])
    probes = torch.tensor(list(how.probes(n))[:heard])
    others = torch.tensor([p for p in range(n) if p not in set(how.probes(n))][:200])
    q_pos, order = torch.cat([probes, others]).sort()
    q = queries(len(q_pos))
    is_probe = order < heard
    got = how.score(s, moment(s, q, q_pos=q_pos, n=n, n_prompt=n, policy_state=memory))
    alone = how.score(s, moment(s, q[:, is_probe], q_pos=q_pos[is_probe], n=n, n_prompt=0, policy_state=memory))
    every = how.score(s, moment(s, q, q_pos=q_pos, n=n, n_prompt=0, policy_state=memory))
    assert not torch.allclose(alone, every)
    torch.testing.assert_close(got, alone if counts else every)


def test_heavy_hitters_add_up_over_compression_points_and_count_each_query_once() -> None:
    s, q = ragged(), queries(9)
    sums = RunningScores(NO_MODEL)
    memory = ScoreState(own=sums)
    at = moment(s, q, policy_state=memory)
    early = moment(s, q[:, :5], q_pos=at.q_pos[:5], policy_state=memory)
    late = moment(s, q[:, 3:], q_pos=at.q_pos[3:], policy_state=memory)
    for one in (early, early, late, late):
        add_recorded(sums, s, one)

    same(H2O().score(s, late), s, lambda j: {p: v * 9 for p, v in attention(s, q, at.q_pos, j, at.scale).items()})
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    moved = Slots(s.k[:, order], s.v[:, order], s.pos[:, order])
    torch.testing.assert_close(H2O().score(moved, late), H2O().score(s, late)[:, order])
    assert not H2O().score(s, moment(s, policy_state=ScoreState(own=RunningScores(NO_MODEL)))).any()


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_chunk_shares_its_mean_among_those_that_count(size: int) -> None:
    s = ragged()
    score, among = torch.rand(K, N, dtype=torch.float64), (s.pos >= 0) & (s.pos % 3 > 0)

    def want(j: int) -> dict[int, float]:
        counted = {p: float(score[j, i]) for p, i in of(s, j).items() if bool(among[j, i])}
        found = {}
        for p, i in of(s, j).items():
            mine = [v for o, v in counted.items() if o // size == p // size]
            found[p] = sum(mine) / len(mine) if p in counted else float(score[j, i])
        return found

    n = int(s.pos.max()) + 1
    unit = token_units.numbered(size, torch.zeros(n, dtype=torch.int8), n, s.pos.device)
    same(token_units.chunked(score, s.pos, unit, among), s, want)


@pytest.mark.parametrize("name", ["snap", "tova", "vatp", "knorm", "keydiff", "lag", "expected", "curdkv"])
def test_heads_without_slots_and_layers_without_any_have_scores_without_nan(name: str) -> None:
    full = ragged()
    bare = Slots(full.k, full.v, full.pos.clone())
    bare.pos[1] = -1
    none = Slots(full.k[:, :0], full.v[:, :0], full.pos[:, :0])
    for s in (bare, none):
        at = moment(s, queries(3), q_pos=torch.arange(20, 23), n=28)
        score = {
            "snap": lambda s=s, at=at: Snap(queries=2, pool=5, pooling="avg").score(s, at),
            "tova": lambda s=s, at=at: Tova().score(s, at),
            "vatp": lambda s=s, at=at: Vatp().score(s, at),
            "knorm": lambda s=s: KNorm().score(s, moment(s)),
            "keydiff": lambda s=s: KeyDiff().score(s, moment(s)),
            "lag": lambda s=s: Lag(sinks=1, part=4).score(s, moment(s)),
            "curdkv": lambda s=s: CurDKV().score(s, moment(s)),
            "expected": lambda s=s: expected(s, torch.ones(K * G, D, dtype=torch.float64), None, 1.0, 0.0, 0.0),
        }[name]()
        assert score.shape == s.pos.shape
        assert not score.isnan().any()
