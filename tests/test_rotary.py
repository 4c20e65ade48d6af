"""Rotary embeddings are found in every family, and undone; queries to come are those of the mean rotation."""

from __future__ import annotations

import math

import pytest
import torch

from kvcli.forward import Pass, run
from kvcli.kv.dense import Dense
from kvcli.kv.slots import Slots
from kvcli.model import LM
from kvcli.policies import scores
from kvcli.policies.rotary import Rotary, rotaries
from kvcli.policies.scorers import Expected
from kvcli.rows import Rows
from tests import families
from tests.policies import moment

torch.set_num_threads(1)


def queries(lm: LM, ids: list[int], start: int) -> list[torch.Tensor]:
    kv = Dense(lm.n_layers, lm.n_kv_heads, lm.head_dim, lm.dtype)
    p = Pass(Rows.chain(ids, start), kv, hear=list(range(len(ids))))
    run(lm, p, p.rows.ids[:0])
    return p.queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_rotation_of_every_layer_is_found(name: str, dtype: torch.dtype) -> None:
    lm = LM.of(families.build(name, dtype))
    found = rotaries(lm)

    # one text at two places: alone, a row sees the same wherever it stands, and so do rows near each other
    near, far = queries(lm, [11, 7, 31], 0), queries(lm, [11, 7, 31], 300)
    bound = 1e-3 if dtype == torch.float32 else 0.1

    assert len(found) == lm.n_layers
    for rotary, a, b in zip(found, near, far, strict=True):
        assert rotary is not None
        a, b = (rotary.turned(q.float(), torch.arange(at, at + 3), back=True) for q, at in ((a, 0), (b, 300)))
        assert float((a - b).norm() / a.norm()) < bound


def test_layers_without_positions_are_found_too() -> None:
    lm = LM.of(families.build("smollm3"))
    assert [rotary.speed.shape[0] for rotary in rotaries(lm) if rotary is not None] == [6, 0, 6]


def test_a_model_that_turns_in_another_way_has_none() -> None:
    model = families.build("llama")
    for part in model.modules():
        if "inv_freq" in dict(part.named_buffers(recurse=False)):
            inner = part.forward
            part.forward = lambda x, position_ids, inner=inner: inner(x, position_ids * 2)  # type: ignore[assignment]
    assert rotaries(LM.of(model)) == [None] * 3


@pytest.mark.parametrize("by_halves", [True, False])
@pytest.mark.parametrize("turning", [0, 2, 4])
def test_the_mean_rotation_is_the_mean_of_rotations(by_halves: bool, turning: int) -> None:
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01, 0.002])[:turning], by_halves)
    x = torch.randn(3, 1, 8, dtype=torch.float64)
    pos = torch.arange(40, 90)

    want = rotary.turned(x.expand(-1, 50, -1), pos).mean(1)

    torch.testing.assert_close(x[:, 0] @ rotary.mean_turn(pos, 8, x.dtype).T, want)
    torch.testing.assert_close(rotary.turned(rotary.turned(x, pos[:1]), pos[:1], back=True), x)


@pytest.mark.parametrize("covariance", [False, True])
def test_expected_attention_is_the_papers_formula(covariance: bool) -> None:
    """Mean and covariance of un-rotated queries, one turn at a time, over the next 13 positions."""
    r = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 30, 8, generator=r, dtype=torch.float64) for _ in "kv")
    s = Slots(k, v, torch.arange(30).expand(2, -1))
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01]))
    scorer = Expected(samples=12, horizon=13, covariance=covariance, sinks=2, _rotary=[rotary])
    pos = torch.tensor(scorer.probes(30))
    q = torch.randn(4, len(pos), 8, generator=r, dtype=torch.float64)
    at = moment(s, q, q_pos=pos, n_prompt=30)

    raw = torch.stack([rotary.turned(q[:, i : i + 1], pos[i : i + 1], back=True)[:, 0] for i in range(len(pos))], 1)
    eye = torch.eye(8, dtype=torch.float64)
    turns = [rotary.turned(eye.unsqueeze(1), torch.tensor([p]))[:, 0].T for p in range(30, 43)]
    turn = torch.stack(turns).mean(0)
    mean = torch.stack([turn @ raw[h].mean(0) for h in range(4)])
    cov = torch.stack([turn @ torch.cov(raw[h].T, correction=0) @ turn.T for h in range(4)])
    want = scores.expected(s, mean, cov if covariance else None, at.scale, 0.0, 0.0)

    assert pos[0] == 2
    assert len(pos) == 12
    torch.testing.assert_close(scorer(s, at), want)


def test_a_short_question_is_heard_whole() -> None:
    scorer = Expected(samples=12, recent=5, covariance=False, _rotary=[Rotary(torch.zeros(0))])
    s = Slots(torch.randn(1, 40, 4), torch.ones(1, 40, 4), torch.arange(40).expand(1, -1))
    q = torch.randn(1, 5, 4)
    at = moment(s, q, q_pos=torch.arange(35, 40), n_prompt=40)
    torch.testing.assert_close(scorer(s, at), scores.expected(s, q.mean(1), None, at.scale, 0.0, 0.0))


def test_with_no_query_heard_only_values_count() -> None:
    scorer = Expected(_rotary=[Rotary(torch.zeros(0))])
    s = Slots(torch.randn(1, 9, 4), torch.randn(1, 9, 4), torch.arange(9).expand(1, -1))
    order = scorer(s, moment(s)).argsort(dim=1)
    assert torch.equal(order, s.v.norm(dim=2).argsort(dim=1))
    assert math.isclose(float(scorer(s, moment(s)).sum()), float(s.v.norm(dim=2).sum()) / 9, rel_tol=1e-5)
