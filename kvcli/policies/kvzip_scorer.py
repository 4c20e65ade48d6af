"""How much each slot is looked at while the model repeats its text (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.errors import ContextOverflow
from kvcli.kernels.column_mass import column_mass
from kvcli.kv.slots import compact
from kvcli.policies.scorers import Deaf

if TYPE_CHECKING:
    from kvcli.kv.slots import Slots
    from kvcli.model import LM
    from kvcli.policies.base import Moment


@dataclass
class Repeated(Deaf):
    """The highest attention of the queries that repeat a piece, over the query heads of a KV head too."""

    piece: int  # tokens a pass
    lead: int  # tokens before a piece that it begins with
    sinks: int
    _limit: int = 0  # tokens that the model takes; 0 = it met none
    _pieces: list[tuple[int, int]] = field(default_factory=list)
    _score: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, T]; 1/D of the text's keys and values
    _turn: dict[int, int] = field(default_factory=dict)  # layer -> pieces heard

    def meet(self, lm: LM) -> None:
        self._limit = lm.limit

    def start(self) -> None:
        self._score = {}

    def rereads(self, first: int, n: int) -> Sequence[tuple[int, int]]:
        """Pieces that fit behind the text; raises ContextOverflow where none does."""
        room = self._limit - n if self._limit else self.piece + self.lead
        size = min(self.piece, room - self.lead)
        if size < 1:
            raise ContextOverflow(
                f'policy.name = "kvzip" repeats the text behind itself, but {n:,} tokens leave room for {room:,}',
                lines=[f"the model takes {self._limit:,} tokens, and a repeated piece {self.lead + 1} at least"],
                try_=["--set policy.name=expected", "a shorter text"],
            )
        starts = range(first, n, size)
        self._pieces, self._turn = [(start, min(start + size, n)) for start in starts], {}
        self._score = {layer: score[:, :first] for layer, score in self._score.items()}
        return [(max(0, start - self.lead), end) for start, end in self._pieces]

    def reread(self, s: Slots, fresh: Slots, at: Moment) -> None:
        turn = self._turn.get(at.layer, 0)
        self._turn[at.layer] = turn + 1
        start, end = self._pieces[turn]
        near = compact(s, (s.pos < self.sinks) | ((s.pos >= start) & (s.pos < end)))
        k, pos = (
            torch.cat((near.k, fresh.k.to(near.k.dtype)), 1),
            torch.cat((near.pos, fresh.pos.to(near.pos.dtype)), 1),
        )
        mass = column_mass(at.q, at.q_pos, k, pos, at.scale, softcap=at.softcap, over="max")[:, : near.n_slots]
        score = mass.new_zeros(mass.shape[0], end)
        if (before := self._score.get(at.layer)) is not None:
            score[:, : before.shape[1]] = before
        where = near.pos.clamp(min=0).long()
        self._score[at.layer] = score.scatter_reduce_(1, where, mass.masked_fill(near.pos < 0, 0.0), "amax")

    def __call__(self, s: Slots, at: Moment) -> Tensor:
        score = self._score[at.layer]
        return score.gather(1, s.pos.clamp(min=0).long())
