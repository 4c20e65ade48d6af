"""Attention over slots and new rows by tables on the device, in plain PyTorch: the specification of attend_captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.merge_attention.reference import merge_attention

if TYPE_CHECKING:
    from kvcli.kernels.append_kv import Fresh
    from kvcli.kernels.attend_invariant.tables import Table, Tree
    from kvcli.kernels.merge_attention import PartialAttention


def attend_captured(
    q: Tensor,
    table: Table,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    scale: float,
    capacity: int,
    *,
    softcap: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
    before: Sequence[PartialAttention] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Compute as `attend_captured`. Read the whole capacity, and mask slots after a head's length. Unused rows: 0."""
    h, n, _ = q.shape
    n_kv, m, wide = table.start.shape[0], k.shape[1], torch.promote_types(q.dtype, torch.float32)
    opens = None if window is None else (tree.pos[-n:] - window).view(1, n, 1)
    slots = torch.arange(capacity, device=q.device)
    stored = slots < table.length.unsqueeze(1)  # [K, S]
    at = _within(table.start, slots, stored)
    seen = (stored.unsqueeze(1) & (tree.path_of >= 0).unsqueeze(1)).expand(-1, n, -1)  # [K, N, S]
    if opens is not None:
        assert table.pos is not None
        assert table.pos_start is not None
        seen = seen & (table.pos[_within(table.pos_start, slots, stored)].unsqueeze(1) > opens)
    line = _line(tree, m)
    own = line if opens is None else line & (tree.pos[:m].view(1, 1, m) > opens)
    keys, values = torch.cat([table.k[at], k], 1).to(wide), torch.cat([table.v[at], v], 1)
    shown = torch.cat([seen, own.expand(n_kv, n, m)], 2).unsqueeze(1)  # [K, 1, N, S + M]
    score = q.to(wide).view(n_kv, h // n_kv, n, -1) @ keys.unsqueeze(1).mT * scale  # [K, G, N, S + M]
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~shown, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink.to(wide).view(n_kv, -1, 1, 1).expand(-1, -1, n, 1)], 3)
    weights = torch.softmax(score, 3).nan_to_num(0.0)[..., : values.shape[1]]
    made = (weights @ values.to(wide).unsqueeze(1)).view(h, n, -1)
    if before:
        lse = torch.logsumexp(score, 3).view(h, n)
        made = merge_attention([*(part.out for part in before), made], [*(part.lse for part in before), lse])
    made = made.to(q.dtype)
    return made if out is None else torch.where((tree.path_of >= 0).view(1, n, 1), made, out)


def _within(start: Tensor, slots: Tensor, stored: Tensor) -> Tensor:
    """Return [K, S]: the index of each slot of a head; for slots that are not stored, the index of its first slot."""
    return start.unsqueeze(1) + slots * stored


def _line(tree: Tree, m: int) -> Tensor:
    """Return [1, N, M]: the new rows that each row sees."""
    rows = torch.arange(m, device=tree.depth.device)
    mine = tree.path[tree.path_of.clamp(min=0)]  # [N, depth]
    deep = torch.arange(tree.path.shape[1], device=rows.device) <= tree.depth.unsqueeze(1)
    above = (mine.unsqueeze(2) == rows) & deep.unsqueeze(2)  # [N, depth, M]
    return (above.any(1) & (tree.path_of >= 0).unsqueeze(1)).unsqueeze(0)


def store(tables: Sequence[Table], fresh: Fresh, path: Tensor, count: Tensor, pos: Tensor) -> None:
    """Commit as kernels/append_kv does, without reading `count` on the host. Slots after the last accepted row are
    rewritten unchanged, so the capacity must cover the whole length of `path`."""
    behind = torch.arange(path.shape[0], device=path.device)
    is_row, rows = behind < count, path.clamp(min=0)
    for table, (k, v) in zip(tables, fresh, strict=True):
        ends = table.length.unsqueeze(1) + behind  # [K, F]
        at = (table.start.unsqueeze(1) + ends).flatten()
        for held, new in ((table.k, k), (table.v, v)):
            given = new.index_select(1, rows).flatten(0, 1).to(held.dtype)
            held.index_copy_(0, at, torch.where(is_row.repeat(len(k)).unsqueeze(1), given, held[at]))
        assert table.pos is not None
        assert table.pos_start is not None
        at = (table.pos_start.unsqueeze(1) + ends).flatten()
        given = torch.where(is_row, pos[rows], table.pos[at].view(len(k), -1)).flatten().to(table.pos.dtype)
        table.pos.index_put_((at,), given)  # heads that share positions write the same ones
        table.length.add_(count)
