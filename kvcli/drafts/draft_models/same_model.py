"""Self-drafting: the target model drafts with part of the KV cache, with fewer bits, or with fewer layers.

MagicDec (arXiv 2408.11049) and TriForce (arXiv 2404.11912) draft over part of the KV cache, QuantSpec (arXiv
2502.10424) over the upper half of its codes; layer_skip.py has the methods that skip layers. KV of draft tokens is kept
outside the KV cache until the next step and then discarded: drafting reads the KV cache and never writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.kv.tiers.device_tables import DeviceCache
from kvcli.kv.views.borrowing import BorrowingReader

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.drafts.draft_models.layer_skip import LayerSkip
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import ChosenRows, Passes, RanRow
    from kvcli.engine.hf.lm import LM
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.slots import AttentionParams, KVCache
    from kvcli.kv.tiers.draft_buffers import DraftBuffers
    from kvcli.kv.views.view import CompactView

_NEWEST = 64  # tokens that are remembered


class SelfDraftModel(DraftModel):
    """Draft model that is the target model itself. Only the pending token is uncovered: the first row of each draft."""

    n_uncovered = 1
    length = 0

    def __init__(self, lm: LM, skipping: LayerSkip) -> None:
        self.lm, self._skipping = lm, skipping
        self._buffers: DraftBuffers | None = None
        self._newest: list[int] = []  # newest tokens, by which skipped layers are chosen
        self._context: DraftContext | None = None
        self._ahead: DraftTreeKV | None = None  # the running draft, the pending token first

    @property
    def name(self) -> str:
        """Name of the model, and the layers that drafts skip."""
        about = self._skipping.about
        return f"{self.lm.info.id} ({about})" if about else self.lm.info.id

    @property
    def limit(self) -> int:
        return self.lm.limit

    def newest(self, n: int) -> list[int]:
        """Return the pending token. Earlier tokens need no trial, because their successors are known."""
        return self._newest[-1:]

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""
        self.length, self._newest = len(ids), list(ids[-_NEWEST:])
        self._skipping.start()
        self.discard_cache()

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence."""
        self.length, self._newest = self.length + len(new), [*self._newest, *new][-_NEWEST:]
        self.discard_cache()

    def discard_cache(self) -> None:
        """Discard the running draft and release the cache, because a draft model must not keep one alive."""
        self._context = self._ahead = None

    def bind(self, context: DraftContext | None) -> None:
        """Set the cache that drafts read: its cache view if one is configured, else all of it as `DraftCacheView`."""
        self._context = context

    def draft_ahead(self, rows: ChosenRows) -> Passes[Sequence[RanRow]]:
        """Run the pending token and, while passes are captured, these rows."""
        assert self._context is not None, "no KV cache is bound"
        view, kv = self._context.view, self._context.cache
        past = DraftCacheView(kv if view is None else view, kv.dtype)
        yield from self._skipping.improve(kv, past, self._newest, self.length)
        self._ahead = DraftTreeKV(self.lm, past, self.length - 1, buffers=self._buffers)
        self._buffers = self._ahead.buffers
        ahead, runs = self._ahead, self._skipping.runs
        result = yield from ahead.add(self._newest[-1:], [-1], logits_hook=top, layers=runs)
        return (yield from ahead.grow_by_choices(result, rows, top, runs))

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Return the hook output of draft rows after the pending token, which is the root of their tree."""
        assert self._ahead is not None, "`continue_from` runs before `catch_up`"
        return (yield from self._ahead.grow(ids, [parent + 1 for parent in parents], top, self._skipping.runs))


class DraftCacheView(BorrowingReader):
    """Cache view for draft rows: the cache may show them fewer bits or slots, because they are verified later."""

    def __init__(self, cache: KVCache | CompactView, dtype: torch.dtype) -> None:
        self.dtype, self._cache = dtype, cache

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of the cache, in which draft rows are not stored."""
        return replace(self._cache.device_tables(0, more), owners=())

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N], marked as draft rows."""
        return self._cache.attend(layer, q, replace(params, is_draft=True), pos, own)
