"""Attention of a few rows over the slots of some heads, a block of rows at a time.

Slots are put in the order of their positions: what a row sees and what is near it are then runs of slots, and little
of the attention has to be masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kv.slots import Slots

CACHE = 2 << 20  # bytes of attention that a CPU works on at once
NEVER = 1 << 30  # position of an empty slot: behind every row


def at_once(like: Tensor, most: int) -> int:
    """Bytes of attention to work on at once: what stays in a CPU's cache, or as much as there may be."""
    return min(most, CACHE) if like.device.type == "cpu" else most


@dataclass(frozen=True, slots=True)
class Look:
    """Rows over the slots of B heads, in the order of their positions: what a row sees, and what is near, is a run."""

    q: Tensor  # [B, m, G, D], scaled
    q_pos: Tensor  # [m] int32, rising
    k: Tensor  # [B, S, D]
    pos: Tensor  # [B, S] int32, rising, or [1, S] where all heads store the same; NEVER = empty
    order: Tensor | None  # [B, S] where each came from; None = as they lay
    softcap: float
    window: int | None
    sink: Tensor | None  # [B, 1, G, 1]

    @staticmethod
    def of(
        q: Tensor, q_pos: Tensor, s: Slots, scale: float, softcap: float, window: int | None, sink: Tensor | None = None
    ) -> Look:
        """q [B, m, G, D] at positions q_pos [m] over the slots of B heads, sink [B, G]."""
        exact = torch.promote_types(q.dtype, torch.float32)
        pos = s.pos.masked_fill(s.pos < 0, NEVER).int()
        order = None if bool((pos[:, 1:] >= pos[:, :-1]).all()) else pos.argsort(1)
        k = s.k.to(exact)
        if order is not None:
            pos, k = pos.gather(1, order), k.gather(1, order.unsqueeze(-1).expand_as(k))
        pos = pos[:1] if bool((pos == pos[:1]).all()) else pos
        sink = None if sink is None else sink.to(exact)[:, None, :, None]
        return Look(q.to(exact) * scale, q_pos.int(), k, pos.contiguous(), order, softcap, window, sink)

    def sorted(self, flags: Tensor) -> Tensor:
        """What is said of slots [B, S], in the order of their positions."""
        return flags if self.order is None else flags.gather(1, self.order)

    def unsorted(self, flags: Tensor) -> Tensor:
        """And back."""
        return flags if self.order is None else torch.empty_like(flags).scatter_(1, self.order, flags)

    def attention(self, rows: slice, guard: int = 0) -> Tensor:
        """[B, r, G, E]: softmax over the slots that each row sees and over the sink, of which the near ones count 0.

        The E slots in front are all that any of the rows sees.
        """
        q, (first, last) = self.q[:, rows], self.q_pos[rows][[0, -1]].tolist()
        end = self._slots_to(last, most=True)
        score = (q.flatten(1, 2) @ self.k[:, :end].transpose(1, 2)).view(*q.shape[:3], end)
        if self.softcap > 0:
            score = score.div_(self.softcap).tanh_().mul_(self.softcap)
        self._fill(score, rows, self._slots_to(first), 0, -torch.inf)
        if self.window is not None:
            passed = self._slots_to(last - self.window, most=True)
            away = self.q_pos[rows].view(1, -1, 1) - self.pos[:, None, :passed]
            score[..., :passed].masked_fill_((away >= self.window).unsqueeze(2), -torch.inf)
        p = score.softmax(-1)
        if self.sink is not None:
            p *= torch.sigmoid(score.logsumexp(-1, keepdim=True) - self.sink)
        if bool((blind := self._blind(rows)).any()):  # such a row has no attention to lose; softmax calls it NaN
            p.masked_fill_(blind[:, :, None, None], 0.0)
        return self.beyond(p, rows, guard)

    def beyond(self, p: Tensor, rows: slice, guard: int) -> Tensor:
        """The same attention with nothing nearer than `guard`, in place."""
        self._fill(p, rows, self._slots_to(int(self.q_pos[rows.start]) - guard), guard, 0.0)
        return p

    def blocks(self, most: int) -> list[slice]:
        """Rows whose attention together takes so many bytes, or single rows."""
        b, m, g, _ = self.q.shape
        step = max(1, at_once(self.q, most) // max(1, 4 * b * g * self.k.shape[1]))
        return [slice(a, min(a + step, m)) for a in range(0, m, step)]

    def _fill(self, p: Tensor, rows: slice, start: int, guard: int, value: float) -> None:
        """Slots from `start` on that are nearer than `guard`, or in the future."""
        away = self.q_pos[rows].view(1, -1, 1) - self.pos[:, None, start : p.shape[-1]]
        p[..., start:].masked_fill_((away < guard).unsqueeze(2), value)

    def _slots_to(self, position: int, most: bool = False) -> int:
        """How many slots every head (`most`: some head) has up to a position."""
        counts = (self.pos <= position).sum(1)
        return int(counts.max() if most else counts.min())

    def _blind(self, rows: slice) -> Tensor:
        """[B or 1, r] bool: rows that see no slot."""
        q_pos = self.q_pos[rows].expand(self.pos.shape[0], -1).contiguous()
        seen = torch.searchsorted(self.pos, q_pos, right=True)
        if self.window is not None:
            seen -= torch.searchsorted(self.pos, q_pos - self.window, right=True)
        return seen == 0
