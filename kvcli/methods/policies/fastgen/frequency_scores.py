"""Attention scores of frequent tokens: one float and one position per token.

They are stored only for heads that keep frequent tokens, and for those tokens only: at head size 128, 8 bytes per slot
next to 512 bytes of keys and values in bf16. The engine passes the queries of tokens accepted since the last
compression point, so rejected draft tokens never count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.policy.policy import LayerContext
from kvcli.kv.slots import Slots
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.methods.policies.fastgen.recovery import CandidateSets
from kvcli.methods.policies.fastgen.recovery_attention import RowAttention

if TYPE_CHECKING:
    from kvcli.methods.policies.fastgen.settings import FastGenSettings


class Scores:
    """Attention scores of one layer. Rows score only tokens beyond the guard, because the newest are kept anyway."""

    def __init__(self, far: Tensor, rows: Tensor, upto: int, sets: CandidateSets, settings: FastGenSettings) -> None:
        """Start with `far` [K, S]: attention by rows at positions `rows` [m] of the first `upto` tokens.

        A score is the attention per row that could attend to the token; as published the sum, which favours old tokens.
        """
        self._guard, self._most, self._decay = sets.guard, sets.most, settings.score_decay
        self._is_rate, self._upto = not settings.paper, upto
        self._pending = far  # scores of all slots, until `bind` selects slots
        self._rows = rows  # positions of all rows added, rising
        self._weight = torch.ones_like(rows, dtype=far.dtype)  # weight of each row
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # head -> positions [P] rising, score [P]

    def state(self) -> State:
        """Return the scores between two compression points, when no score is pending."""
        held: State = {str(j): {"pos": pos, "score": score} for j, (pos, score) in self._held.items()}
        return {"upto": self._upto, "rows": self._rows, "weight": self._weight, "held": held}

    @staticmethod
    def made(
        given: SnapshotReader, sets: CandidateSets, settings: FastGenSettings, heads: int, device: torch.device
    ) -> Scores:
        """Build the scores from `state()` of a layer with `heads` KV heads. Raises SnapshotMismatch."""
        rows = given.tensor("rows", torch.int64, None).to(device)
        weight = given.floats("weight", len(rows)).to(device)
        new = Scores(weight.new_zeros(heads, 0), rows, given.number("upto", given.n), sets, settings)
        new._weight = weight
        for j in range(heads):
            if str(j) in given.part("held"):
                one = given.part("held").part(str(j))
                pos = one.positions("pos", None)
                new._held[j] = pos.to(device), one.tensor("score", torch.float32, len(pos)).to(device)
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of the scores, without the rows that all heads share."""
        return sum(t.untyped_storage().nbytes() for pair in self._held.values() for t in pair)

    def add(self, s: Slots, at: LayerContext, wanted: Tensor) -> Tensor:
        """Add the rows since the last call and return the scores [K, S] of the heads in `wanted` [K]."""
        fresh = (at.q_pos >= self._upto).nonzero()[:, 0]
        q, pos = at.q[:, fresh], at.q_pos[fresh]
        late = torch.full_like(pos, self._decay, dtype=self._weight.dtype) ** (at.kinds.shape[0] - 1 - pos)
        shrink = self._decay ** fresh.shape[0]
        score = torch.zeros_like(s.pos, dtype=self._weight.dtype)
        group = q.shape[0] // s.k.shape[0]
        for j in wanted.nonzero()[:, 0].tolist():
            rows = q[j * group : (j + 1) * group].transpose(0, 1).unsqueeze(0)  # [1, r, G, D]
            head = Slots(s.k[j : j + 1], s.v[j : j + 1], s.pos[j : j + 1])
            look = RowAttention.of(rows, pos, head, at.scale, at.softcap, at.window)
            looked = torch.zeros_like(score[j : j + 1])
            for some in look.blocks(self._most):
                p = look.attention(some, self._guard)[0]  # [r, G, E]
                looked[0, : p.shape[-1]] += torch.einsum("r,rgs->s", late[some.rows], p.to(late.dtype)) / group
            score[j] = self._of(j, s.pos[j]) * shrink + look.unsorted(looked)[0]
        self._rows = torch.cat((self._rows, pos))
        self._weight = torch.cat((self._weight * shrink, late))
        self._upto, self._pending = at.kinds.shape[0], score
        return score / self._seen(s.pos) if self._is_rate else score

    def bind(self, s: Slots, wanted: Tensor, chosen: Tensor) -> None:
        """Store the scores of the chosen slots [K, S] of heads in `wanted` [K] and drop all others."""
        score, self._pending = self._pending, self._pending[:, :0]
        self._held = {}
        for j in wanted.nonzero()[:, 0].tolist():
            pos, order = s.pos[j][chosen[j]].sort()
            self._held[j] = pos.to(torch.int32), score[j][chosen[j]][order].float()

    def _of(self, head: int, pos: Tensor) -> Tensor:
        """Return the stored scores [S] of one head at these positions; 0 where none is stored."""
        if head not in self._held or not self._held[head][0].shape[0]:
            return torch.zeros_like(pos, dtype=self._weight.dtype)
        known, score = self._held[head]
        pos = pos.to(known.dtype)
        i = torch.searchsorted(known, pos).clamp(max=known.shape[0] - 1)
        return torch.where(known[i] == pos, score[i], 0.0).to(self._weight.dtype)

    def _seen(self, pos: Tensor) -> Tensor:
        """Return the summed weight [K, S] of the rows at least `guard` after each position; at least 1."""
        behind = torch.cat((self._weight.flip(0).cumsum(0).flip(0), self._weight.new_zeros(1)))  # [R + 1]
        return behind[torch.searchsorted(self._rows, pos.to(self._rows.dtype) + self._guard)].clamp(min=1.0)
