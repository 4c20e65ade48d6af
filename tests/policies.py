"""Policies for tests: one that keeps all, one that keeps a window, one that keeps different slots in each head."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import await_passes
from kvcli.engine.policy.policy import LayerContext, PerLayerPolicy, Phase, Policy, PolicyRequirements
from kvcli.engine.ranks import Ranks
from kvcli.kv.slots import Slots
from kvcli.methods.policies.keep_all import KeepAll as KeepAll


@dataclass(frozen=True)
class Recent(PerLayerPolicy):
    sinks: int = 2
    last: int = 13

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        newest = s.pos.amax(dim=1, keepdim=True)
        return (s.pos >= 0) & ((s.pos < self.sinks) | (s.pos > newest - self.last))


@dataclass(frozen=True)
class Ragged(PerLayerPolicy):
    """Head j keeps the 9 + 4 j slots that the latest queries like most, and the last 5: unequal heads."""

    recent: int = 6

    def requirements(self, lm: object) -> PolicyRequirements:
        return PolicyRequirements(self.recent)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        n_kv, q = s.k.shape[0], at.q
        assert q.shape[1] == at.q_pos.shape[0] <= self.recent
        rows = q.reshape(n_kv, -1, q.shape[2]).to(s.k.dtype)  # [K, G*w, D]
        score = (rows @ s.k.transpose(1, 2)).amax(1).masked_fill(s.pos < 0, -torch.inf)  # [K, S]
        newest = s.pos.amax(dim=1, keepdim=True)
        mask = s.pos > newest - 5
        for j in range(n_kv):
            best = score[j].topk(min(9 + 4 * j, score.shape[1])).indices
            mask[j, best] = True
        return mask & (s.pos >= 0)


def moment(s: Slots, q: Tensor | None = None, layer: int = 0, **more: Any) -> LayerContext:
    """A compression point of one layer with these slots, at which the queries q [H, w, D] were the latest."""
    q = s.k[:, :0] if q is None else q
    n = int(s.pos.max()) + 1 if s.n_slots else 0
    found: dict[str, Any] = {
        "layer": layer,
        "n_layers": 1,
        "phase": "answering",
        "n": n,
        "n_prompt": n,
        "q": q,
        "q_pos": torch.arange(n - q.shape[1], n),
        "kinds": torch.zeros(n, dtype=torch.int8),
        "protected": torch.zeros_like(s.pos, dtype=torch.bool),
        "scale": s.k.shape[2] ** -0.5,
    }
    return LayerContext(**found | more)


@dataclass(frozen=True)
class OneLayer:
    """A compression point of a model of one layer, of which no more is there than this."""

    s: Slots
    at: LayerContext
    is_whole: bool = True
    layers = range(1)
    lm = SimpleNamespace(ranks=Ranks())

    @property
    def full_layers(self) -> list[int]:
        return [] if self.at.window is not None else [0]

    @property
    def ids(self) -> range:
        return range(self.at.n)

    @property
    def phase(self) -> Phase:
        return self.at.phase

    @property
    def n_prompt(self) -> int:
        return self.at.n_prompt

    @property
    def policy_state(self) -> Any:
        return self.at.policy_state

    def layer(self, i: int) -> tuple[Slots, LayerContext]:
        return self.s, self.at


def kept(policy: Policy, s: Slots, at: LayerContext) -> Tensor:
    """What the policy keeps of one layer."""
    (mask,) = run_to_end(await_passes(policy.select(OneLayer(s, at))))  # type: ignore[arg-type]
    return s.pos >= 0 if mask is None else mask


def masks(kv: Any, choose: Any, n_layers: int = 0) -> list[Tensor]:
    """What to settle with: `choose` of each layer's slots."""
    n_layers = n_layers or 1 + max(use.layer for use in kv.usage())
    return [choose(layer, kv.slots(layer)) for layer in range(n_layers)]
