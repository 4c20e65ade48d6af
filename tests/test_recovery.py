"""What FastGen measures: against the plain attention map, and on seven heads made by hand."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.engine.sequence.state import END, NEWLINE, PUNCT, SPECIAL, SYSTEM, TEXT
from kvcli.kv.slots import Slots, compact
from kvcli.methods.policies.fastgen.head_knapsack import solve
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.recovery import CandidateSets, Recovery, punctuation, recover
from kvcli.methods.policies.fastgen.settings import PAPER
from tests import head_zoo

N = 1024
HONEST = FastGen(recovery=0.95)
PUBLISHED = FastGen(recovery=0.95, paper=True)


def test_what_is_lost_is_the_distance_between_the_two_rows() -> None:
    a = torch.rand(37, generator=torch.Generator().manual_seed(5), dtype=torch.float64).softmax(0)
    keep = torch.arange(37) % 3 == 0
    rest = torch.where(keep, a / a[keep].sum(), 0.0)
    assert (a - rest).abs().sum() / 2 == pytest.approx(float(1 - a[keep].sum()), abs=1e-12)


# --- against the map


def case(n: int = 211, n_kv: int = 3, group: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Slots, Tensor]:
    """Queries at all positions, slots in no order and of unequal heads, kinds."""
    noise = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, n_kv, n, 8, generator=noise, dtype=torch.float64) * 1.5
    q = torch.randn(n_kv * group, n, 8, generator=noise, dtype=torch.float64)
    pos = torch.arange(n).expand(n_kv, -1)
    mask = torch.rand(n_kv, n, generator=noise) < 0.9
    order = torch.randperm(n, generator=noise)
    s = compact(Slots(k[:, order], v[:, order], pos[:, order]), mask[:, order])
    kinds = torch.randint(TEXT, SYSTEM + 1, (n,), generator=noise).to(torch.int8)
    kinds[torch.rand(n, generator=noise) < 0.8] = TEXT
    rows = torch.tensor(sorted({*range(n // 2, n, 7), n - 3, n - 1}))
    return q[:, rows], rows, s, kinds


def naive(
    q: Tensor,
    q_pos: Tensor,
    s: Slots,
    kinds: Tensor,
    own: FastGen,
    softcap: float,
    window: int | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Mass [C, K, G, m] and cost [C, K] by loops over the whole map: the specification."""
    sets = CandidateSets.of(own, kinds)
    n_kv, group = s.pos.shape[0], q.shape[0] // s.pos.shape[0]
    mass = torch.zeros(len(own.candidates), n_kv, group, q_pos.shape[0], dtype=torch.float64)
    cost = torch.zeros(len(own.candidates), n_kv, dtype=torch.int64)
    for j in range(n_kv):
        pos = s.pos[j]
        kind = [int(kinds[p]) for p in pos.tolist()]
        p = torch.zeros(group, q_pos.shape[0], pos.shape[0] + 1, dtype=torch.float64)  # the last column is the sink
        for g in range(group):
            score = 0.3 * q[j * group + g] @ s.k[j].T
            score = softcap * torch.tanh(score / softcap) if softcap else score
            away = q_pos.unsqueeze(1) - pos
            score[(away < 0) | (pos < 0) | ((away >= window) if window else False)] = -math.inf
            last = torch.full((q_pos.shape[0], 1), -math.inf if sink is None else float(sink[j * group + g]))
            p[g] = torch.cat((score, last.double()), 1).softmax(1)
        special = [k in (SPECIAL, SYSTEM) or at < own.sinks for k, at in zip(kind, pos.tolist(), strict=True)]
        marks = [k in sets.punct for k in kind]
        free = torch.tensor([i for i, at in enumerate(pos.tolist()) if at >= 0 and not special[i] and not marks[i]])
        far = p[..., :-1] * (q_pos.unsqueeze(1) - pos >= sets.guard)

        def frequent(rows: slice, free: Tensor = free, far: Tensor = far) -> set[int]:
            score = far[:, rows].mean(0).sum(0)[free]
            return set(free[score.argsort(descending=True)[: sets.frequent]].tolist())

        every, even, odd = frequent(slice(None)), frequent(slice(0, None, 2)), frequent(slice(1, None, 2))
        for c, name in enumerate(own.candidates):
            reach = sets.local if "local" in name else sets.guard
            by_kind = [name == "full" or a or ("punct" in name and b) for a, b in zip(special, marks, strict=True)]

            for r, at in enumerate(q_pos.tolist()):
                chosen = every if not own.is_crossfit else odd if r % 2 == 0 else even
                slots = _kept(pos, at, by_kind, reach, chosen if "frequent" in name else set())
                mass[c, j, :, r] = p[:, r, slots].sum(-1) + p[:, r, -1]
            slots = _kept(pos, int(pos.max()), by_kind, reach, every if "frequent" in name else set())
            cost[c, j] = len(slots)
    return mass, cost


def _kept(pos: Tensor, at: int, by_kind: list[bool], reach: int, chosen: set[int]) -> list[int]:
    ages = (at - pos).tolist()
    return [i for i, age in enumerate(ages) if pos[i] >= 0 and (by_kind[i] or age < reach or i in chosen)]


@pytest.mark.parametrize("blocks", [256.0, 1e-4])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (1.7, None), (0.0, 97)])
@pytest.mark.parametrize("own", [FastGen(recent=17, punct_cap=1.0), FastGen(paper=True)], ids=["honest", "paper"])
def test_masses_and_costs_are_those_of_the_plain_map(
    own: FastGen, softcap: float, window: int | None, with_sink: bool, blocks: float
) -> None:
    q, q_pos, s, kinds = case()
    sink = torch.linspace(-1, 2, q.shape[0], dtype=torch.float64) if with_sink else None
    own = dataclasses.replace(own, max_profile_mb=blocks)
    found = recover(q, q_pos, s, kinds, own, 0.3, softcap, window, sink=sink)
    mass, cost = naive(q, q_pos, s, kinds, own, softcap, window, sink)
    torch.testing.assert_close(found.mass, mass, rtol=0, atol=1e-9)
    assert found.cost.tolist() == cost.tolist()
    low = recover(q.float(), q_pos, Slots(s.k.float(), s.v.float(), s.pos), kinds, own, 0.3, softcap, window, sink=sink)
    torch.testing.assert_close(low.mass, mass.float(), rtol=0, atol=1e-5)


def test_blocks_of_rows_take_no_more_memory_than_they_may() -> None:
    q, q_pos, s, kinds = case(1009)
    own = FastGen(max_profile_mb=0.05)
    held = _peak(lambda: recover(q.float(), q_pos, Slots(s.k.float(), s.v.float(), s.pos), kinds, own, 0.3))
    whole = _peak(lambda: recover(q.float(), q_pos, Slots(s.k.float(), s.v.float(), s.pos), kinds, FastGen(), 0.3))
    assert held < whole / 4


def _peak(work: Any) -> int:
    """Bytes of the largest tensor made."""

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, Tensor):
                    self.most = max(self.most, t.untyped_storage().nbytes())
            return out

    with Largest() as seen:
        work()
    return seen.most


def test_measuring_a_long_text_takes_no_more_beside_its_keys_and_values_than_it_may() -> None:
    n, rows = 32_768, torch.arange(32_768 - 64, 32_768)
    noise = torch.Generator().manual_seed(0)
    s = Slots(*torch.randn(2, 1, n, 16, generator=noise), torch.arange(n).expand(1, -1))
    q = torch.randn(2, 64, 16, generator=noise)
    own, stored = FastGen(max_profile_mb=8), 2 * n * 16 * 4
    live = _Live()
    with live:
        recover(q, rows, s, torch.zeros(n, dtype=torch.int8), own, 0.25)
    assert 4 * q.shape[0] * 64 * n > 8 * 2**20, "the whole map would be more"
    assert 2 * 2**20 < live.most < stored + 8 * 2**20


class _Live(TorchDispatchMode):
    """The most bytes that tensors held at once which were made meanwhile; views count what they look at."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                place, size = t.untyped_storage()._cdata, t.untyped_storage().nbytes()
                self._now += 0 if self._users.get(place) else size
                self._users[place] = self._users.get(place, 0) + 1
                self.most = max(self.most, self._now)
                weakref.finalize(t, self._gone, place, size)
        return out

    def _gone(self, place: int, size: int) -> None:
        self._users[place] -= 1
        self._now -= 0 if self._users[place] else size


def test_keys_in_sixteen_bits_are_measured_nearly_as_well() -> None:
    q, q_pos, s, kinds = case()
    low = Slots(s.k.bfloat16(), s.v.bfloat16(), s.pos)
    exact = Slots(low.k.double(), low.v.double(), s.pos)
    for own in (FastGen(recent=17), FastGen(paper=True)):
        found = recover(q.bfloat16(), q_pos, low, kinds, own, 0.3)
        right = recover(q.bfloat16().double(), q_pos, exact, kinds, own, 0.3)
        assert found.mass.dtype == torch.float32
        assert float((found.mass - right.mass).abs().mean()) < 2e-3
        assert float((found.value(own.measure, "mean") - right.value(own.measure, "mean")).abs().max()) < 1e-2


def test_protected_slots_count_as_kept_and_cost_their_place() -> None:
    q, q_pos, s, kinds = case()
    protected = (s.pos >= 60) & (s.pos < 110)
    own = FastGen(recent=5)
    bare, held = (recover(q, q_pos, s, kinds, own, 0.3, protected=p) for p in (None, protected))
    assert bool((held.mass[0] >= bare.mass[0]).all())
    assert bool((held.cost[0] > bare.cost[0]).all())
    assert not bool((held.frequent & protected).any())


def test_a_row_that_sees_nothing_has_nothing_to_lose() -> None:
    q, _, s, kinds = case()
    found = recover(q[:, :2], torch.tensor([0, 1]), Slots(s.k, s.v, s.pos.clamp(min=50)), kinds, FastGen(), 0.3)
    assert found.mass.isfinite().all()
    assert bool((found.mass == 1).all())


# --- the zoo


def judged(own: FastGen, rows: Sequence[int], n: int = N) -> dict[str, tuple[str, Tensor]]:
    """Name -> the cheapest candidate that recovers enough, and what each is worth."""
    found = measured(own, rows, n)
    value = found.value(own.measure, own.gqa)
    enough = value >= own.recovery
    enough[-1] = True
    best = found.cost.double().masked_fill(~enough, math.inf).argmin(0).tolist()
    return {name: (own.candidates[best[i]], value[:, i]) for i, name in enumerate(head_zoo.NAMES)}


def measured(own: FastGen, rows: Sequence[int], n: int = N) -> Recovery:
    q, s = head_zoo.layer(head_zoo.maps(n))
    at = torch.tensor(rows)
    return recover(q[:, at], at, s, head_zoo.kinds(n), own, 1.0)


def test_honest_recovery_tells_all_seven_heads_apart() -> None:
    said = {name: choice for name, (choice, _) in judged(HONEST, HONEST.probes(N)).items()}
    assert said == {
        "sink": "special",
        "punct": "punct",
        "local": "local",
        "heavy": "punct+frequent",
        "bursty": "full",
        "far": "full",
        "uniform": "full",
    }


def test_the_published_criterion_misses_the_bursty_head_alone() -> None:
    said = {name: choice for name, (choice, _) in judged(PUBLISHED, PUBLISHED.probes(N)).items()}
    assert said["bursty"] == "punct+frequent"
    del said["bursty"]
    assert said == {
        "sink": "special",
        "punct": "punct",
        "local": "punct+frequent+local",
        "heavy": "punct+frequent",
        "far": "full",
        "uniform": "full",
    }


def test_the_newest_rows_alone_take_a_local_head_for_a_frequent_one_and_miss_the_bursty_head() -> None:
    newest = FastGen(recovery=0.95, recent=0, crossfit=False, criterion="mean", policies=PAPER)
    said = judged(newest, range(N - 64, N))
    assert said["local"][0] == said["bursty"][0] == "punct+frequent"
    q, s = head_zoo.layer(head_zoo.maps(N + 200))
    later = torch.arange(N + 136, N + 200)
    held = measured(newest, range(N - 64, N)).frequent[head_zoo.NAMES.index("local")]
    p = head_zoo.maps(N + 200)[head_zoo.NAMES.index("local"), later, :N]
    assert q.shape[1] == s.n_slots == N + 200
    assert float(p[:, held].sum(-1).mean()) < 0.6 < 0.95 < float(said["local"][1][2])


def test_a_choice_judged_on_its_own_rows_flatters_the_bursty_head() -> None:
    at, which = HONEST.probes(N), HONEST.candidates.index("punct+frequent")
    inside = judged(dataclasses.replace(HONEST, crossfit=False), at)["bursty"][1][which]
    across = judged(HONEST, at)["bursty"][1][which]
    assert float(inside) > 0.9
    assert float(across) < 0.6


def test_as_published_a_uniform_head_keeps_nine_tenths_on_paper() -> None:
    own = FastGen(paper=True, sinks=0)
    uniform = torch.ones(1, N, N, dtype=torch.float64).tril()
    q, s = head_zoo.layer(uniform / uniform.sum(-1, keepdim=True))
    at = torch.tensor(own.probes(N))
    found = recover(q[:, at], at, s, torch.zeros(N, dtype=torch.int8), own, 1.0)
    both = found.mass[own.candidates.index("punct+frequent+local"), 0, 0]
    assert at.tolist() == list(range(N))
    assert float(both.mean()) == pytest.approx(0.6 + 0.6 * math.log(1 / 0.6), abs=5e-4)  # 0.9065
    assert float(both[-1]) == pytest.approx(0.6, abs=2e-3)


# --- sets, rows, criteria


def test_probed_rows_are_of_the_second_half_and_the_newest_each() -> None:
    rows = FastGen(probe_rows=8).probes(1000)
    assert rows == sorted(set(rows))
    assert rows[0] == 500
    assert rows[8:] == list(range(992, 1000))
    assert FastGen().probes(1) == [0]
    assert FastGen().probes(9) == [4, 5, 6, 7, 8]
    assert len(FastGen(paper=True).probes(5000)) == 1024


def test_code_has_too_much_punctuation_to_be_cheap() -> None:
    kinds = torch.tensor([TEXT] * 7 + [PUNCT, END, NEWLINE], dtype=torch.int8)
    assert set(punctuation(kinds, 0.3)) == {PUNCT, END, NEWLINE}
    assert set(punctuation(kinds, 0.29)) == {END, NEWLINE}


def test_the_criteria_and_the_two_ways_to_join_a_group() -> None:
    mass = torch.rand(2, 3, 2, 41, generator=torch.Generator().manual_seed(1))
    found = Recovery(mass, torch.zeros(2, 3), torch.zeros(3, 5), torch.zeros(3, 5))
    joined = mass.mean(2)
    torch.testing.assert_close(found.value("mean", "mean"), joined.mean(-1))
    torch.testing.assert_close(found.value("cvar10", "mean"), joined.sort(-1).values[..., :5].mean(-1))
    torch.testing.assert_close(found.value("p05", "mean"), joined.sort(-1).values[..., 2])
    assert bool((found.value("cvar10", "min") <= found.value("cvar10", "mean")).all())


# --- one budget


def problem(seed: int, n: int = 40, c: int = 6) -> tuple[list[list[float]], list[list[float]]]:
    noise = torch.Generator().manual_seed(seed)
    cost = torch.randint(1, 300, (n, c), generator=noise).double()
    value = torch.rand(n, c, generator=noise, dtype=torch.float64)
    cost[:, -1], value[:, -1] = 300, 1.0
    return value.tolist(), cost.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_is_met_within_one_step_and_spent_nearly_as_well_as_can_be(seed: int) -> None:
    value, cost = problem(seed)
    for budget in range(3000, 300 * 40 + 1, 977):
        chosen = solve(value, cost, budget)
        spent = sum(c[i] for c, i in zip(cost, chosen, strict=True))
        better = [c[k] - c[i] for v, c, i in zip(value, cost, chosen, strict=True) for k in range(6) if v[k] > v[i]]
        assert spent <= budget
        assert all(step > budget - spent for step in better)
        assert sum(v[i] for v, i in zip(value, chosen, strict=True)) > 0.99 * best(value, cost, budget)
    assert solve(value, cost, 300 * 40) == [5] * 40


def best(value: list[list[float]], cost: list[list[float]], budget: int) -> float:
    """The most that can be had, by dynamic programming over whole tokens."""
    reach = torch.zeros(budget + 1, dtype=torch.float64)
    for v, c in zip(value, cost, strict=True):
        wider = torch.full_like(reach, -math.inf)
        for gain, price in zip(v, map(int, c), strict=True):
            if price <= budget:
                wider[price:] = torch.maximum(wider[price:], reach[: budget + 1 - price] + gain)
        reach = wider
    return float(reach[-1])


def test_less_than_the_least_is_the_least() -> None:
    value, cost = problem(9)
    assert solve(value, cost, 0.0) == [
        min(range(6), key=lambda i: (c[i], -v[i])) for v, c in zip(value, cost, strict=True)
    ]


def test_the_best_gain_for_a_token_is_bought_first() -> None:
    # head 0 gains .5 for 10 tokens, head 1 gains .4 for 20 and all for 40
    value, cost = [[0.5, 1.0], [0.0, 0.4, 1.0]], [[10.0, 20.0], [10.0, 30.0, 50.0]]
    assert solve(value, cost, 29) == [0, 0]
    assert solve(value, cost, 30) == [1, 0]
    assert solve(value, cost, 59) == [1, 1], "what is left buys a candidate that is off the hull"
    assert solve(value, cost, 70) == [1, 2]
