"""Every fused op gives a row the same bits alone and among others, and one that looks at the others is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.attend_captured import attend_captured
from kvcli.kernels.attend_invariant.tables import Tree
from tests.kernels.compiled import ROOT
from tests.kernels.row_dependent import CHANGES, looking_at_rows

pytest.importorskip("tests.kernels.interpreted")  # before what is fused
from tests.gpu.bits import differing
from tests.gpu.ops import TINY, Op, Rows, Size, layer, of_op

torch.set_num_threads(1)
FRAMES = (4, 8)  # rows of a captured pass


def _in_frames(size: Size, g: Generator) -> Op:
    """Rows in the smallest captured pass that holds them; unused ones repeat the first and lie on no path."""
    q, table, k, v = layer(size, g)

    def of(rows: Rows) -> Callable[[], Tensor]:
        n, room = len(rows), next(n for n in FRAMES if n >= len(rows))
        mine = [*rows, *[rows[0]] * (room - n)]
        tree = Tree.of_rows([-1] * room, [size.slots] * room, g.device)
        tree.path_of[n:] = -1
        x, fresh_k, fresh_v = (t[:, mine].contiguous() for t in (q, k, v))
        given = x, table, fresh_k, fresh_v, tree, size.d**-0.5
        return lambda: attend_captured(*given, capacity=size.slots)[:, :n].transpose(0, 1)

    return Op(of, 0)


@pytest.mark.parametrize("op", CHANGES)
def test_a_row_has_its_own_bits_and_a_kernel_that_looks_at_others_is_caught(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    make = _in_frames if op == "attend_captured" else of_op(op)
    made = make(TINY, Generator().manual_seed(0))
    assert differing(made, (5,), 1)[1] == 0
    with looking_at_rows(op):
        assert differing(made, (5,), 1)[1] > 0
    assert differing(made, (2,), 1)[1] == 0, "ours are back"


def test_no_kernel_is_left_out() -> None:
    assert {path.parent.name for path in (ROOT / "kernels").glob("*/fused.py")} | {"attend_captured"} == set(CHANGES)
