"""Copy of the KV of a prompt's prefix from another open session, in place of its prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.kv.slots import windows_of
from kvcli.prefix_cache.prefix_cache import FEW

if TYPE_CHECKING:
    from kvcli.engine.sequence.state import SequenceState


class SourceChanged(Exception):
    """The source no longer has the KV that is being copied."""


def shared_prefix(source: SequenceState, ids: Sequence[int]) -> int:
    """Return how many first tokens of the prompt `ids` the session `source` can give: their KV is in its cache as
    computed, and all slots in the windows of the next row too."""
    n = min(source.shared(ids), source.committed, len(ids) - 1)
    return n if not source.lm.recurrent_layers and not source.condensed and source.cache.reaches(n) else 0


def common_prefix(ids: Sequence[int], its_ids: Sequence[int], sessions: Sequence[SequenceState]) -> int:
    """Return the common length of two prompts, if a session that has prefilled the second can give it to the first, and
    it is worth waiting for; else 0. `sessions`: those whose KV the first can use now."""
    lm, both = sessions[0].lm, zip(ids[:-1], its_ids[:-1], strict=False)
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    later = len(its_ids) - n  # tokens after which slots of windows are evicted
    is_kept = all(later <= window.back for window in windows_of(lm.shapes, lm.attention_params).values())
    has = max(shared_prefix(one, ids) for one in sessions)
    return n if is_kept and not lm.recurrent_layers and n - has >= FEW else 0


def copy_by_layer(session: SequenceState, source: SequenceState, ids: Sequence[int]) -> Iterator[None]:
    """Copy the KV of the longest shared prefix, unless prefill is as fast, and yield after each layer. Both caches must
    hold KV as computed. Nothing is copied if the source gives its KV up meanwhile."""
    n, lm = shared_prefix(source, ids), session.lm
    if n - session.committed < FEW:
        return
    windows = windows_of(lm.shapes, lm.attention_params)
    have = session.rewind(0) if windows else session.committed  # a window may lack the slots between both

    def parts() -> Iterator[tuple[int, Tensor, Tensor, int]]:
        for layer in lm.storing:
            if shared_prefix(source, ids) < n:
                raise SourceChanged
            slots = source.cache.slots(layer)
            first = int(slots.pos[0, 0])
            start = max(first, have, windows[layer].window_start(n) if layer in windows else 0)
            at = slice(start - first, n - first)
            k = slots.k[:, at]
            yield layer, k, k if slots.v is slots.k else slots.v[:, at], start

    with suppress(SourceChanged):
        yield from session.adopt_by_layer(ids, n, parts())
