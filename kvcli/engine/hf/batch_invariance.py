"""Whether a row's bits depend on which other rows share its pass: tried on a loaded model.

Where they do not, drafting gives the text of plain decoding in 16 bits too, and the size of a chunk or another text in
the pass changes nothing. It rests on every op of the model: our own are made so, for the others only a trial can say.
On a device apart it is claimed of rows that are written, as fused kernels promise it: of passes of few rows. A chunk of
a prompt is read by whatever is fastest, and the same chunks are read with drafting and without. What no kernel of ours
computes is chosen there by a table of shapes, so that a trial of a few of them would prove nothing.
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

STORED = 70  # tokens read first: past the first block of native attention, not at the end of the second
CHUNK = 14  # of them, the second time: fewer than torch takes at once, so that each number is computed by itself
DEPTH, WIDTH = 3, 5  # of the tree; the text goes through its last branches
WIDE = 11  # of one that fills a tile of 32 rows and begins another


def is_batch_variant(lm: LM) -> bool:
    """Whether logits of a text differ when its rows run among guesses or in other chunks. Random tokens, fixed."""
    n = min(STORED, lm.limit - DEPTH)
    if n < 1 or (lm.is_apart and triton_support.why_not(lm.device, lm.dtype)):
        return True
    # a recurrence adds up a chunk otherwise than a row, which 16 bits hide from a short trial
    if lm.mixers.like.rec and not lm.mixers.are_by_row:
        return True
    ids = torch.randint(0, lm.vocab, (n + DEPTH,), generator=torch.Generator().manual_seed(0)).tolist()
    widths = (1,) if lm.mixers else (WIDTH, WIDE) if lm.is_apart else (WIDTH,)  # rows of mixers are a chain
    return any(_differ(lm, ids, n, width) for width in widths)


def _differ(lm: LM, ids: list[int], n: int, width: int) -> bool:
    """Whether rows behind the first n tokens do, alone and in a tree of this width."""
    (alone, of_alone), (cut, of_cut) = _past(lm, ids[:n], n), _past(lm, ids[:n], n if lm.is_apart else CHUNK)
    # all rows of a chunk: torch's sigmoid of one number a row, as gates of experts are, rounds by the row's place
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
    """A store that has read these in chunks of this size, and what mixers know behind them."""
    kv, states = Dense(lm.shapes, lm.dtype, lm.device), RecurrentStates(lm.mixers.like)
    for start in range(0, len(ids), max(1, chunk)):
        some = ids[start : start + max(1, chunk)]
        rows = Rows.chain(some, start)
        (made,) = run([ForwardRequest(lm, rows, kv, want=[0], states=states)])
        commit(kv, rows, made, range(rows.n_rows))
    return kv, states
