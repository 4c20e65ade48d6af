"""Sparse attention over a tier: rows read only the pages that they select. The result is approximate.

Quest (arXiv 2406.10774), ArkVale and YAKV work this way. Rows always read the attention sinks, the newest tokens, the
slots stored since the last compression point, and all higher tiers of a tiered cache.

The selection of a row depends only on its own query and on the slots stored at the last compression point, not on other
rows of the pass or on which of its ancestors are committed. So any draft gives the same text as plain decoding over
the same cache. For the same reason an error bound (`certified`) covers only slots stored at the compression point.

Alternatively the first row after a compression point selects for all rows until the next one (LouisKV, arXiv
2510.11292, also selects only now and then, and ActQKV, arXiv 2502.13542, by one query per window). No draft crosses a
compression point, so this row is the same for any draft, and is the first of its pass. Draft rows and the drift of
later queries do not affect the selection.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import (
    WIDEST,
    NewRows,
    SelectedPages,
    StoredKV,
    attend_part,
    attend_stored_and_new,
    serves,
    serves_chosen,
)
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.page_scores import log_masses
from kvcli.kv.slots import AttentionParams, KVCache, Loss, Masks, Slots, Tier, Usage, attend_new_only, visible
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.page_source import PageSource
from kvcli.kv.sparse.pages import PageBudget, PageCache, Pages, padded
from kvcli.kv.tiers.device_tables import DeviceCache

UNREAD: Loss = "unread"
BY_ROW = "tokens select the pages they read (sparse.method)"  # why passes are not captured
AHEAD = 0.25  # prefetched pages (the best that no row selected), as a share of the pages that a row may select
ROWS = 64  # rows that select pages at a time, at most
SCORES = 1 << 26  # scores computed at a time; method `cluster` has one per slot


@dataclass(slots=True)
class PageStats:
    """Counts of page selections, over all layers and KV heads."""

    asked: int = 0  # selections, one per row and KV head
    streamed: int = 0  # selections that read all slots, because the error bound was exceeded
    pages: int = 0  # units selected by a pass
    again: int = 0  # selected units that the previous pass had also selected


class SparseTier:
    """A tier whose decoding rows read selected pages; prefill rows read all slots.

    In layers with a sliding window, and in layers not listed, rows read all slots.
    """

    _of_prompts = False  # rows of a prompt select, all of a pass at once, and those of an answer read all slots

    def __init__(
        self,
        tier: Tier,
        index: PageIndex,
        budget: PageBudget,
        layers: Collection[int],
        *,
        source: PageSource,
        epsilon: float | None = None,
        cutoff: float = 0.0,
        is_shared: bool = False,
    ) -> None:
        """`source`: read access to single slots of the tier.
        `epsilon`: a row that may miss more than this share of its softmax mass over stored slots reads all of them.
        `cutoff`: units whose score is below this share of a row's mass are not read, even if the budget allows.
        `is_shared`: the first row after a compression point selects for all rows until the next one."""
        assert epsilon is None or index.is_bound, "an error bound is set, but scores of the index are no bounds"
        self._tier, self._index, self._epsilon = tier, index, epsilon
        self._source = source
        gather_async = self._source.gather_async
        self._near = PageCache(self._source.gather, gather_async) if gather_async is not None else None
        self._pages = {layer: Pages(index, budget) for layer in sorted(layers)}
        self._late = dict.fromkeys(self._pages, 0)  # slots per head stored since the compression point
        self._chosen: dict[int, Tensor] = {}  # [K, X] selected by the last pass
        self._least = math.log(cutoff) if cutoff else -math.inf
        self._is_shared = is_shared
        self._choice: dict[int, Tensor] = {}  # [K, 1, X] of the first row after the compression point
        self.tally = PageStats()

    @property
    def batch_variant_reason(self) -> str:
        """Reason of the tier. Sparse attention adds none: the choice of kernels depends on data types alone."""
        return self._tier.batch_variant_reason

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Attend from rows q [H, N, D] at positions pos [N] to selected pages, newer slots and new KV `own`."""
        pages = self._pages.get(layer)
        if pages is None or pages.reads_all or params.window is not None or params.is_prompt != self._of_prompts:
            return self._tier.attend(layer, q, params, pos, own)
        rows = q.shape[1] if self._of_prompts else min(ROWS, max(1, SCORES // (q.shape[0] * pages.open.shape[1])))
        parts = [self._recall(layer, pages, q[:, a : a + rows], params) for a in range(0, q.shape[1], rows)]
        if len(parts) > 1:
            parts = [PartialAttention(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))]
        n = self._late[layer]
        if own is not None and serves(q, own.v):
            with_old, late = replace(own, before=[*own.before, *parts]), self._newest(layer, n) if n else None
            return [attend_stored_and_new(q, late, with_old, pos, params.scale, window=None, softcap=params.softcap)]
        if n:
            s = _here(self._tier.newest(layer, n), q)
            parts = [*parts, attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, None))]
        return [*parts, *attend_new_only(q, params, own)]

    def device_layer(self, layer: int) -> str:
        return BY_ROW

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store accepted rows, which all rows read until the next compression point."""
        self._tier.append(layer, k, v, start)
        if layer in self._late:
            self._late[layer] += k.shape[1]

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots demoted from another tier after present slots and summarize them, as at a compression point."""
        self._tier.take(layer, slots)
        self._learn([layer])

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head."""
        return self._tier.n_slots(layer)

    def slots(self, layer: int) -> Slots:
        """Return the slots of the tier."""
        return self._tier.slots(layer)

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last."""
        return self._tier.newest(layer, n)

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask is False and return them; the remaining slots are summarized again."""
        if layer in self._pages and bool(((self._source.positions(layer) >= 0) & ~mask).any()):
            self._pages[layer].clear()  # first, so that no page refers to old slots if the tier fails halfway
            self._forget(layer)
        fell = self._tier.evict_except(layer, mask)
        self._learn([layer])
        return fell

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later."""
        before = {layer: self._source.positions(layer).clone() for layer, p in self._pages.items() if p.whole.numel()}
        for layer in self._pages:
            self._forget(layer)
        self._tier.crop(n)
        for layer, pos in before.items():
            self._pages[layer].crop(pos, layer, self._source)
        self._learn(self._pages)

    def snapshot(self) -> State:
        """Snapshot the tier and the shared values of the index; `restore` summarizes the pages again."""
        return {"tier": self._tier.snapshot(), "pages": {str(i): pages.state() for i, pages in self._pages.items()}}

    def restore(self, given: SnapshotReader) -> None:
        """Restore the tier and summarize its pages: the state is that after `crop`, which begins every question."""
        self._tier.restore(given.part("tier"))
        for layer, pages in self._pages.items():
            pages.restore(given.part("pages").part(str(layer)), layer, self._source)
        self._learn(self._pages)

    def usage(self) -> list[Usage]:
        """Return the usage of the tier, with the index and the page cache as separate tiers."""
        found = self._tier.usage()
        for layer, p in self._pages.items():
            last = [each[layer] for each in (self._chosen, self._choice) if layer in each]
            size, lost = _nbytes([*p.tensors, *last]), None if p.reads_all else UNREAD
            found.append(Usage(layer, "index", p.last.shape[1] * self._index.page, size, lost))
            if self._near is not None:
                found.append(Usage(layer, "near", 0, self._near.nbytes(layer)))
        if self._near is not None and found:
            found[-1] = replace(found[-1], asked=self._near.asked, found=self._near.found)  # counts of all layers
        return found

    def _forget(self, layer: int) -> None:
        if self._near is not None:
            self._near.forget(layer)

    def _learn(self, layers: Iterable[int]) -> None:
        """Run a compression point of these layers: update pages and clear selections."""
        for layer in layers:
            if layer in self._pages:
                self._forget(layer)
                self._pages[layer].settle(layer, self._source)
                self._late[layer] = 0
                self._chosen.pop(layer, None)
                self._choice.pop(layer, None)

    def _recall(self, layer: int, pages: Pages, q: Tensor, params: AttentionParams) -> PartialAttention:
        """Attend from q [H, N, D] to the selected pages, or to all slots if the error bound is exceeded."""
        n_kv, (h, n, d) = pages.whole.shape[0], q.shape
        rows = q.reshape(n_kv, h // n_kv, n, d)
        is_shared = self._is_shared and not params.is_draft  # drafts over a separate cache precede the first row
        chosen, score = self._choice.get(layer) if is_shared else None, None
        if chosen is None or self._epsilon is not None:
            score = self._index.score(rows.flatten(1, 2), pages.kept, pages.shared, params)
            score = score.view(*rows.shape[:3], -1)  # [K, G, N, X]
        if chosen is None:
            assert score is not None
            chosen = _choose(score[:, :, :1] if is_shared else score, pages, self._least)  # [K, N or 1, X]
            if is_shared:
                self._choice[layer] = chosen
        self._count(layer, chosen, n)
        chosen = chosen.expand(-1, n, -1).contiguous()
        part = self._read(layer, pages, q, chosen, params, score)
        if self._epsilon is not None:
            assert score is not None
            missed = log_masses(score, pages.held.unsqueeze(1) & ~chosen)  # [K, G, N]
            out, lse = (t.view(*rows.shape[:3], *t.shape[2:]) for t in (part.out, part.lse))
            refused = _refused(missed, lse, self._epsilon)
            self._stream(layer, pages, rows, refused, PartialAttention(out, lse), params)
        return part

    def _newest(self, layer: int, n: int) -> StoredKV:
        """Return the n slots that each head stored last, in place if possible."""
        run = self._source.run(layer)
        if run is None:
            return _run_of(self._tier.newest(layer, n))
        first = [length - n for length in run.lengths]
        starts, at = ([a + b for a, b in zip(x, first, strict=True)] for x in (run.starts, run.pos_starts))
        return replace(run, starts=starts, pos_starts=at, lengths=[n] * len(starts))

    def _read(
        self, layer: int, pages: Pages, q: Tensor, chosen: Tensor, params: AttentionParams, score: Tensor | None
    ) -> PartialAttention:
        """Attend from each row to its own selection, as a separate sequence, so that the result is batch invariant.

        `chosen` [K, N, X], or [K, 1, X] for all rows. Without such a kernel, all rows attend to the union of their
        selections, each masked to its own.
        """
        grain, n_rows = self._index.selection_unit, q.shape[1]
        first = pages.whole * self._index.page
        behind, left = first.tolist(), (pages.ends - first).tolist()
        scale, softcap = params.scale, params.softcap
        pos = [0] * n_rows  # row positions are not used
        run = None if self._near is not None else self._source.run(layer)
        if run is not None and serves_chosen(q, run.v):
            return attend_part(q, run, pos, scale, softcap=softcap, chosen=SelectedPages(chosen, grain, behind, left))
        union = padded(chosen.any(1))  # [K, U]
        index = torch.cat((pages.slots_of(union), pages.behind()), 1)
        if self._near is None:
            s = _here(self._source.gather(layer, index), q)
        else:
            ahead = None if score is None else pages.slots_of(_nearly(score, chosen, pages))
            s = _here(self._near.gather(layer, index, ahead), q)
        in_union = _among(chosen, union)  # [K, N, U]
        if serves_chosen(q, s.v):
            each = SelectedPages(in_union, grain, [union.shape[1] * grain] * len(left), left)
            return attend_part(q, _run_of(s), pos, scale, window=WIDEST, softcap=softcap, chosen=each)
        shown = torch.nn.functional.pad(in_union.repeat_interleave(grain, 2), (0, max(left)), value=True)
        shown = (shown & (s.pos >= 0).unsqueeze(1)).expand(-1, n_rows, -1)
        # no mask is faster; an error bound needs one, because without it the kernel may round scores to 16 bits
        is_bare = n_rows == 1 and self._epsilon is None and bool(shown.all())
        return attend(q, s.k, s.v, scale, softcap=softcap, mask=None if is_bare else shown)

    def _stream(
        self, layer: int, pages: Pages, rows: Tensor, refused: Tensor, part: PartialAttention, params: AttentionParams
    ) -> None:
        """Overwrite `part` [K, G, N, ..] with attention to all slots for the `refused` [K, N] of rows [K, G, N, D]."""
        self.tally.streamed += int(refused.sum())
        for j in refused.any(1).nonzero().flatten().tolist():
            s = _here(self._source.head(layer, j, int(pages.ends[j])), rows)
            which = refused[j]
            q = rows[j][:, which]
            if serves(q, s.v):
                run, rows_at = _run_of(s), [1] * q.shape[1]
                full = attend_part(q, run, rows_at, params.scale, window=WIDEST, softcap=params.softcap)
            else:
                mask = visible(s.pos, range(q.shape[1]), None)
                full = attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=mask)
            part.out[j][:, which], part.lse[j][:, which] = full.out.to(part.out.dtype), full.lse.to(part.lse.dtype)

    def _count(self, layer: int, chosen: Tensor, n: int) -> None:
        """Count the selections of n rows of a pass: `chosen` [K, n, X], or [K, 1, X] if all rows share one."""
        union = chosen[:, 0] if chosen.shape[1] == 1 else chosen.any(1)
        before = self._chosen.get(layer)
        self.tally.asked += chosen.shape[0] * n
        self.tally.pages += int(union.sum())
        if before is not None:
            self.tally.again += int((union & before).sum())
        self._chosen[layer] = union


def _choose(score: Tensor, pages: Pages, least: float) -> Tensor:
    """Select units by score [K, G, N, X] -> [K, N, X]: the best `most` of each row and KV head, and those always read.

    Units are ranked by their largest share of the mass in any query head of the group, because heads differ in scale.
    `least`: log of the share below which no unit is read.
    """
    share = (score - log_masses(score, pages.held).unsqueeze(-1)).amax(1)  # [K, N, X]
    chosen = _best(share.masked_fill(~pages.open.unsqueeze(1), -torch.inf), pages.most, pages.index)
    if least > -math.inf:
        chosen &= share >= least
    return chosen & pages.open.unsqueeze(1) | pages.always.unsqueeze(1)


def _best(share: Tensor, most: int, index: PageIndex) -> Tensor:
    """Return a mask [K, N, X] of the `most` best units of each row. On equal scores the first units win."""
    top = share.topk(most, -1)
    if index.selection_unit == index.page:
        return torch.zeros_like(share, dtype=torch.bool).scatter_(2, top.indices, True)
    least = top.values[..., -1:]
    above, level = share > least, share == least
    return above | level & (level.cumsum(-1) <= most - above.sum(-1, keepdim=True))


def _nearly(score: Tensor, chosen: Tensor, pages: Pages) -> Tensor:
    """Return the units [K, A], -1 = none, with the best score [K, G, N, X] among those that no row chose [K, N, X]."""
    share = (score - log_masses(score, pages.held).unsqueeze(-1)).amax((1, 2))  # [K, X]
    share = share.masked_fill(~pages.open | chosen.any(1), -torch.inf)
    best = share.topk(min(math.ceil(AHEAD * pages.most), share.shape[1]), -1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def _among(chosen: Tensor, union: Tensor) -> Tensor:
    """Return a mask [K, N, U] of the units `union` [K, U], -1 = none, that each row chose [K, N, X]."""
    at = union.clamp(min=0).unsqueeze(1).expand(-1, chosen.shape[1], -1)
    return chosen.gather(2, at) & (union >= 0).unsqueeze(1)


def _run_of(s: Slots) -> StoredKV:
    """Return slots of one device as `StoredKV`."""
    n_kv, n = s.pos.shape
    k, v = s.each(lambda t: t.contiguous().flatten(0, 1))
    pos = s.pos.contiguous().flatten()
    starts = range(0, n_kv * n, n) if n else [0] * n_kv
    return StoredKV(k, v, pos.to(torch.int32), starts, [n] * n_kv, starts)


def _refused(missed: Tensor, lse: Tensor, epsilon: float) -> Tensor:
    """Return a mask [K, N] of the rows that may have missed a share above epsilon of the mass in some query head.

    `missed` [K, G, N]: upper bound on the log of the mass that was not read; `lse` [K, G, N]: log of the mass read.
    """
    most = math.log(epsilon / (1 - epsilon)) if epsilon else -math.inf
    # NaN, from keys that are not finite, is refused; a row that missed nothing is not
    return (~(missed - lse <= most) & (missed != -torch.inf)).any(1)


def _here(s: Slots, like: Tensor) -> Slots:
    """Return the slots on the device of `like`."""
    return Slots(*s.each(lambda t: t.to(like.device)), s.pos.to(like.device))


def _nbytes(tensors: Collection[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Sparse attention over a whole KV cache of one tier; in a tiered cache, each lower tier is a `SparseTier` instead.


class SparseCache(SparseTier):
    """A KV cache whose rows read selected pages."""

    def __init__(
        self, store: KVCache, index: PageIndex, budget: PageBudget, layers: Collection[int], **more: Any
    ) -> None:
        """Take the arguments of `SparseTier`, with a KV cache as its tier."""
        super().__init__(store, index, budget, layers, **more)
        self._store = store

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the KV cache."""
        return self._store.dtype

    @property
    def changes(self) -> int:
        """Change counter of the KV cache."""
        return self._store.changes

    @property
    def forgets(self) -> bool:
        """True if the KV cache evicts slots."""
        return self._store.forgets

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return no tables, because rows select pages on the host."""
        return DeviceCache(why_not=BY_ROW)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity for n slots per head."""
        self._store.reserve(n, layers)

    def reaches(self, n: int) -> bool:
        """True if the KV cache has all slots in the sliding windows of a row at position n."""
        return self._store.reaches(n)

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Run a compression point: rows select from the slots stored now until the next one."""
        has_lost = self._store.compress(masks, end, layers)
        if has_lost:
            for pages in self._pages.values():
                pages.clear()
        self._learn(self._pages if layers is None else layers)
        return has_lost
