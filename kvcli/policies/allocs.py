"""Who gets how much: one total, shared by the heads of a layer or of the whole model.

`see` is for those that must know all layers first; the arithmetic is in `budgets.py`. A layer with a sliding window
keeps itself and has no share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.policies import budgets


@dataclass(frozen=True, slots=True)
class Ask:
    """How much is to be kept of what."""

    each: int  # slots a head, on average
    most: int  # slots that a head can hold
    least: int = 0  # slots that a head cannot let go


class Alloc(Protocol):
    """Shares places among heads; scores [K, S] as `budgets` has them."""

    @property
    def looks(self) -> bool:
        """Must it see all layers before it chooses in one?"""

    @property
    def wants_scores(self) -> bool:
        """Does it see scores, so that none are needed when it chooses?"""

    def see(self, layer: int, n_layers: int, score: Tensor | None, pos: Tensor, ask: Ask) -> None:
        """One layer, in order; layer 0 begins anew. Layers that keep themselves are left out."""

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        """-> bool [K, S]."""


class _Alone:
    """Judges each layer by itself."""

    looks = False
    wants_scores = False

    def see(self, layer: int, n_layers: int, score: Tensor | None, pos: Tensor, ask: Ask) -> None:
        return


class Uniform(_Alone):
    """Every head keeps the same number."""

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        assert score is not None
        return budgets.uniform(score, pos, ask.each)


@dataclass
class Ada(_Alone):
    """The heads of a layer compete (AdaKV, arXiv 2407.11550)."""

    floor: float  # share of the average that no head goes below

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        assert score is not None
        return budgets.ada(score, pos, ask.each, self.floor)


@dataclass
class Pyramid:
    """Lower layers keep more (PyramidKV, arXiv 2406.02069)."""

    beta: float
    looks = True
    wants_scores = False
    _seen: list[int] = field(default_factory=list)  # layers that have a share

    def see(self, layer: int, n_layers: int, score: Tensor | None, pos: Tensor, ask: Ask) -> None:
        self._seen = [*(seen for seen in self._seen if seen < layer), layer]

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        assert score is not None
        shares = budgets.pyramid(len(self._seen), ask.each, self.beta, ask.most, ask.least)
        return budgets.uniform(score, pos, shares[self._seen.index(layer)])


@dataclass
class HeadMap:
    """Each head keeps what a file says that it deserves (HeadKV, arXiv 2410.19258; DuoAttention, 2410.10819)."""

    weights: Sequence[Sequence[float]]  # by layer and KV head
    floor: float
    name: str  # of the file
    looks = True
    wants_scores = False
    _seen: list[int] = field(default_factory=list)

    def see(self, layer: int, n_layers: int, score: Tensor | None, pos: Tensor, ask: Ask) -> None:
        rows = {len(row) for row in self.weights}
        if len(self.weights) != n_layers or rows != {pos.shape[0]}:
            raise BadConfig(
                f"the head map {self.name} is not of this model",
                code="bad_headmap",
                lines=[
                    f"it has {len(self.weights)} layers of {', '.join(map(str, sorted(rows)))} KV heads",
                    f"the model has {n_layers} layers of {pos.shape[0]} KV heads",
                ],
                try_=["kvcli profile-heads writes a map of the model"],
            )
        self._seen = [*(seen for seen in self._seen if seen < layer), layer]

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        assert score is not None
        n_kv = pos.shape[0]
        flat = [weight for seen in self._seen for weight in self.weights[seen]]
        counts = budgets.by_weight(flat, ask.each, self.floor, ask.most, ask.least)
        first = self._seen.index(layer) * n_kv
        return budgets.top(score, pos, torch.tensor(counts[first : first + n_kv], device=pos.device))


@dataclass
class Global:
    """All heads of all layers compete, as in KVzip (arXiv 2505.23416)."""

    floor: float
    looks = True
    wants_scores = True
    _seen: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)  # layer -> scores, positions, places
    _chosen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> mask, positions

    def see(self, layer: int, n_layers: int, score: Tensor | None, pos: Tensor, ask: Ask) -> None:
        assert score is not None
        self._seen = {seen: held for seen, held in self._seen.items() if seen < layer}
        self._seen[layer] = budgets.safe(score, pos, ask.each, self.floor), pos.clone(), ask.each * pos.shape[0]
        self._chosen = {}

    def choose(self, layer: int, score: Tensor | None, pos: Tensor, ask: Ask) -> Tensor:
        if not self._chosen:
            self._choose_all()
        mask, seen = self._chosen.pop(layer)
        assert torch.equal(seen, pos), "slots moved between a look and a choice"
        return mask

    def _choose_all(self) -> None:
        scores, pos, places = zip(*self._seen.values(), strict=True)
        flat, where = (torch.cat([t.flatten() for t in many]).unsqueeze(0) for many in (scores, pos))
        mask = budgets.uniform(flat, where, sum(places))[0]
        parts = torch.split(mask, [score.numel() for score in scores])
        for layer, part, at in zip(self._seen, parts, pos, strict=True):
            self._chosen[layer] = part.view_as(at), at
        self._seen = {}
