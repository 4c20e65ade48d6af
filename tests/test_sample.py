"""Sampling: the law is what the settings say, noise depends on seed, position and token alone, matching is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvcli.engine.forward_request import Draft, ForwardRequest, Rows, SamplingContext
from kvcli.engine.readback import Readback, fetch
from kvcli.engine.sequence.commit import accepted_path
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.token_history import TokenHistory
from kvcli.errors import BadInput, BadModel
from kvcli.kernels.gumbel_noise import gumbel
from tests.exact.half import Half

V = 13


def logits(n: int = 1, seed: int = 0, v: int = V) -> torch.Tensor:
    return torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * 3


def law(sampler: Sampler, row: torch.Tensor) -> torch.Tensor:
    ids, scores = sampler.warp(row)
    return torch.zeros(row.shape[-1], dtype=torch.float64).scatter(0, ids[0], scores[0].exp())


SETTINGS = [
    Sampler(temperature=0.7),
    Sampler(temperature=1.3, top_k=5),
    Sampler(temperature=0.9, top_p=0.8),
    Sampler(temperature=1.0, min_p=0.1),
    Sampler(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05),
    Sampler(temperature=1.2, typical_p=0.6),
    Sampler(temperature=0.8, top_k=11, top_p=0.95, min_p=0.02, typical_p=0.8),
]


@pytest.mark.parametrize("seed", range(5))
def test_what_drops_nothing_draws_what_the_sorted_candidates_would(seed: int) -> None:
    row, pos, sampler = logits(7, seed, 101), torch.arange(7), Sampler(temperature=0.8, seed=seed)
    ids, scores = sampler.warp(row)
    want = ids.gather(-1, (scores + gumbel(seed, pos, ids)).argmax(-1, keepdim=True)).squeeze(-1)
    assert sampler(row, pos).tolist() == want.tolist()


def sparse(p: torch.Tensor, cost: float, alpha: float) -> torch.Tensor:
    """Bregman top-k by its definition, from probabilities in falling order: every k is tried, and the q that is nearest
    to p among those with k tokens has phi'(q) = phi'(p) + nu, with phi(x) = x^a / (a (a - 1))."""

    def phi(x: torch.Tensor) -> torch.Tensor:
        return x**alpha / (alpha * (alpha - 1))

    def slope(x: torch.Tensor) -> torch.Tensor:
        return x ** (alpha - 1) / (alpha - 1)

    def nearest(k: int) -> torch.Tensor:
        low, high = 0.0, 1 / (alpha - 1)
        for _ in range(60):
            nu = (low + high) / 2
            q = ((alpha - 1) * (slope(p[:k]) + nu)) ** (1 / (alpha - 1))
            low, high = (nu, high) if float(q.sum()) < 1 else (low, nu)
        return torch.cat([q, torch.zeros(len(p) - k, dtype=p.dtype)])

    found = []
    for k in range(1, len(p) + 1):
        q = nearest(k)
        found.append((float((phi(q) - phi(p) - slope(p) * (q - p)).sum()) + cost * k, q))
    return min(found, key=lambda each: each[0])[1]


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.8, 2.0])
@pytest.mark.parametrize("cost", [0.0003, 0.004, 0.05])
def test_bregman_top_k_is_the_nearest_sparse_distribution(cost: float, alpha: float) -> None:
    drawn = Sampler(temperature=1.0, bregman_lambda=cost, bregman_alpha=alpha)
    sizes = set()
    for seed in range(3):
        row = logits(seed=seed, v=20) * (0.2 + 0.4 * seed)
        ids, scores = drawn.warp(row)
        p = torch.softmax(row[0].double(), -1)[ids[0]]
        torch.testing.assert_close(scores[0].exp(), sparse(p, cost, alpha), atol=1e-9, rtol=1e-7)
        sizes.add(int((scores > -torch.inf).sum()))
    assert len(sizes) > 1, "k is chosen for each row"


@pytest.mark.parametrize("sampler", SETTINGS)
@pytest.mark.parametrize("seed", range(5))
def test_the_distribution_is_that_of_transformers(sampler: Sampler, seed: int) -> None:
    row, asked = logits(seed=seed), [TemperatureLogitsWarper(sampler.temperature)]
    asked += [TopKLogitsWarper(sampler.top_k)] if sampler.top_k else []
    asked += [TopPLogitsWarper(sampler.top_p)] if sampler.top_p < 1 else []
    asked += [MinPLogitsWarper(sampler.min_p)] if sampler.min_p else []
    asked += [TypicalLogitsWarper(sampler.typical_p)] if sampler.typical_p < 1 else []
    want = LogitsProcessorList(asked)(None, row)
    torch.testing.assert_close(law(sampler, row), torch.softmax(want[0].double(), -1), atol=1e-6, rtol=1e-6)


FURTHER = [
    Sampler(temperature=1.1, top_n_sigma=1.5, xtc_probability=0.5, xtc_threshold=0.05),
    *[Sampler(temperature=1.1, bregman_lambda=0.01, bregman_alpha=alpha) for alpha in (1.1, 1.7, 2.0)],
]


@pytest.mark.parametrize("sampler", [*SETTINGS, *FURTHER])
@pytest.mark.parametrize("allowed", [1, 2, 9, 20])
def test_forbidden_tokens_leave_the_distribution_of_the_others(sampler: Sampler, allowed: int) -> None:
    row = logits(seed=allowed, v=40)
    mask = torch.randperm(40, generator=torch.Generator().manual_seed(allowed)) < allowed
    found = law(sampler, row.masked_fill(~mask, -torch.inf))
    torch.testing.assert_close(found[mask], law(sampler, row[:, mask]), atol=1e-9, rtol=1e-7)
    assert not found[~mask].any()


@pytest.mark.parametrize("sampler", SETTINGS)
def test_draws_follow_the_distribution(sampler: Sampler) -> None:
    n, row = 20_000, logits(seed=3)
    found = sampler(row.expand(n, -1), torch.arange(n))
    p = law(sampler, row)
    counts = torch.bincount(found, minlength=V).double()
    assert counts[p == 0].sum() == 0
    live = p > 0
    chi2 = ((counts[live] - n * p[live]) ** 2 / (n * p[live])).sum()
    freedom = int(live.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5  # five standard deviations


def test_greedy_is_the_first_of_the_likeliest() -> None:
    assert Sampler()(torch.tensor([[1.0, 5.0, 5.0, 2.0]]), torch.tensor([0])).tolist() == [1]


def history(ids: Sequence[int], vocab: int = V) -> TokenHistory:
    made = TokenHistory(vocab)
    made.add(ids)
    return made


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    row, ids = logits(seed=4), [2, 5, 5, 7]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), row.clone())
    sampler = Sampler(repetition_penalty=1.7)
    torch.testing.assert_close(sampler.penalize(row, sampler.facts(history(ids), [[]], 0)), want)


def test_penalties_of_the_answer_count_its_tokens_alone() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, as the OpenAI API states it."""
    row, text, path = logits(seed=6), [2, 5, 5, 7, 5, 5, 9], [5, 1]
    sampler = Sampler(presence_penalty=0.7, frequency_penalty=-0.3)
    c = torch.tensor([[5, 5, 9, *path].count(token) for token in range(V)])
    found = sampler.penalize(row, sampler.facts(history(text), [path], 4))
    torch.testing.assert_close(found, row - c * -0.3 - (c > 0) * 0.7)


def dry(ids: Sequence[int], sampler: Sampler) -> dict[int, float]:
    """The penalties of DRY by its definition: every earlier place is compared with the end, token by token."""
    ids = ids[-sampler.dry_range :]
    lengths: dict[int, int] = {}
    for at in range(1, len(ids)):
        n = 0
        while n < at and ids[at - 1 - n] == ids[-1 - n] and ids[-1 - n] not in sampler.dry_breakers:
            n += 1
        lengths[ids[at]] = max(n, lengths.get(ids[at], 0))
    allowed, breakers = sampler.dry_allowed_length, sampler.dry_breakers
    return {
        token: sampler.dry_multiplier * sampler.dry_base ** (n - allowed)
        for token, n in lengths.items()
        if n >= allowed and token not in breakers
    }


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.sampled_from([1, 2, 3, 10**30]),
    st.sampled_from([0, 1, 17]),
    st.booleans(),
)
def test_dry_is_what_its_definition_says(ids: list[int], allowed: int, last: int, breaks: bool) -> None:
    sampler = Sampler(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_range=last, dry_breakers=frozenset({3} if breaks else ())
    )
    row, cut = logits(), len(ids) // 2
    want = row.clone()
    for token, penalty in dry(ids, sampler).items():
        want[0, token] -= penalty
    found = sampler.penalize(row, sampler.facts(history(ids[:cut]), [ids[cut:]], 0))
    torch.testing.assert_close(found, want)


# tests/test-sampling.cpp of llama.cpp: probabilities, last tokens, expected probabilities
LLAMA_DRY = [
    ([0.25] * 4, [0, 1], 1.0, 1.1, 2, 4, (), [0.25] * 4),
    ([0.25] * 4, [0, 1, 2, 0, 1], 1.0, 1.1, 2, 5, (), [0.296923, 0.296923, 0.109232, 0.296923]),
    ([0.2] * 5, [0, 1, 3, 4, 0, 1], 1.0, 1.1, 2, 6, (3,), [0.2] * 5),
    ([0.2] * 5, [0, 1, 2, 0, 1], 2.0, 1.1, 2, 5, (), [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
    ([0.2] * 5, [0, 1, 2, 3, 4, 0, 1], 1.0, 1.1, 4, 7, (), [0.2] * 5),
]


@pytest.mark.parametrize(("p", "ids", "multiplier", "base", "allowed", "last", "breakers", "want"), LLAMA_DRY)
def test_dry_has_the_results_of_llama_cpp(
    p: list[float], ids: list[int], multiplier: float, base: float, allowed: int, last: int,
    breakers: tuple[int, ...], want: list[float],
) -> None:  # fmt: skip
    sampler = Sampler(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_range=last,
        dry_breakers=frozenset(breakers),
    )  # fmt: skip
    facts = sampler.facts(history(ids, 5), [[]], 0).of(torch.arange(len(p)))
    found = sampler.penalize(torch.tensor([p]).log(), facts).softmax(-1)[0]
    torch.testing.assert_close(found, torch.tensor(want), atol=1e-5, rtol=0)


def test_a_repeated_phrase_has_a_penalty_that_ends_the_growth() -> None:
    """A text of one token: lengths are bounded, and the penalty remains a number."""
    sampler = Sampler(dry_multiplier=0.8, dry_base=4.0)
    found = sampler.penalize(logits(), sampler.facts(history([1] * 5000), [[]], 0))
    assert torch.isfinite(found).all()
    assert found[0, 1] < -1e30


def test_a_bias_is_added_to_its_tokens() -> None:
    row = logits(2)
    want = row.clone()
    want[:, 3] += 1.5
    want[:, 7] = -torch.inf
    assert torch.equal(Sampler(logit_bias=((3, 1.5), (7, -math.inf))).penalize(row, None), want)


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_top_n_sigma_is_its_formula(n: float) -> None:
    """Tokens at least max - n * sigma (arXiv 2411.07641); a token that a grammar forbids has no part in sigma."""
    row = logits(seed=9)
    row[0, 4] = -torch.inf
    real = row[0][row[0] > -torch.inf]
    keep = row[0] >= row[0].max() - n * real.std(correction=0)
    found = law(Sampler(temperature=0.7, top_n_sigma=n), row)
    torch.testing.assert_close(found, (row[0] / 0.7).where(keep, -torch.inf).double().softmax(-1), atol=1e-6, rtol=0)


# tests/test-sampling.cpp of llama.cpp: probabilities, threshold, those that are left when XTC acts
LLAMA_XTC = [
    ([0.4, 0.3, 0.2, 0.1], 0.09, [3]),
    ([0.4, 0.3, 0.2, 0.1], 0.19, [2, 3]),
    ([0.4, 0.3, 0.2, 0.1], 0.29, [1, 2, 3]),
    ([0.4, 0.3, 0.2, 0.1], 0.39, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("p", "threshold", "left"), LLAMA_XTC)
def test_xtc_drops_what_llama_cpp_drops(p: list[float], threshold: float, left: list[int]) -> None:
    sampler = Sampler(temperature=1.0, xtc_probability=1.0, xtc_threshold=threshold)
    ids, scores = sampler.scores(torch.tensor([p], dtype=torch.float64).log(), torch.tensor([5]))
    assert ids is not None
    assert sorted(ids[0][scores[0] > -torch.inf].tolist()) == left


def test_xtc_acts_at_its_share_of_positions_by_seed_and_position_alone() -> None:
    n, row = 4000, torch.tensor([[0.5, 0.4, 0.1]]).log()
    sampler = Sampler(temperature=1.0, xtc_probability=0.3, seed=2)
    found = sampler(row.expand(n, -1), torch.arange(n))
    share = float((found == 0).double().mean())
    assert abs(share - 0.7 * 0.5) < 4 * math.sqrt(0.35 * 0.65 / n)
    some = torch.tensor([17, 3, 999])
    assert sampler(row.expand(3, -1), some).tolist() == found[some].tolist()


def test_noise_is_a_function_of_seed_position_and_token_only() -> None:
    ids = torch.arange(V)
    whole = gumbel(5, torch.arange(40), ids)
    some = gumbel(5, torch.tensor([31, 7]), ids[[4, 2]])
    assert torch.equal(some, whole[[31, 7]][:, [4, 2]])
    assert not torch.equal(gumbel(6, torch.arange(40), ids), whole)
    assert torch.isfinite(gumbel(2**63 + 1, torch.tensor([0, 2**40]), torch.tensor([0, 2**31]))).all()


def test_noise_is_gumbel_and_independent_between_neighbours() -> None:
    g = gumbel(1, torch.arange(400), torch.arange(500)).flatten()
    u = torch.exp(-torch.exp(-g)).sort().values
    n = u.numel()
    distance = (u - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, one in a thousand
    grid = gumbel(1, torch.arange(400), torch.arange(500))
    for a, b in (
        (grid[1:], grid[:-1]),
        (grid[:, 1:], grid[:, :-1]),
        (grid, gumbel(2, torch.arange(400), torch.arange(500))),
    ):
        r = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(r) < 5 / math.sqrt(a.numel())


def test_one_row_and_many_rows_draw_the_same() -> None:
    rows, pos = logits(9, seed=8), torch.arange(5, 14)
    sampler = Sampler(temperature=0.9, top_p=0.9, seed=4)
    together = sampler(rows, pos).tolist()
    assert together == [int(sampler(rows[i : i + 1], pos[i : i + 1])[0]) for i in range(9)]


def back(draw: SamplingContext, rows: Rows, logits: torch.Tensor, at_once: bool) -> Readback:
    """What the host learns of a pass: all of it in one go, as from a GPU, or row by row."""
    feed = ForwardRequest(None, rows, None, want=range(rows.tree), draw=draw, logits_hook=lambda x: x[:, :2])  # type: ignore[arg-type]
    found = Readback(feed, logits)
    if at_once:
        fetch([found, Readback(feed, logits + 1)])
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-1, 8), min_size=1, max_size=9),
    st.integers(0, 99),
    st.sampled_from([1.0, 1.4]),
    st.booleans(),
    st.booleans(),
)
def test_the_walk_takes_the_path_that_the_sampler_draws(
    parents: list[int], seed: int, penalty: float, is_held: bool, at_once: bool
) -> None:
    """Against a brute-force walk: sample at a node, look for a child with that token, go on."""
    parent = [min(p, i - 1) for i, p in enumerate(parents)]
    ids: list[int] = []
    for i, p in enumerate(parent):
        taken = {ids[j] for j in range(i) if parent[j] == p}
        ids.append(next(t for t in range(V) if t not in taken and (t * 7 + seed) % 3) if len(taken) < 8 else 12)
    rows = Rows.build(3, 20, Draft(ids, parent))
    scores = logits(rows.tree, seed) * 0.2
    # a negative penalty: a token drawn on the path is likely to come again, so a wrong count shows
    sampler = Sampler(temperature=0.9, repetition_penalty=penalty, frequency_penalty=9 * (1 - penalty), seed=seed)
    text = [1, 3]
    constraint = Half(V, seed) if is_held else None
    made = back(SamplingContext(sampler, history(text), constraint), rows, scores, at_once)
    path, new = accepted_path(rows, made.drawn)
    assert [made.hook_output(row) for row in path] == [pytest.approx(scores[row, :2].tolist()) for row in path]

    want_path, want_new, node = [0], [], 0
    while True:
        facts = sampler.facts(history([*text, *want_new]), [[]], 0) if sampler.penalties else None
        allowed = constraint.allowed(want_new) if constraint is not None else None
        row = scores[node] if allowed is None else scores[node].where(allowed, torch.tensor(-torch.inf))
        token = int(sampler(row[None], torch.tensor([rows.pos[node]]), facts)[0])
        want_new.append(token)
        child = [i + 1 for i, p in enumerate(parent) if p + 1 == node and ids[i] == token]
        if not child:
            break
        node = child[0]
        want_path.append(node)
    assert (path, new) == (want_path, want_new)


def test_rows_of_a_tree_see_their_ancestors_and_nothing_else() -> None:
    rows = Rows.build(9, 100, Draft([1, 2, 3, 4, 5], [-1, 0, 0, -1, 3]))
    assert list(rows.pos) == [100, 101, 102, 102, 101, 102]
    assert rows.tree_mask is not None
    seen = [[j for j in range(6) if rows.tree_mask[i, j]] for i in range(6)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5]]
    assert Rows.build(9, 100, Draft.chain([1, 2])).tree_mask is None


@pytest.mark.parametrize("top_k", [0, 5])
def test_next_to_no_temperature_takes_the_likeliest(top_k: int) -> None:
    """Divided by as little, logits would be infinite, and the weights called damaged."""
    rows = logits(3)
    assert Sampler(temperature=1e-300, top_k=top_k)(rows, torch.arange(3)).tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_are_refused(temperature: float, at_once: bool) -> None:
    bad = logits(3)
    bad[1, 4] = torch.nan
    made = back(
        SamplingContext(Sampler(temperature=temperature), TokenHistory(V)), Rows.chain([1, 2, 3], 7), bad, at_once
    )
    assert made.drawn(0) == Sampler(temperature=temperature)(bad[:1], torch.tensor([7])).item()
    with pytest.raises(BadModel) as found:
        made.drawn(1)
    assert found.value.code == "bad_logits"
    assert "position 8" in found.value.lines[0]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_nothing_may_follow_is_refused_where_it_is_reached(temperature: float, at_once: bool) -> None:
    """A constraint may end in a blind alley: an error of who goes there, and of nobody who only drafted it."""

    class Alley:
        def allowed(self, ids: Sequence[int]) -> torch.Tensor:
            return torch.tensor([len(ids) < 2 or ids[-1] == 1] * V)

    rows = Rows.build(3, 7, Draft([5, 1, 2, 4], [-1, 0, 0, 2]))
    made = back(SamplingContext(Sampler(temperature=temperature), TokenHistory(V), Alley()), rows, logits(5), at_once)
    assert all(made.drawn(row) >= 0 for row in (0, 1, 2))
    with pytest.raises(BadInput) as found:
        made.drawn(3)
    assert found.value.code == "nothing_allowed"
    assert "position 9" in found.value.lines[0]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 6}, {"temperature": 0.5}], ids=str)
def test_what_is_drawn_is_the_first_of_the_largest_scores_or_nothing_where_that_is_no_number(
    settings: dict[str, float],
):
    sampler = Sampler(**settings)
    logits = torch.randint(0, 4, (40, 50), generator=torch.Generator().manual_seed(2)).float()  # full of equals
    logits[3, 7], logits[5, 9], logits[8, 1] = torch.nan, torch.inf, -torch.inf
    logits[11] = -torch.inf
    ids, scores = sampler.scores(logits, torch.arange(40))
    best = scores.argmax(-1, keepdim=True)
    wanted = (best if ids is None else ids.gather(-1, best)).masked_fill(~scores.gather(-1, best).isfinite(), -1)
    assert sampler(logits, torch.arange(40)).tolist() == wanted.squeeze(-1).tolist()
    assert {3, 5, 11} <= {row for row, token in enumerate(wanted.tolist()) if token == [-1]}


def test_what_has_no_float64_has_its_tokens_drawn_on_the_host():
    """As Apple's GPUs, of which there is none here: logits come down once, and nothing of the draw is asked there."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows, sampler = Rows.chain([1, 2, 3], 4), Sampler(temperature=0.9, top_k=7, seed=5)
    feed = SimpleNamespace(rows=rows, draw=SamplingContext(sampler, TokenHistory(50)), logits_hook=None, want=range(3))
    there = SimpleNamespace(device=SimpleNamespace(type="mps"), cpu=lambda: logits)
    ours, theirs = (Readback(feed, given) for given in (logits, there))
    assert [ours.drawn(row) for row in range(3)] == [theirs.drawn(row) for row in range(3)]
