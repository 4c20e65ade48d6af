"""Induction probe: attention to the token after the earlier copy of the current token, on repeated random tokens.

The score of a row is its attention to that one token: a product of two vectors over the row's normaliser, so no
matrix of rows and tokens is needed (after Olsson et al., arXiv 2209.11895).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.engine import run_to_end
from kvcli.heads.attention import normaliser
from kvcli.heads.query_probe import listening
from kvcli.kv.slots import AttentionParams, Slots
from kvcli.kv.sparse.index import scale_and_softcap
from kvcli.models.text import special_ids

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.policy.policy import LayerContext

ROWS = 64  # rows of the second copy that are recorded
LONGEST = 512  # most tokens that are repeated


def repeat(model: Model, length: int, seed: int) -> Tensor:
    """Return the mean attention [L, H] to the token after the earlier copy, on a prompt of about `length` tokens."""
    half = max(2, min(LONGEST, length // 2 - 1))
    ids, start = twice(model, half, seed)
    rows = sorted({start + half + i * (half - 1) // ROWS for i in range(ROWS)})
    found = torch.zeros(model.lm.n_layers, model.lm.n_heads)

    def hear(s: Slots, at: LayerContext) -> None:
        target = at.q_pos - half + 1
        for head in range(s.k.shape[0]):
            group = at.q.shape[0] // s.k.shape[0]
            where = slice(head * group, (head + 1) * group)
            k = s.k[head].float()[torch.searchsorted(s.pos[head].long(), target.to(s.pos.device))]  # [w, D]
            score = scale_and_softcap((at.q[where].float() * k).sum(-1), AttentionParams(at.scale, at.softcap))
            weight = torch.exp(score - normaliser(s, at, head))
            if at.window is not None and at.window < half:
                weight = torch.zeros_like(weight)
            found[at.layer, where] = weight.mean(1).cpu()

    session = listening(model, lambda n: rows, hear)
    run_to_end(session.read(ids))
    return found


def twice(model: Model, half: int, seed: int) -> tuple[list[int], int]:
    """Return random ids, repeated once, plus one id so that all are stored; and the number of ids before them (BOS)."""
    rng, special = Random(f"repeat {seed}"), special_ids(model.tokenizer)
    bos = model.tokenizer.bos_token_id
    plain = [i for i in range(min(model.lm.vocab, len(model.tokenizer))) if i not in special]
    once = [rng.choice(plain) for _ in range(half)]
    front = [] if bos is None else [bos]
    return [*front, *once, *once, once[0]], len(front)
