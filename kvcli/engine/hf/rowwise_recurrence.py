"""Recurrent layers with the gated delta rule, computed row by row by our kernel on a CPU.

transformers has two functions for the rule, one for single rows and one for 64 at a time, which round differently. A
layer's forward finds them in the globals of its file. Here a copy of that forward, for one module, gets globals with
our functions. Element-wise functions run in our kernel too, because torch's loops round an element by its index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvcli.kernels import native
from kvcli.kernels.gated_delta import SERVED, causal_conv, gated_delta, numbers
from kvcli.kernels.module_probe import REFUSALS

if TYPE_CHECKING:
    from kvcli.engine.hf.recurrent_layers import SequenceSlice

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")  # names of these functions in transformers
CONV = "causal_conv1d_fn"
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k [N, K, Dk], v [N, H, Dv], g, beta [N, H]
_NUMBERS: dict[Any, str] = {
    torch.Tensor.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.nn.functional.softplus: "softplus",
    torch.nn.functional.silu: "silu",
}


class RowwiseGatedDelta:
    """The forward of one recurrent layer on a CPU, with our kernels. It holds no module, because a module that refers
    to itself would outlive its model."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], now: Callable[[], SequenceSlice]) -> None:
        """`now`: returns the sequence slice that the layer currently computes."""
        self._module, self._now = ref(module), now
        ours = {**dict.fromkeys(RULES, self._rule), CONV: self._conv}
        self._forward = FunctionType(
            forward.__code__, {**forward.__globals__, **ours}, closure=forward.__closure__, argdefs=forward.__defaults__
        )
        self._forward.__kwdefaults__ = forward.__kwdefaults__

    def __call__(self, *args: Any, **told: Any) -> Any:
        """Run the layer with the module's signature: [1, N, E] -> [1, N, E]."""
        with _Numbers():
            return self._forward(self._module(), *args, **told)

    def _rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Compute q, k [1, N, K, Dk], v [1, N, H, Dv], .. -> [1, N, H, Dv], and the state after the rows [1, H, Dk,
        Dv]."""
        rows = (query[0], key[0], value[0], g[0], beta[0])
        state = None if initial_state is None else initial_state[0]
        out, made = gated_delta(*rows, state, is_normed=use_qk_l2norm_in_kernel)
        self._now().made_by(partial(_behind, rows, state, use_qk_l2norm_in_kernel))
        return out[None], made[None]

    def _conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
    ) -> Tensor:
        """Compute earlier rows and these [1, C, L] -> these [1, C, N]."""
        n = self._now().folding.n_rows
        return causal_conv(hidden_states[0], weight, bias, n, activation is not None).T[None]


def _behind(rows: Rows, state: Tensor | None, is_normed: bool, n: int) -> Tensor:
    """Return the state after the first n rows of a call."""
    q, k, v, g, beta = (t[:n] for t in rows)
    return gated_delta(q, k, v, g, beta, state, is_normed=is_normed)[1][None]


class _Numbers(TorchFunctionMode):
    """Element-wise functions in our kernel, whose bits do not depend on the index of an element."""

    def __torch_function__(self, f: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_plain = len(args) == 1 and not any((kwargs or {}).values())  # not in place, no other variant
        if is_plain and (name := _NUMBERS.get(f)) is not None and args[0].dtype in SERVED:
            return numbers(args[0], name)
        return f(*args, **(kwargs or {}))


def by_row(module: nn.Module, now: Callable[[], SequenceSlice]) -> RowwiseGatedDelta | None:
    """Return a replacement for the module's forward on a CPU; None if its recurrence differs or there is no kernel."""
    forward = unwrap(type(module).forward)
    weights = [p for p in module.parameters() if p.is_floating_point()]
    is_served = all(p.device.type == "cpu" and p.dtype in SERVED for p in weights) and native.native() is not None
    if not is_served or not isinstance(forward, FunctionType) or hasattr(module, "_hf_hook"):
        return None
    names = {*forward.__code__.co_names} & {*forward.__globals__}
    if not {*RULES, CONV} <= names or getattr(module, "activation", "silu") not in ("silu", "swish"):
        return None
    functions = [forward.__globals__[name] for name in (*RULES, CONV)]
    return RowwiseGatedDelta(module, forward, now) if _are_known(*functions) else None


@cache
@torch.inference_mode()
def _are_known(chunk: Callable[..., Any], recurrent: Callable[..., Any], conv: Callable[..., Any]) -> bool:
    """True if these functions compute what ours do, on random rows of two heads that share a key."""
    noise = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (torch.randn(1, 3, *by, generator=noise) for by in ((1, 8), (1, 8), (2, 5), (2,), (2,)))
    state, x, w = (torch.randn(*by, generator=noise) for by in ((1, 2, 8, 5), (1, 7, 9), (7, 4)))
    told: dict[str, Any] = {"g": -g.abs(), "beta": beta.sigmoid(), "initial_state": state}
    told |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    ours = gated_delta(q[0], k[0], v[0], told["g"][0], told["beta"][0], state[0])
    try:
        theirs = [given[0] for rule in (chunk, recurrent) for given in rule(q, k, v, **told)]
        pairs = [*zip(theirs, ours * 2, strict=True)]
        pairs.append((conv(x, w, None, activation="silu")[0, :, -2:].T, causal_conv(x[0], w, None, 2, True)))
    except REFUSALS:
        return False
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
