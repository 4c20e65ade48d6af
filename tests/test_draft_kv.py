"""Drafts as a tree of passes: a row gives what it would give in its place in a text."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest
import torch

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.kernels.native import native
from tests import families, make
from tests.exact import table

PROMPT = 59
STORAGES = [(name, "fp64") for name in ("dense", "sliding", "sinks")]
if native() is not None:
    STORAGES += [(name, "bf16") for name in ("dense", "sliding", "lowered", "recalled", "minmax")]


@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
def test_a_row_reads_its_own_line_as_if_that_were_stored(storage: str, dtype: str) -> None:
    random, lm = Random(7), table.lm(storage, dtype)
    session = make.session(lm, table.past(storage, lm), chunk=13)
    run_to_end(session.read(families.prompt(PROMPT + 1)))
    draft_kv, said = DraftTreeKV(lm, session.cache, PROMPT), []
    for n in (13, 1, 4, 2):  # first a line that is longer than a window
        parents = [random.randrange(-1, len(draft_kv) + i) if len(draft_kv) else i - 1 for i in range(n)]
        said += run_to_end(draft_kv.grow([random.randrange(97) for _ in range(n)], parents, top))
    for row in range(len(draft_kv)):
        line = draft_kv._above[row]
        ids = [[*chain.from_iterable(draft_kv._ids)][i] for i in line]
        (made,) = run(
            [ForwardRequest(lm, Rows.chain(ids, PROMPT), session.cache, want=[len(ids) - 1], logits_hook=top)]
        )
        assert torch.allclose(torch.tensor(said[row]), torch.tensor(made.hook_output(0)), **close(dtype))
        for layer, fresh in made.fresh.items():
            for mine, its in zip(draft_kv.buffers.kv[layer], (fresh.k, fresh.v), strict=True):
                assert torch.allclose(mine[:, line], its, **close(dtype))


def close(dtype: str) -> dict[str, float]:
    """Native kernels give the same bits."""
    return {"rtol": 0, "atol": 0} if dtype == "bf16" else {"atol": 1e-10}


def test_a_text_takes_one_line_of_it() -> None:
    draft_kv = DraftTreeKV(table.lm("dense", "fp64"), table.past("dense", table.lm("dense", "fp64")), 0)
    run_to_end(draft_kv.grow([5, 6, 5, 6], [-1, -1, 1, 2], top))
    run_to_end(draft_kv.grow([7], [3], top))
    assert [draft_kv.path(ids) for ids in ([6, 5, 6, 7, 8], [6, 6], [5, 5], [7], [])] == [
        [1, 2, 3, 4],
        [1],
        [0],
        [],
        [],
    ]


def test_a_pass_that_broke_leaves_no_rows() -> None:
    lm = table.lm("dense", "fp64")
    draft_kv = DraftTreeKV(lm, table.past("dense", lm), 0)
    want = run_to_end(draft_kv.grow([5, 6], [-1, 0], top))
    broken = draft_kv.grow([9, 9, 9], [-1, 1, 1], top)
    next(broken)
    broken.close()
    assert (draft_kv._ids, draft_kv.parents) == ([[5, 6]], [-1, 0])
    assert run_to_end(draft_kv.grow([5, 6], [-1, 2], top)) == want
