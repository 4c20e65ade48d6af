"""Attention of a few rows over the slots of some heads, computed in blocks of heads and rows.

Slots are sorted by position. The visible slots of a row and the slots near it are then contiguous ranges, so that
little of the attention has to be masked. With keys in bfloat16 the attention is bfloat16, too: its values are then
accurate to one part in 250, and a CPU takes a quarter of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kv.slots import Slots

CACHE = 2 << 20  # bytes of attention per block on a CPU
RUN = 4096  # numbers of one row from which on filling contiguous memory is cheaper than a mask
NEVER = 1 << 30  # position of an empty slot: after every row


@dataclass(frozen=True, slots=True)
class Block:
    """A block of heads and rows whose attention is computed together."""

    heads: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class RowAttention:
    """Attention of rows over the slots of B heads, sorted by position: visible and near slots are contiguous."""

    q: Tensor  # [B, m, G, D], scaled
    q_pos: Tensor  # [m] int32, rising
    k: Tensor  # [B, S, D]
    pos: Tensor  # [B, S] int32, rising, or [1, S] if all heads store the same positions; NEVER = empty
    order: Tensor | None  # [B, S] original index of each slot; None = order unchanged
    softcap: float
    window: int | None
    sink: Tensor | None  # [B, 1, G, 1]

    @staticmethod
    def of(
        q: Tensor, q_pos: Tensor, s: Slots, scale: float, softcap: float, window: int | None, sink: Tensor | None = None
    ) -> RowAttention:
        """Build it from q [B, m, G, D] at positions q_pos [m], the slots of B heads and sink logits [B, G]."""
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
        """Reorder values of slots [B, S] from slot order to position order."""
        return flags if self.order is None else flags.gather(1, self.order)

    def unsorted(self, flags: Tensor) -> Tensor:
        """Reorder values of slots [B, S] from position order back to slot order."""
        return flags if self.order is None else torch.empty_like(flags).scatter_(1, self.order, flags)

    def blocks(self, most: int) -> list[Block]:
        """Return blocks whose attention takes at most `most` bytes (at least one row); by heads, then by rows."""
        b, m = self.q.shape[:2]
        is_cpu = self.q.device.type == "cpu"
        at_once = max(1, (min(most, CACHE) if is_cpu else most) // max(1, self.each))
        heads = 1 if is_cpu else max(1, min(b, at_once // max(1, m)))  # batched matmul is slow on a CPU
        rows = max(1, min(m, at_once // heads))
        return [
            Block(slice(h, min(h + heads, b)), slice(a, min(a + rows, m)))
            for h in range(0, b, heads)
            for a in range(0, m, rows)
        ]

    def attention(self, at: Block, guard: int = 0) -> Tensor:
        """Return the softmax [b, r, G, E] over the visible slots and the sink, with slots nearer than `guard` set to 0.

        The first E slots are all that any row of the block can attend to.
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
            p = torch.softmax(score, -1, out=score)  # in place: allocating memory costs as much as the exponentials
        else:
            p = score.softmax(-1)
            p *= torch.sigmoid(score.logsumexp(-1, keepdim=True) - self.sink[at.heads])
        if bool((blind := self._blind(at)).any()):  # such a row has no attention to lose; its softmax is NaN
            p.masked_fill_(blind[:, :, None, None], 0.0)
        return self.beyond(p, at, guard).to(self.k.dtype)

    def beyond(self, p: Tensor, at: Block, guard: int) -> Tensor:
        """Set the attention to slots nearer than `guard` to 0, in place."""
        self._fill(p, at, guard, 0.0)
        return p

    def _fill(self, p: Tensor, at: Block, guard: int, value: float) -> None:
        """Set the entries of slots nearer than `guard`, or in the future, to `value`."""
        pos, reach = self._pos(at), self.q_pos[at.rows] - guard  # positions up to here are beyond the guard
        start = self._slots_to(at, int(reach[0]))
        if pos.shape[0] == 1 and p.device.type == "cpu" and p.shape[2] * (p.shape[-1] - start) > RUN:
            for row, far in enumerate(torch.searchsorted(pos[0], reach, right=True).tolist()):
                p[:, row, :, far:].fill_(value)
        else:
            p[..., start:].masked_fill_((pos[:, None, start : p.shape[-1]] > reach.view(1, -1, 1)).unsqueeze(2), value)

    def _pos(self, at: Block) -> Tensor:
        """Return the positions of the block's heads [b or 1, S]."""
        return self.pos if self.pos.shape[0] == 1 else self.pos[at.heads]

    def _slots_to(self, at: Block, position: int, most: bool = False) -> int:
        """Return how many slots every head (`most`: any head) has up to a position."""
        counts = torch.searchsorted(pos := self._pos(at), pos.new_full((pos.shape[0], 1), position), right=True)
        return int(counts.max() if most else counts.min())

    def _blind(self, at: Block) -> Tensor:
        """Return a mask [b or 1, r] of the rows without a visible slot."""
        pos = self._pos(at)
        q_pos = self.q_pos[at.rows].expand(pos.shape[0], -1).contiguous()
        seen = torch.searchsorted(pos, q_pos, right=True)
        if self.window is not None:
            seen -= torch.searchsorted(pos, q_pos - self.window, right=True)
        return seen == 0


def times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [B, r, x] by b [B, n, x] transposed -> [B, r, n]."""
    if a.shape[0] == 1:  # on a CPU a plain matmul is several times faster than a batched one of batch size 1
        return functional.linear(a[0], b[0]).unsqueeze(0)
    return a @ b.transpose(1, 2)
