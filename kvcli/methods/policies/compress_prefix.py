"""Compress the prefix of a sequence with KVzip: the kept slots move to consecutive positions, their keys re-rotated.

So a sequence can continue beyond the context window of its model. Every head keeps the same number of slots, of tokens
that it selects itself (KVzip, Kim et al., arXiv 2505.23416), and its keys are rotated to their new positions, as after
an edit (PIE, He et al., arXiv 2407.03157). Slots compressed before compete with their earlier scores, without another
repetition. The result is approximate: evicted tokens are lost, and distances between kept tokens are shorter than at
prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.kv.companion import Companion
from kvcli.methods.policies.kvzip import KVzip
from kvcli.policies.scoring.running_scores import RunningScores
from kvcli.policies.scoring.topk import ScoreState

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.sequence.state import SequenceState
    from kvcli.kernels.rope import Rotary
    from kvcli.kv.slots import Loss


PIECE = 64  # least tokens repeated per pass; with fewer, a long sequence would take hundreds of passes


def fits_repetition(limit: int, end: int) -> bool:
    """Return True if `end` tokens can be repeated after themselves within a context window of `limit` tokens."""
    return limit - end >= KVzip().lead + PIECE


class CondensedPrefix(Companion):
    """First tokens of a sequence that stand for a longer text. Each head keeps different tokens of it."""

    def __init__(self) -> None:
        self.scores: Mapping[int, Tensor] = {}  # by layer [K, condensed]: scores that chose these tokens

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 within the condensed tokens."""
        return n if n >= self.condensed else 0

    def rewind(self, n: int, of: int) -> None:
        """Forget the condensed tokens of a sequence that begins anew."""
        if not n:
            self.condensed, self.scores = 0, {}

    def loss(self, n: int) -> Loss | None:
        """Return "forgotten" if tokens are condensed."""
        return "forgotten" if self.condensed else None


def compress_prefix(text: SequenceState, end: int, most: int) -> Passes[bool]:
    """Compress the first `end` stored tokens of a sequence to `most` slots per head; later tokens need prefill again.

    `text.ids` then begins with `most` of their ids, in order: those that most heads kept. Returns False, with nothing
    evicted, if `most` slots cannot hold the protected tokens, or if a sliding window evicted slots visible from `end`.
    Raises BadModel if the rotary embedding is not a fixed table.
    """
    import torch

    from kvcli.engine.hf.rope import rotaries
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.engine.policy.policy_inputs import QueryRecorder
    from kvcli.engine.sequence.state import kinds_of

    lm, zipped = text.lm, KVzip(budget=most, alloc="uniform", recent=1)
    if (record := text.find(CondensedPrefix)) is None:
        text.companions.insert(0, record := CondensedPrefix())
    turns, guard = rotaries(lm), zipped.requirements(lm).guard
    if not text.cache.reaches(end):
        return False
    text.rewind(end + 1)
    assert text.committed == end > most, "it is stored"
    sums, ids = RunningScores(lm, dict(record.scores)), text.ids[: end + 1]
    kinds = kinds_of(ids[:end], text.kinds, text.kind_spans)
    past = lm, text.cache, QueryRecorder(lm, text.cache.dtype), guard, ids[:end], kinds
    at = CompressionPoint(*past, "read", end, True, ScoreState(done=record.condensed, own=sums))
    masks = yield from at.ask(zipped)
    kept = {i: mask for i, mask in enumerate(masks) if mask is not None}
    if not all(bool((mask.sum(1) == most).all()) for mask in kept.values()):
        return False
    worth: dict[int, Tensor] = {}
    moved: list[tuple[int, Tensor, Tensor, int]] = []
    votes = torch.zeros(end)
    for i, shape in enumerate(lm.shapes):
        if shape.shared_from is not None:
            continue
        s = text.cache.slots(i)
        if i in kept:
            old, where = _places(s.pos, kept[i], most)
            always = replace(guard, recent=0).covers(torch.arange(end, device=lm.device), kinds)
            score = sums.total[i].masked_fill(always, torch.inf)
            worth[i] = score.gather(1, old)
            votes += torch.bincount(old.flatten().cpu(), minlength=end)
            new, first = torch.arange(most, device=old.device), 0
        else:  # a sliding window moves unchanged
            stays = (s.pos >= end - most).expand_as(s.pos)
            old, where = _places(s.pos, stays, int(stays[0].sum()))
            new, first = old - (end - most), int(old[0, 0]) - (end - most)
        k, v = (t.gather(1, where.unsqueeze(-1).expand(-1, -1, t.shape[2])) for t in (s.k, s.v))
        moved.append((i, _turned(k, old, new, turns[i]), v, first))
    stand = sorted(votes.argsort(descending=True, stable=True)[:most].tolist())
    text.rewind(0)
    text.adopt([*(ids[p] for p in stand), ids[end]], most, moved)
    record.condensed, record.scores = most, worth
    return True


def _places(pos: Tensor, stays: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the n kept slots of each head of positions pos [K, S]: rising positions, and slot indices, [K, n] each."""
    where = stays.nonzero()[:, 1].view(-1, n)
    old, order = pos.gather(1, where).long().sort(dim=1)
    return old, where.gather(1, order)


def _turned(k: Tensor, old: Tensor, new: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate keys k [K, n, D] from positions old [K, n] to new [n] or [K, n]."""
    import torch

    from kvcli.kernels.rope import rotate, unrotate

    if rotary is None:
        return k
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    return rotate(unrotate(wide, old, rotary), new.expand_as(old), rotary).to(k.dtype)
