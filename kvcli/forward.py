"""One pass: rows through the model, attending to the past, a view and each other.

The seam to transformers is the function `attention`, registered once, and the keyword argument `kvcli_pass`, which
every decoder layer hands through to it. Layers, rotary embeddings, norms and the head stay transformers' own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.kernels.attend_fresh import attend_fresh
from kvcli.kernels.merge import Part, merge
from kvcli.kv.slots import Readable, Sight, Store
from kvcli.rows import Rows

if TYPE_CHECKING:
    from kvcli.model import LM


class _Enough(Exception):
    """Ends a pass early: all that was wanted of it is there."""


class Pass:
    """One trip of rows through the model; what it made stays here until its rows are accepted."""

    def __init__(
        self,
        rows: Rows,
        past: Store,
        view: Readable | None = None,
        hear: list[int] | None = None,
        *,
        is_prompt: bool = False,
    ) -> None:
        self.rows = rows
        self.past = past  # what tree rows read
        self.view = view  # what scout rows read; None = past
        self.hear = hear  # rows whose queries to hold on to, for policies; None = none
        self.is_prompt = is_prompt  # the rows are of a text being read: no tier leaves anything out for them
        self.fresh: list[tuple[Tensor, Tensor]] = []  # per layer k, v [K, N, D], never in the store
        self.queries: list[Tensor] = []  # per layer q [H, len(hear), D]
        self.last = -1  # the layer after which nothing more is wanted; -1 = run to the logits
        self._banded: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sink: Tensor | None) -> Tensor:
        """One layer: q [H, N, D], k, v [K, N, D] after rotary embedding -> [H, N, D].

        No mask over the past exists: every stored slot is older than every row, so the only mask is N x N. All is
        read in the store's numbers: a guess must see its ancestors as it will once they are stored.
        """
        q, k, v = (t.to(self.past.dtype) for t in (q, k, v))
        assert layer == len(self.fresh), "layers run in order, once"
        self.fresh.append((k, v))
        tree, pos = self.rows.tree, self.rows.pos
        if self.hear is not None:
            self.queries.append(q[:, self.hear])  # a copy: a slice would keep all rows alive
        if layer == self.last:
            raise _Enough
        if self.is_prompt:
            sight = replace(sight, is_prompt=True)
        parts = self.past.attend(layer, q[:, :tree], sight, pos[:tree])
        if tree < self.rows.n_rows:
            scouts = (self.view or self.past).attend(layer, q[:, tree:], sight, pos[tree:])
            parts = _beside(parts, tree, scouts, self.rows.n_rows, q)
        parts.append(attend_fresh(q, k, v, sight.scale, self._sees(sight.window), softcap=sight.softcap))
        if sink is not None:  # a learned logit that takes mass and gives nothing (gpt-oss)
            lse = sink.to(parts[-1].lse.dtype).unsqueeze(-1).expand(-1, q.shape[1])
            parts.append(Part(torch.zeros_like(parts[-1].out), lse))
        return merge(parts)

    def commit(self, path: list[int], most: float = float("inf")) -> None:
        """Store the accepted rows' keys and values; the others vanish with the pass.

        `most` is how many rows may be accepted before the next boundary: a draft never crosses one.
        """
        assert len(path) <= most, "a draft crossed a boundary"
        if not path:
            return
        pos = self.rows.pos[path[0] : path[-1] + 1] if _is_run(path) else self.rows.pos[path]
        for layer, (k, v) in enumerate(self.fresh):
            if _is_run(path):
                k, v = k[:, path[0] : path[-1] + 1], v[:, path[0] : path[-1] + 1]
            else:
                k, v = k[:, path], v[:, path]
            self.past.append(layer, k, v, pos)

    def _sees(self, window: int | None) -> Tensor | None:
        """Which fresh rows a row sees in a layer with this window; None = plain causal."""
        if window is None or self.rows.n_rows <= 1:
            return self.rows.sees
        if window not in self._banded:
            self._banded[window] = _band(self.rows, window)
        return self._banded[window]


def run(lm: LM, p: Pass, want: Tensor) -> Tensor:
    """Send the pass's rows through the model -> logits [len(want), V] of the rows indexed by `want`.

    With no row wanted, as in reading, the pass ends where the last layer has its keys and values: the rest of that
    layer and the head would be thrown away.
    """
    if not want.shape[0]:
        p.last = lm.n_layers - 1
    try:
        with torch.inference_mode():
            out = lm.model(
                input_ids=p.rows.ids.unsqueeze(0),
                position_ids=p.rows.pos.unsqueeze(0),
                use_cache=False,
                logits_to_keep=want,
                kvcli_pass=p,
            )
    except _Enough:
        return torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)
    logits: Tensor = out.logits[0]
    return logits


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kvcli_pass: Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers: [1, H, N, D], [1, K, N, D] -> [1, N, H, D]."""
    sight = sight_of(query, scaling, softcap, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = kvcli_pass.attend(layer, query[0], key[0], value[0], sight, s_aux)
    return out.transpose(0, 1).unsqueeze(0).to(query.dtype).contiguous(), None


def sight_of(query: Tensor, scaling: float | None, softcap: float | None, window: int | None) -> Sight:
    """How a layer looks at slots, from what it hands to its attention function; query [.., D]."""
    return Sight(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap or 0.0, window)


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function registered with transformers: we never need one of theirs."""
    return


def _is_run(path: list[int]) -> bool:
    return path[-1] - path[0] == len(path) - 1


def _band(rows: Rows, window: int) -> Tensor | None:
    """[N, N]: what `sees` allows and the window does not hide; None when the window hides nothing."""
    pos = rows.pos
    if int(pos.max() - pos.min()) < window:
        return rows.sees
    sees = rows.sees
    if sees is None:
        n = rows.n_rows
        sees = torch.ones(n, n, dtype=torch.bool, device=pos.device).tril()
    return sees & (pos.view(1, -1) > (pos - window).view(-1, 1))


def _beside(parts: list[Part], tree: int, scouts: list[Part], n: int, q: Tensor) -> list[Part]:
    """Parts of the tree rows and parts of the scout rows as parts of all n rows: each sees nothing of the other's."""
    wide = []
    for part, a, b in [*((p, 0, tree) for p in parts), *((p, tree, n) for p in scouts)]:
        out = part.out.new_zeros(q.shape[0], n, part.out.shape[2])
        lse = part.lse.new_full((q.shape[0], n), -torch.inf)
        out[:, a:b], lse[:, a:b] = part.out, part.lse
        wide.append(Part(out, lse))
    return wide
