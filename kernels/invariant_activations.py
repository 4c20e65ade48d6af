"""Activations of a model in whole vectors, so that a number's bits do not depend on where in a tensor it lies.

torch's loops over elements take some numbers at a time and those that are left one by one, with another e^x and tanh;
a tensor that is shared out among threads has such rests in its middle. So a row in company may round otherwise than
alone.
In pieces that are multiples of 64 numbers, and too short to be shared out, there are no rests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvcli.kernels.module_probe import probe_output

STEP = 64  # numbers: two vectors of the widest CPU in 16 bits
PIECE = 32768  # numbers; more of them are shared out among threads
MIXED = (3, 7)  # of the trial's tensor


class WholeVectors:
    """The forward of one activation, in pieces. Holds no module: one that held itself would outlive its model."""

    def __init__(self, own: Callable[[Tensor], Tensor]) -> None:
        self._own = WeakMethod(own)

    def __call__(self, x: Tensor) -> Tensor:
        own = self._own()
        assert own is not None
        n = x.numel()
        if x.device.type != "cpu" or not n or (n % STEP == 0 and n <= PIECE and x.is_contiguous()):
            return own(x)
        flat = pad(x.reshape(-1), (0, -n % STEP))
        return torch.cat([own(piece) for piece in flat.split(PIECE)])[:n].view(x.shape)


class WholeRows:
    """A gate that experts compute themselves (gpt-oss), x [M, W] -> [M, W / 2]: rows that are whole vectors in pieces,
    others one by one."""

    def __init__(self, own: Callable[[Tensor], Tensor]) -> None:
        self._own = WeakMethod(own)

    def __call__(self, x: Tensor) -> Tensor:
        own = self._own()
        assert own is not None
        n, wide = x.shape
        if x.device.type != "cpu" or not n:
            return own(x)
        at_once = PIECE // wide if wide % (2 * STEP) == 0 else 1
        return torch.cat([own(rows) for rows in x.split(max(1, at_once))])


@torch.no_grad()
def make_activations_invariant_(root: nn.Module) -> int:
    """Have all modules below `root` that are found to be a function of single numbers computed so, and gates of experts
    without such a module. Returns how many."""
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
    """Whether it gives each number by itself, and another one than came in."""
    x = torch.linspace(-4, 4, MIXED[0] * MIXED[1]).view(MIXED)
    found = probe_output(module, x)
    if found is None or found.shape != x.shape or torch.equal(found, x):
        return False
    alone = [probe_output(module, one) for one in x.view(-1, 1)]
    if any(one is None or one.shape != (1,) for one in alone):
        return False
    return torch.allclose(torch.cat([one for one in alone if one is not None]), found.flatten(), rtol=1e-5, atol=1e-6)
