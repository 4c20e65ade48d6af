"""Segments of a prompt: consecutive rows that run in one pass and select the pages that they attend to together.

A selection is made from all rows of a segment, so the KV of a row depends on later rows of its own segment too. That is
chosen, as in the papers. What holds in exchange: the KV of a prompt depends on its own tokens alone. Segments end at
multiples of their length, none is cut, and a sequence continues from the end of a whole segment or of its own answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.engine.sequence.state import shared_length
from kvcli.errors import BadModel
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.page_scores import log_masses
from kvcli.kv.companion import Companion
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.pages import Pages
from kvcli.kv.sparse.sparse_tier import SparseCache, SparseTier

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.snapshot import SnapshotReader, State


class PromptSegments(Companion):
    """The segments in which the prompts of a sequence were read."""

    def __init__(self, lm: LM, length: int) -> None:
        """`length`: rows of a segment. Raises BadModel for recurrent layers, whose checkpoints end passes elsewhere."""
        if lm.recurrent_layers:
            raise BadModel(
                f"{lm.info.id} has recurrent layers, so segments of a prompt cannot select pages",
                code="no_segments",
                try_=["--set sparse.method=none"],
            )
        self._length = length
        self._read: list[tuple[int, int]] = []  # first position and end of each prompt
        self._is_new = False  # restored, and not rewound since

    @property
    def _end(self) -> int:
        """Number of tokens up to the end of the last prompt."""
        return self._read[-1][1] if self._read else 0

    def _whole(self, n: int) -> int:
        """Return how many of the first n tokens are before the segment, or the answer, that n cuts."""
        start, end = next(((a, b) for a, b in reversed(self._read) if a <= n), (0, 0))
        return max(start, min(n, end) // self._length * self._length)

    def before_prompt(self, text: GenerationSession, ids: Sequence[int]) -> None:
        """Rewind to whole segments, unless the prompt is the last one or continues its answer."""
        known = text.ids[: text.answer_end]
        n = shared_length(known, ids)
        # a saved sequence does not tell what followed its last stored token, so that must be the answer's, too
        continues = min(n, text.committed) > self._end + 1 and n >= min(text.committed, len(known) - 1)
        if self._read and not continues and not n == len(ids) == self._end + 1:
            n = text.rewind(self._whole(min(n, text.committed)) + 1)
            text.prefills = [(start, min(end, n + 1)) for start, end in text.prefills if start < n]

    def prefill(self, text: GenerationSession, end: int) -> Passes[None]:
        """Prefill the rest of a segment."""
        start = text.committed
        yield from text.read_chunk(min(end, start - start % self._length + self._length))
        first = self._read.pop()[0] if self._read and self._end == start else start
        self._read.append((first, text.committed))

    def reaches(self, n: int, of: int) -> int:
        """Return n, or what is before the segment that it cuts. A restored prompt without an answer ends in one, too.
        An answer may be cut: it goes on, or `before_prompt` has rewound it."""
        return n if n >= self._end + 2 * self._is_new else self._whole(n)

    def rewind(self, n: int, of: int) -> None:
        """Forget the segments that go."""
        self._read, self._is_new = [(start, min(end, n)) for start, end in self._read if start < n], False

    def snapshot(self) -> State:
        """Return where prompts were read."""
        return {"prompts": torch.tensor(self._read, dtype=torch.int64).view(-1, 2)}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch. A prompt that a policy has compressed cannot be cut."""
        read = given.tensor("prompts", torch.int64, None, 2).clamp(0, given.n)
        self._read, self._is_new = [(a, b) for a, b in read.tolist()], bool(given.number("is_whole", 1))


class SegmentTier(SparseTier):
    """A tier whose rows of a prompt, one segment in a pass, read the pages that they selected together. Rows of an
    answer read all slots."""

    _of_prompts = True

    def __init__(self, *what: Any, mass: float, **more: Any) -> None:
        """Take the arguments of `SparseTier`, and the share of the attention at which no more pages are selected."""
        super().__init__(*what, **more)
        self._mass = mass

    @property
    def batch_variant_reason(self) -> str:
        return "segments of a prompt select pages (sparse.segment)"

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Attend from rows q [H, N, D] at positions pos [N]. A segment selects from all slots before it, whether a
        compression point came after an answer or not."""
        if params.is_prompt and self._late.get(layer):
            self._learn([layer])
        return super().attend(layer, q, params, pos, own)

    def _recall(self, layer: int, pages: Pages, q: Tensor, params: AttentionParams) -> PartialAttention:
        segment = q.reshape(pages.whole.shape[0], -1, *q.shape[1:])  # [K, G, N, D]
        score = self._index.score(segment, pages.kept, pages.shared, params)
        chosen = select(score, pages, self._mass)
        self._count(layer, chosen, 1)
        return self._read(layer, pages, q, chosen, params, None)


def select(score: Tensor, pages: Pages, mass: float) -> Tensor:
    """Select pages for a segment by the scores of its rows [K, G, R, X] -> [K, 1, X]: if `mass` is below 1, the fewest
    that hold this share of the attention to pages in each query head. Pages that are always read count. If that leaves
    less than `pages.most` of a KV head, the best ones up to it.

    Pages rank by their mean share in the rows; among query heads of a KV head the largest counts.
    """
    by_row = score - log_masses(score, pages.held).unsqueeze(3)
    share = by_row.logsumexp(2) - math.log(score.shape[2])  # [K, G, X]
    chosen = torch.zeros_like(pages.open)
    if mass < 1:  # heads may have different numbers of pages
        held, first = share.exp().masked_fill(~pages.held.unsqueeze(1), 0.0), pages.always.unsqueeze(1)
        order = (held + 2 * first).sort(dim=-1, descending=True, stable=True).indices
        ranked = held.gather(-1, order)
        enough = torch.zeros_like(held, dtype=torch.bool).scatter_(-1, order, ranked.cumsum(-1) - ranked < mass)
        chosen = enough.any(1) & pages.open
    wanted = share.amax(1).masked_fill(~pages.open, -torch.inf).masked_fill(chosen, torch.inf)
    chosen = chosen.scatter(1, wanted.topk(min(pages.most, score.shape[3]), -1).indices, value=True)
    return (chosen & pages.open | pages.always).unsqueeze(1)


class SegmentCache(SegmentTier, SparseCache):
    """A KV cache whose rows of a prompt read selected pages."""
