"""Attention of a few rows over the slots of some heads, a block of heads and rows at a time.

Slots are put in the order of their positions: what a row sees and what is near it are then runs of slots, and little
of the attention has to be masked. Keys in bfloat16 stay so, and so does the attention: a share of it is then right to
one part in 250, and a CPU takes a quarter of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kv.slots import Slots

CACHE = 2 << 20  # bytes of attention that a CPU works on at once
RUN = 4096  # numbers of one row from which on filling a run of memory is cheaper than a mask
NEVER = 1 << 30  # position of an empty slot: behind every row


@dataclass(frozen=True, slots=True)
class Block:
    """Which heads and which rows are looked at together."""

    heads: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class RowAttention:
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
    ) -> RowAttention:
        """q [B, m, G, D] at positions q_pos [m] over the slots of B heads, sink [B, G]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        own = q.dtype if q.dtype == s.k.dtype == torch.bfloat16 else wide
        pos = s.pos.masked_fill(s.pos < 0, NEVER).int()
        order = None if bool((pos[:, 1:] >= pos[:, :-1]).all()) else pos.argsort(1)
        k = s.k.to(own)
        if order is not None:
            pos, k = pos.gather(1, order), k.gather(1, order.unsqueeze(-1).expand_as(k))
        pos = pos[:1] if bool((pos == pos[:1]).all()) else pos
        sink = None if sink is None else sink.to(wide)[:, None, :, None]
        return RowAttention(
            (q.to(wide) * scale).to(own), q_pos.int(), k, pos.contiguous(), order, softcap, window, sink
        )

    @property
    def each(self) -> int:
        """Bytes of the attention of one row of one KV head."""
        return self.q.shape[2] * self.k.shape[1] * self.k.element_size()

    def sorted(self, flags: Tensor) -> Tensor:
        """What is said of slots [B, S], in the order of their positions."""
        return flags if self.order is None else flags.gather(1, self.order)

    def unsorted(self, flags: Tensor) -> Tensor:
        """And back."""
        return flags if self.order is None else torch.empty_like(flags).scatter_(1, self.order, flags)

    def blocks(self, most: int) -> list[Block]:
        """Heads and rows whose attention together takes so many bytes, or single rows; by heads, then by rows."""
        b, m = self.q.shape[:2]
        is_cpu = self.q.device.type == "cpu"
        at_once = max(1, (min(most, CACHE) if is_cpu else most) // max(1, self.each))
        heads = 1 if is_cpu else max(1, min(b, at_once // max(1, m)))  # a CPU has no fast product of batches
        rows = max(1, min(m, at_once // heads))
        return [
            Block(slice(h, min(h + heads, b)), slice(a, min(a + rows, m)))
            for h in range(0, b, heads)
            for a in range(0, m, rows)
        ]

    def attention(self, at: Block, guard: int = 0) -> Tensor:
        """[b, r, G, E]: softmax over the slots that each row sees and over the sink, of which the near ones count 0.

        The E slots in front are all that any of the rows sees.
        """
        q, last = self.q[at.heads, at.rows], int(self.q_pos[at.rows.stop - 1])
        end = self._slots_to(at, last, most=True)
        score = times(q.flatten(1, 2), self.k[at.heads, :end]).view(*q.shape[:3], end)
        if self.softcap > 0 or self.sink is not None:
            score = score.to(torch.promote_types(score.dtype, torch.float32))
        if self.softcap > 0:
            score = score.div_(self.softcap).tanh_().mul_(self.softcap)
        self._fill(score, at, 0, -torch.inf)
        if self.window is not None:
            passed = self._slots_to(at, last - self.window, most=True)
            away = self.q_pos[at.rows].view(1, -1, 1) - self._pos(at)[:, None, :passed]
            score[..., :passed].masked_fill_((away >= self.window).unsqueeze(2), -torch.inf)
        if self.sink is None:
            p = torch.softmax(score, -1, out=score)  # in place: fresh memory costs as much as the exponentials
        else:
            p = score.softmax(-1)
            p *= torch.sigmoid(score.logsumexp(-1, keepdim=True) - self.sink[at.heads])
        if bool((blind := self._blind(at)).any()):  # such a row has no attention to lose; softmax calls it NaN
            p.masked_fill_(blind[:, :, None, None], 0.0)
        return self.beyond(p, at, guard).to(self.k.dtype)

    def beyond(self, p: Tensor, at: Block, guard: int) -> Tensor:
        """The same attention with nothing nearer than `guard`, in place."""
        self._fill(p, at, guard, 0.0)
        return p

    def _fill(self, p: Tensor, at: Block, guard: int, value: float) -> None:
        """Slots that are nearer than `guard`, or in the future."""
        pos, reach = self._pos(at), self.q_pos[at.rows] - guard  # slots up to there are far
        start = self._slots_to(at, int(reach[0]))
        if pos.shape[0] == 1 and p.device.type == "cpu" and p.shape[2] * (p.shape[-1] - start) > RUN:
            for row, far in enumerate(torch.searchsorted(pos[0], reach, right=True).tolist()):
                p[:, row, :, far:].fill_(value)
        else:
            p[..., start:].masked_fill_((pos[:, None, start : p.shape[-1]] > reach.view(1, -1, 1)).unsqueeze(2), value)

    def _pos(self, at: Block) -> Tensor:
        """[b or 1, S]."""
        return self.pos if self.pos.shape[0] == 1 else self.pos[at.heads]

    def _slots_to(self, at: Block, position: int, most: bool = False) -> int:
        """How many slots every head (`most`: some head) has up to a position."""
        counts = torch.searchsorted(pos := self._pos(at), pos.new_full((pos.shape[0], 1), position), right=True)
        return int(counts.max() if most else counts.min())

    def _blind(self, at: Block) -> Tensor:
        """[b or 1, r] bool: rows that see no slot."""
        pos = self._pos(at)
        q_pos = self.q_pos[at.rows].expand(pos.shape[0], -1).contiguous()
        seen = torch.searchsorted(pos, q_pos, right=True)
        if self.window is not None:
            seen -= torch.searchsorted(pos, q_pos - self.window, right=True)
        return seen == 0


def times(a: Tensor, b: Tensor) -> Tensor:
    """a [B, r, x] @ b [B, n, x] transposed -> [B, r, n]."""
    if a.shape[0] == 1:  # the product of two matrices is several times faster than that of batches of one, on a CPU
        return functional.linear(a[0], b[0]).unsqueeze(0)
    return a @ b.transpose(1, 2)
