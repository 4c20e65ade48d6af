"""Queries to come are those heard, turned back and on by the mean rotation of the positions ahead."""

from __future__ import annotations

import math

import pytest
import torch

from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kv.slots import Slots
from kvcli.methods.policies.expected_attention import RECENT, Expected, expected
from kvcli.policies.scoring.mean_rotation import mean_turn
from kvcli.policies.scoring.topk import ScoreState
from tests import families, make
from tests.policies import moment

torch.set_num_threads(1)


@pytest.mark.parametrize("name", [f.name for f in families.FAMILIES.values() if f.has_tables])
def test_every_family_can_be_judged_by_queries_to_come(name: str) -> None:
    model = make.model(name)
    assert len(Expected().requirements(model).policy_state().known) == model.n_layers


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [1, 2, 4])
def test_the_mean_rotation_is_the_mean_of_rotations(interleaved: bool, turning: int) -> None:
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01, 0.002])[:turning], 1.3, interleaved)
    x = torch.randn(3, 1, 8, dtype=torch.float64)
    pos = torch.arange(40, 90)

    want = rotate(x.expand(-1, 50, -1), pos, rotary).mean(1)

    torch.testing.assert_close(x[:, 0] @ mean_turn(rotary, pos, 8, x.dtype).T, want)
    torch.testing.assert_close(x[:, 0] @ mean_turn(None, pos, 8, x.dtype).T, x[:, 0])


@pytest.mark.parametrize("covariance", [False, True])
def test_expected_attention_is_the_papers_formula(covariance: bool) -> None:
    """Mean and covariance of un-rotated queries, one turn at a time, over the next 13 positions."""
    r = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 30, 8, generator=r, dtype=torch.float64) for _ in "kv")
    s = Slots(k, v, torch.arange(30).expand(2, -1))
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01]))
    scorer, memory = Expected(samples=12, horizon=13, covariance=covariance, sinks=2), ScoreState(known=[rotary])
    pos = torch.tensor(scorer.probes(30))
    q = torch.randn(4, len(pos), 8, generator=r, dtype=torch.float64)
    at = moment(s, q, q_pos=pos, n=30, n_prompt=30, policy_state=memory)

    raw = torch.stack([unrotate(q[:, i : i + 1], pos[i : i + 1], rotary)[:, 0] for i in range(len(pos))], 1)
    eye = torch.eye(8, dtype=torch.float64)
    turns = [rotate(eye.unsqueeze(1), torch.tensor([p]), rotary)[:, 0].T for p in range(30, 43)]
    turn = torch.stack(turns).mean(0)
    mean = torch.stack([turn @ raw[h].mean(0) for h in range(4)])
    cov = torch.stack([turn @ torch.cov(raw[h].T, correction=0) @ turn.T for h in range(4)])
    want = expected(s, mean, cov if covariance else None, at.scale, 0.0, 0.0)

    assert pos[0] == 2
    assert len(pos) == 12
    torch.testing.assert_close(scorer.score(s, at), want)


def test_a_short_question_is_recorded_whole() -> None:
    scorer, n = Expected(samples=256, covariance=False), 2 * RECENT
    s = Slots(torch.randn(1, n, 4), torch.ones(1, n, 4), torch.arange(n).expand(1, -1))
    q = torch.randn(1, 5, 4)
    at = moment(s, q, q_pos=torch.arange(n - 5, n), n_prompt=n, policy_state=ScoreState(known=[None]))
    torch.testing.assert_close(scorer.score(s, at), expected(s, q.mean(1), None, at.scale, 0.0, 0.0))


def test_without_recorded_queries_only_values_count() -> None:
    scorer = Expected()
    s = Slots(torch.randn(1, 9, 4), torch.randn(1, 9, 4), torch.arange(9).expand(1, -1))
    score = scorer.score(s, moment(s, policy_state=ScoreState(known=[None])))
    assert torch.equal(score.argsort(dim=1), s.v.norm(dim=2).argsort(dim=1))
    assert math.isclose(float(score.sum()), float(s.v.norm(dim=2).sum()) / 9, rel_tol=1e-5)
