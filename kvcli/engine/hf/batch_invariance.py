"""Test whether a loaded model is batch invariant, that is, whether a row has the same bits whatever else is in the
pass.

If it is, drafting gives the text of plain decoding in 16 bits too, and chunk sizes or other sequences in a pass change
nothing. It depends on every operation of the model: our kernels are batch invariant, other operations can only be
tested. On a GPU it is claimed for decoding rows only, in passes of few rows, as the fused kernels guarantee it. Prompt
chunks use the fastest kernels there, and the chunks are the same with and without drafting. Operations without a kernel
of ours select algorithms by a table of shapes there, so testing a few shapes would prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.rows import Draft, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels import triton_support
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

STORED = 70  # tokens prefilled first: past the first block of native attention, not at the end of the second
# chunk size of the second prefill: fewer rows than torch processes at once, so that each element is computed alone
CHUNK = 14
DEPTH, WIDTH = 3, 5  # size of the tree; the text follows its last branches
WIDE = 11  # width of a tree that fills a tile of 32 rows and begins another


def is_batch_variant(lm: LM) -> bool:
    """True if logits differ when rows run in a draft tree or in other chunks. Uses fixed random tokens."""
    n = min(STORED, lm.limit - DEPTH)
    if n < 1 or (lm.is_apart and triton_support.why_not(lm.device, lm.dtype)):
        return True
    # a recurrence sums a chunk in another order than single rows, which 16 bits hide from a short test
    if lm.recurrent_layers.like.rec and not lm.recurrent_layers.are_by_row:
        return True
    ids = torch.randint(0, lm.vocab, (n + DEPTH,), generator=torch.Generator().manual_seed(0)).tolist()
    widths = (
        (1,) if lm.recurrent_layers else (WIDTH, WIDE) if lm.is_apart else (WIDTH,)
    )  # rows of recurrent layers are a chain
    return any(_differ(lm, ids, n, width) for width in widths)


def _differ(lm: LM, ids: list[int], n: int, width: int) -> bool:
    """True if rows after the first n tokens differ between plain decoding and a tree of this width."""
    (alone, of_alone), (cut, of_cut) = _past(lm, ids[:n], n), _past(lm, ids[:n], n if lm.is_apart else CHUNK)
    # compare all rows of a chunk: torch's sigmoid of one number per row, as in gates of experts, rounds by the row's
    # index
    for layer in () if lm.is_apart else lm.storing:
        its, other = alone.slots(layer), cut.slots(layer)
        if not (torch.equal(its.k, other.k) and torch.equal(its.v, other.v)):
            return True
    guesses, parent, on_path, last = list[int](), list[int](), [0], -1
    for token in ids[n + 1 :]:
        guesses += [*((token + wrong) % lm.vocab for wrong in range(1, width)), token]
        parent += [last] * width
        last = len(guesses) - 1
        on_path.append(last + 1)
    (among,) = run(
        [ForwardRequest(lm, Rows.build(ids[n], n, Draft(guesses, parent)), cut, want=on_path, states=of_cut)]
    )
    for i in range(DEPTH):
        row = Rows.chain(ids[n + i : n + i + 1], n + i)
        (made,) = run([ForwardRequest(lm, row, alone, want=[0], states=of_alone)])
        if not torch.equal(made.logits[0], among.logits[i]):
            return True
        commit(alone, row, made, [0])
    return False


def _past(lm: LM, ids: list[int], chunk: int) -> tuple[Dense, RecurrentStates]:
    """Prefill these ids in chunks of this size. Return the KV cache and the recurrent states."""
    kv, states = Dense(lm.shapes, lm.dtype, lm.device), RecurrentStates(lm.recurrent_layers.like)
    for start in range(0, len(ids), max(1, chunk)):
        some = ids[start : start + max(1, chunk)]
        rows = Rows.chain(some, start)
        (made,) = run([ForwardRequest(lm, rows, kv, want=[0], states=states)])
        commit(kv, rows, made, range(rows.n_rows))
    return kv, states
