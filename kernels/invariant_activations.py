"""Batch-invariant activations: applied in whole vectors, so that bits do not depend on an element's place in a tensor.

torch's elementwise loops compute full vectors first and the remaining elements one by one, with other versions of e^x
and tanh. A tensor that is divided among threads has such remainders in its middle, so a row may be rounded differently
in a batch than alone. Pieces of a multiple of 64 elements, too short to be divided among threads, have no remainders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvcli.kernels.module_probe import probe_output

# Test which dtypes this CPU's matrix products support; kernels use other methods for unsupported ones.


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """True if matrix products support this dtype. Without bf16 instructions torch multiplies bf16 number by number."""
    return dtype != torch.bfloat16 or (
        hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


STEP = 64  # elements: two vectors of the widest CPU in 16 bits
PIECE = 32768  # elements; larger tensors are divided among threads
MIXED = (3, 7)  # shape of the probe tensor


class WholeVectors:
    """Forward of one activation, in pieces. Its reference is weak, because a strong one would keep the model alive."""

    def __init__(self, own: Callable[[Tensor], Tensor]) -> None:
        self._own = WeakMethod(own)

    def __call__(self, x: Tensor) -> Tensor:
        own = self._own()
        assert own is not None
        return self._pieces(own, x)

    def _pieces(self, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        n = x.numel()
        if x.device.type != "cpu" or not n or (n % STEP == 0 and n <= PIECE and x.is_contiguous()):
            return own(x)
        flat = pad(x.reshape(-1), (0, -n % STEP))
        return torch.cat([own(piece) for piece in flat.split(PIECE)])[:n].view(x.shape)


class WholeRows(WholeVectors):
    """Gate function inside experts (gpt-oss), x [M, W] -> [M, W / 2]: whole vectors run in pieces, others singly."""

    def _pieces(self, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        n, wide = x.shape
        if x.device.type != "cpu" or not n:
            return own(x)
        at_once = PIECE // wide if wide % (2 * STEP) == 0 else 1
        return torch.cat([own(rows) for rows in x.split(max(1, at_once))])


@torch.no_grad()
def make_activations_invariant_(root: nn.Module) -> int:
    """Make elementwise modules below `root`, and gates of experts without one, batch invariant. Return how many."""
    done = 0
    for module in root.modules():
        gate: Any = getattr(module, "_apply_gate", None)
        if gate is not None and not (isinstance(gate, WholeRows) or [*module.children()]):
            module._apply_gate = WholeRows(gate)  # type: ignore[assignment]
            done += 1
        held = [*module.children(), *module.parameters(), *module.buffers()]
        if held or "forward" in vars(module):
            continue
        if _is_elementwise(module):
            module.forward = WholeVectors(module.forward)
            done += 1
    return done


def _is_elementwise(module: nn.Module) -> bool:
    """True if the module maps each element by itself and changes its input."""
    x = torch.linspace(-4, 4, MIXED[0] * MIXED[1]).view(MIXED)
    found = probe_output(module, x)
    if found is None or found.shape != x.shape or torch.equal(found, x):
        return False
    alone = [probe_output(module, one) for one in x.view(-1, 1)]
    if any(one is None or one.shape != (1,) for one in alone):
        return False
    return torch.allclose(torch.cat([one for one in alone if one is not None]), found.flatten(), rtol=1e-5, atol=1e-6)
