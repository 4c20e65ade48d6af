"""The model that writes drafts for itself: for guesses it reads less of the past, or in fewer bits, or by fewer layers.

MagicDec (arXiv 2408.11049) and TriForce (arXiv 2404.11912) guess over a part of the past, QuantSpec (arXiv 2502.10424)
over its coarse half; layer_skip.py has those that leave layers out. Keys and values of guesses lie beside the past
until the next step, and then go: the text's store is read and never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.drafts.draft_models.layer_skip import LayerSkip
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.rows import Hears
    from kvcli.engine.stats import Step
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.slots import Attendable, AttentionParams, Usage

_NEWEST = 64  # tokens that are remembered


class SelfDraftModel:
    """Guesses with the model that writes. The pending token is the first row of each draft: nothing else is missing."""

    needs: Hears = ""
    n_uncovered = 1

    def __init__(self, lm: LM, skipping: LayerSkip) -> None:
        self.lm, self._skipping = lm, skipping
        self.length = 0
        self._newest: list[int] = []  # tokens, by which layers are chosen
        self._past: DraftContext | None = None
        self._ahead: DraftTreeKV | None = None  # the draft under way, the pending token first

    @property
    def name(self) -> str:
        """Of the model, and what of it guesses leave out."""
        about = self._skipping.about
        return f"{self.lm.info.id} ({about})" if about else self.lm.info.id

    @property
    def limit(self) -> int:
        return self.lm.limit

    @property
    def max_depth(self) -> int:
        """As deep as the model has positions."""
        return self.lm.limit - self.length

    def newest(self, n: int) -> list[int]:
        """The pending token: of others it is stored what comes next."""
        return self._newest[-1:]

    def usage(self) -> list[Usage]:
        """Nothing that outlasts a draft; a view says itself what it takes."""
        return []

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""
        self.length, self._newest = len(ids), list(ids[-_NEWEST:])
        self._skipping.start()
        self.discard_cache()

    def extend(self, new: Sequence[int]) -> None:
        """These joined it."""
        self.length, self._newest = self.length + len(new), [*self._newest, *new][-_NEWEST:]
        self.discard_cache()

    def discard_cache(self) -> None:
        """Drop the draft under way, and what it reads: a past is not to be held by who only looks at it."""
        self._past = self._ahead = None

    def bind(self, past: DraftContext | None) -> None:
        """What drafts read: the part of it that the view asks for, else what its store shows to guesses."""
        self._past = past

    def observe(self, step: Step) -> None:
        """Nothing that `extend` does not say."""

    def prefill(self) -> Steps[None]:
        """The past is what the text's own pass has read."""
        yield from ()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        """The hook output for the pending token's row."""
        assert want == 1, "nothing else is passed over"
        assert self._past is not None, "there is no past to read"
        view, kv = self._past.view, self._past.cache
        past = DraftCacheView(kv if view is None else view, kv.dtype)
        yield from self._skipping.improve(kv, past, self._newest, self.length)
        self._ahead = DraftTreeKV(self.lm, past, self.length - 1)
        return (yield from self._ahead.grow(self._newest[-1:], [-1], top, self._skipping.runs))

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """The hook output for the rows of guesses behind it, in the tree of which it is the root."""
        assert self._ahead is not None, "read first"
        return (yield from self._ahead.grow(ids, [parent + 1 for parent in parents], top, self._skipping.runs))


class DraftCacheView:
    """A past as its store shows it to rows whose finds are checked later."""

    def __init__(self, past: Attendable, dtype: torch.dtype) -> None:
        self.dtype, self._past = dtype, past

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="guesses of the model itself read less than the past")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> parts."""
        return self._past.attend(layer, q, replace(sight, is_guess=True), pos, own)

    def usage(self) -> list[Usage]:
        """Nothing of its own."""
        return []
