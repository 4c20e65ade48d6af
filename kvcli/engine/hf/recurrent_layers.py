"""Recurrent layers: modules with a recurrent state (recurrent, convolutional, linear attention), and how passes update
it.

They are found by their use of the cache: they request a state where attention requests keys. Their arithmetic is
unchanged. If a pass is accepted in part, the state is computed again over the accepted rows, by the kernel that made it
if it can. Otherwise each recurrent layer runs once more, with its linear layers replaying their recorded outputs. So no
weight is read twice, and this works for every recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from kvcli.engine.hf.cache_shim import CacheShim, RunningPass, active_pass, current, weak
from kvcli.errors import BadModel
from kvcli.kernels.gated_delta import SERVED, implementation
from kvcli.kernels.module_probe import REFUSALS
from kvcli.kv.recurrent_state import NOTHING, Key, RecurrentStates, StateCheckpoint, StateUpdate

# Most accepted rows that are replayed row by row. Without special kernels PyTorch computes chunks of 64 rows, and on a
# CPU one chunk takes as long as four single rows (a gated delta net of 12 heads).
FEW = 3

Call = tuple[Sequence[Any], Mapping[str, Any]]  # arguments of a module call


@dataclass
class SequenceSlice:
    """The rows of one sequence in a pass, and the updates of its recurrent states."""

    states: RecurrentStates
    folding: StateUpdate
    rows: slice  # rows of the pass
    tape: dict[RecordedLinear, list[Tensor]] | None = None  # outputs of linear layers; None = all rows will be accepted
    is_captured: bool = False  # the states before these rows are at fixed addresses, where `advance_` updates them
    # in order; arguments are kept if there is a tape
    calls: dict[RecurrentLayer, Call | None] = field(default_factory=dict)
    # state after the first rows only, by number of rows; in a captured pass, the function that updates it in place
    behind: dict[Key, Callable[[Any], Any]] = field(default_factory=dict)
    _last: Callable[[Any], Any] | None = None

    def made_by(self, behind: Callable[[Any], Any]) -> None:
        """Set the function that recomputes the next stored state after fewer rows."""
        self._last = behind if self.tape is not None else None

    def advance_(self, count: Tensor) -> None:
        """Update the states before these rows, in place, by the first `count` [1] of them, a number on the device."""
        self.folding.advance_convolutions_(count)
        for behind in self.behind.values():
            behind(count)

    def stored(self, key: Key, state: Tensor) -> None:
        """Store the state after these rows."""
        self.folding.rec[key] = state
        if self._last is not None:
            self.behind[key], self._last = self._last, None


class StateCacheShim(CacheShim):
    """The layers' cache in a pass over a model with recurrent layers: each layer gets the state of its sequence."""

    has_states = True

    def __init__(self, parts: Sequence[SequenceSlice], n_mixers: int, of: CacheShim | None = None) -> None:
        """`of`: the cache shim for a model without recurrent layers."""
        super().__init__(of.latents, may_expand=of.may_expand) if of is not None else super().__init__()
        self.parts, self._n_mixers = parts, n_mixers
        self.now = parts[0]  # slice that a recurrent layer computes
        # recorded outputs of linear layers, while a pass is replayed
        self.answers: dict[RecordedLinear, Iterator[Tensor]] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state [1, C, W], or None at the start of the sequence."""
        return self.now.folding.conv_state((layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state, or None at the start of the sequence."""
        return self.now.folding.recurrent_state((layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Prepend the history to these rows [1, C, N]."""
        return self.now.folding.join((layer_idx, state_idx), conv_states, conv_kernel_size or conv_states.shape[-1])

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Store the state after these rows."""
        self.now.stored((layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that a history is not overwritten in place."""
        return True

    def advance_state(self, i: int) -> Callable[[int], None]:
        """Return the function that advances the states of the i-th sequence by its accepted rows."""
        part = self.parts[i]
        assert len(part.calls) == self._n_mixers, "a pass ended before a recurrent layer"
        return partial(self._fold, part)

    def _fold(self, part: SequenceSlice, n: int) -> None:
        rec: Mapping[Key, Tensor] = part.folding.rec
        if n < part.folding.n_rows and rec:  # convolution histories are cut instead
            rec = self._again(part, n)
        part.states.advance(part.folding.known(n, rec))

    def _again(self, part: SequenceSlice, n: int) -> Mapping[Key, Tensor]:
        """Return the recurrent states after the first n rows of a sequence."""
        assert part.tape is not None, "rows of a prompt were rejected"
        if part.behind:
            return {key: behind(n) for key, behind in part.behind.items()}
        known, replay = part.folding.before, RunningPass()
        replay.cache_shim = self
        for rows in [slice(i, i + 1) for i in range(n)] if n <= FEW else [slice(0, n)]:
            self.answers = {layer: (t[..., rows, :] for t in outputs) for layer, outputs in part.tape.items()}
            self.now = again = SequenceSlice(part.states, StateUpdate(known, rows.stop - rows.start), rows)
            with torch.inference_mode(), active_pass(replay):
                for mixer, call in part.calls.items():
                    assert call is not None, "the calls of the recorded pass are missing"
                    mixer.run(again, _picked(call, part.folding.n_rows, rows))
            known = again.folding.known(rows.stop - rows.start, again.folding.rec)
        return known.rec


class RecurrentLayer:
    """A recurrent layer, as the replacement of its module's forward. The rows of several sequences run one sequence at
    a time."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = ref(module), weak(module.forward)
        self._by_row: RowwiseGatedDelta | None = None
        self._linears = [name for name, inner in module.named_modules() if isinstance(inner, nn.Linear)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the module's signature: [1, N, E] -> [1, N, E]."""
        cache_shim = _state_shim()
        if cache_shim is None:
            return self._forward()(*args, **kwargs)
        if len(cache_shim.parts) == 1:
            return self.run(cache_shim.parts[0], (args, kwargs))
        n, outputs = cache_shim.parts[-1].rows.stop, list[Any]()
        for part in cache_shim.parts:
            cache_shim.now = part
            outputs.append(self.run(part, _picked((args, kwargs), n, part.rows)))
        return tree_map(lambda *each: torch.cat(each, dim=1) if isinstance(each[0], Tensor) else each[0], *outputs)

    def run(self, part: SequenceSlice, call: Call) -> Any:
        """Run the rows of one sequence."""
        part.calls[self] = call if part.tape is not None and self._by_row is None else None
        return (self._by_row or self._forward())(*call[0], **call[1])

    def by_row(self) -> RowwiseGatedDelta | None:
        """Return the row-by-row kernel of this layer; None if there is none."""
        return by_row(self._held(), _now)

    def settle(self, its: RowwiseGatedDelta | None) -> None:
        """Use this row-by-row kernel; with None, record the outputs of the layer's present linear layers."""
        self._by_row, module = its, self._held()
        if its is not None:
            return
        for name in self._linears:
            inner = module.get_submodule(name)
            if not isinstance(inner.forward, RecordedLinear):
                inner.forward = RecordedLinear(inner.forward)

    def _held(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the model was freed"
        return module


class RecordedLinear:
    """A linear layer inside a recurrent layer, as the replacement of its forward. It records its outputs."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = weak(forward)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute x [.., N, E] -> [.., N, F], or replay it from the recording."""
        cache_shim = _state_shim()
        if cache_shim is not None and cache_shim.answers is not None:
            return next(cache_shim.answers[self])
        outputs: Tensor = self._forward()(x, *args, **kwargs)
        if cache_shim is not None and cache_shim.now.tape is not None:
            cache_shim.now.tape.setdefault(self, []).append(outputs)
        return outputs


class RecurrentLayers:
    """The recurrent layers of a model, in the order in which they run."""

    def __init__(
        self, found: Sequence[RecurrentLayer] = (), like: StateCheckpoint = NOTHING, *, are_last: bool = False
    ) -> None:
        """`like`: their states after one token. `are_last`: a recurrent layer runs after the last attention layer."""
        self.like, self.are_last = like, are_last
        self.are_by_row = False  # states are computed row by row, whatever rows share the pass
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def refuse(self, name: str, why: str, try_: Sequence[str]) -> None:
        """Raise BadModel if there are recurrent layers, because they rule something out for the model of that name."""
        if self._found:
            raise refused(name, why, try_)

    def settle(self) -> None:
        """Choose kernels. Call it when the model is on its device, and whenever linear layers were replaced."""
        found = [mixer.by_row() for mixer in self._found]
        self.are_by_row = bool(found) and all(found)  # all layers are replayed in the same way
        for mixer, its in zip(self._found, found, strict=True):
            mixer.settle(its if self.are_by_row else None)

    @property
    def why_not_captured(self) -> str:
        """Reason why passes are not captured; "" if they can be."""
        return "no kernel computes its recurrent layers row by row" if self._found and not self.are_by_row else ""

    def cache_shim(self, parts: Sequence[SequenceSlice], plain: CacheShim) -> StateCacheShim:
        """Return the layers' cache for a pass over these sequences, in place of `plain`."""
        return StateCacheShim(parts, len(self._found), plain)


def refused(name: str, why: str, try_: Sequence[str]) -> BadModel:
    """Return the error for a feature that recurrent layers rule out."""
    return BadModel(f"{name} has recurrent layers: {why}", code="keeps_states", try_=try_)


# ---- detection ----


class RecurrentLayerFinder(StateCacheShim):
    """A layers' cache for one probe call, which notes the module that is running when a state is stored."""

    def __init__(self) -> None:
        super().__init__([SequenceSlice(RecurrentStates(), StateUpdate(NOTHING, 1), slice(0, 1))], 0)
        self._running: list[nn.Module] = []
        self._found: dict[nn.Module, None] = {}  # in order
        self.given: dict[int, tuple[Tensor, Tensor]] = {}  # by the layer's own index: the tensors that it would store
        self._are_last = False

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note a layer with attention."""
        self._are_last, self.given[layer_idx] = False, (k, v)
        return super().update(k, v, layer_idx, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note a layer with a convolution history."""
        self._note()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note a layer with a recurrent state."""
        self._note()
        return super().update_recurrent_state(*args, **kwargs)

    def _note(self) -> None:
        self._found[self._running[-1]] = None
        self._are_last = True

    def recurrent_layers(self) -> RecurrentLayers:
        """Replace the forward of each module that was found, and return the recurrent layers."""
        folding = self.now.folding
        within = {inner for module in self._found for inner in module.modules() if inner is not module}
        outer = [module for module in self._found if module not in within]
        return RecurrentLayers([*map(_mixer, outer)], folding.known(1, folding.rec), are_last=self._are_last)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Track the running module during a call."""

        def enter(module: nn.Module, _: object) -> None:
            self._running.append(module)

        def leave(module: nn.Module, _: object, __: object) -> None:
            self._running.pop()

        hooks = [m.register_forward_pre_hook(enter) for m in model.modules()]
        hooks += [m.register_forward_hook(leave) for m in model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _mixer(module: nn.Module) -> RecurrentLayer:
    """Return the recurrent layer of a module; it exists already if the model was wrapped before."""
    if not isinstance(module.forward, RecurrentLayer):
        module.forward = RecurrentLayer(module)
    return module.forward


def _state_shim() -> StateCacheShim | None:
    """Return the layers' cache of the running pass, if its model has recurrent layers."""
    its_pass = current()
    found: Any = its_pass.cache_shim if its_pass is not None else None
    return found if found is not None and found.has_states else None


def _now() -> SequenceSlice:
    """Return the sequence slice that a recurrent layer currently computes."""
    cache_shim = _state_shim()
    assert cache_shim is not None, "no pass is running"
    return cache_shim.now


def _picked(call: Call, n: int, rows: slice) -> Call:
    """Return the arguments of a call for some of its n rows: tensors of n elements in dimension 1 are sliced."""

    def pick(t: Any) -> Any:
        return t[:, rows] if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] == n else t

    found: Call = tree_map(pick, call)
    return found


# Recurrent layers with the gated delta rule or with a short convolution alone, computed row by row by our kernels.
#
# transformers has two functions for the rule, one for single rows and one for 64 at a time, which round differently. A
# layer's forward finds them in the globals of its file. Here a copy of that forward, for one module, gets globals with
# our functions. On a CPU element-wise functions run in our kernel too, because torch's loops there round an element by
# its index.


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
    """The forward of one recurrent layer with our kernels. It holds no module, because a module that refers to itself
    would outlive its model."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], now: Callable[[], SequenceSlice]) -> None:
        """`now`: returns the sequence slice that the layer currently computes."""
        self._module, self._now = ref(module), now
        ours = {**dict.fromkeys(RULES, self._rule), CONV: self._conv}
        self._forward = FunctionType(
            forward.__code__, {**forward.__globals__, **ours}, closure=forward.__closure__, argdefs=forward.__defaults__
        )
        self._forward.__kwdefaults__ = forward.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the module's signature: [1, N, E] -> [1, N, E]."""
        with _Numbers(getattr(self._kernels(args[0] if args else kwargs["hidden_states"]), "numbers", None)):
            return self._forward(self._module(), *args, **kwargs)

    def _kernels(self, like: Tensor) -> Any:
        return implementation(like, is_captured=self._now().is_captured)

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
        Dv]; in a captured pass the state before them, which is to be updated once it is known how many are accepted."""
        rows = (query[0], key[0], value[0], g[0], beta[0])
        state = None if initial_state is None else initial_state[0]
        kernels, part, how = self._kernels(value), self._now(), {"is_normed": use_qk_l2norm_in_kernel}
        if part.is_captured:
            out, made = kernels.gated_delta(*rows, state, **how, is_captured=True)
            part.made_by(partial(kernels.advance_, *rows, state, **how))
        else:
            out, made = kernels.gated_delta(*rows, state, **how)
            part.made_by(partial(_behind, rows, state, kernels, how))
        return out[None], made[None]

    def _conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
    ) -> Tensor:
        """Compute earlier rows and these [1, C, L] -> these [1, C, N]."""
        kernels, n = self._kernels(hidden_states), self._now().folding.n_rows
        found: Tensor = kernels.causal_conv(hidden_states[0], weight, bias, n, activation is not None)
        return found.T[None]


def _behind(rows: Rows, state: Tensor | None, kernels: Any, how: Mapping[str, bool], n: int) -> Tensor:
    """Return the state after the first n rows of a call."""
    found: Tensor = kernels.gated_delta(*(t[:n] for t in rows), state, **how)[1]
    return found[None]


class _Numbers(TorchFunctionMode):
    """Element-wise functions in our kernel, if given, whose bits do not depend on the index of an element."""

    def __init__(self, numbers: Callable[[Tensor, str], Tensor] | None) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, f: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_plain = len(args) == 1 and not any((kwargs or {}).values())  # not in place, no other variant
        name = _NUMBERS.get(f) if is_plain and self._numbers is not None else None
        if name is not None and self._numbers is not None and args[0].dtype in SERVED:
            return self._numbers(args[0], name)
        return f(*args, **(kwargs or {}))


def by_row(module: nn.Module, now: Callable[[], SequenceSlice]) -> RowwiseGatedDelta | None:
    """Return a replacement for the module's forward; None if its recurrence differs or there is no kernel."""
    forward = unwrap(type(module).forward)
    weights = [p for p in module.parameters() if p.is_floating_point()]
    is_served = all(implementation(p) is not None for p in weights)
    if not is_served or not isinstance(forward, FunctionType) or hasattr(module, "_hf_hook"):
        return None
    names = {*forward.__code__.co_names} & {*forward.__globals__}
    is_convolution = CONV in names and "get_recurrent_state" not in forward.__code__.co_names
    if not is_convolution and not {*RULES, CONV} <= names:
        return None
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        return None
    functions = [forward.__globals__[name] for name in ((CONV,) if is_convolution else (CONV, *RULES))]
    return RowwiseGatedDelta(module, forward, now) if _are_known(weights[0].device, *functions) else None


@cache
@torch.inference_mode()
def _are_known(device: torch.device, conv: Callable[..., Any], *rules: Callable[..., Any]) -> bool:
    """True if these functions compute what ours do, on random rows of two heads that share a key."""
    noise = torch.Generator().manual_seed(0)
    sizes = (1, 3, 1, 16), (1, 3, 1, 16), (1, 3, 2, 32), (1, 3, 2), (1, 3, 2), (1, 2, 16, 32), (1, 8, 9), (8, 4)
    q, k, v, g, beta, state, x, w = (torch.randn(*by, generator=noise).to(device) for by in sizes)
    g, beta, kernels, within = -g.abs(), beta.sigmoid(), implementation(x), 1e-3 if device.type == "cpu" else 1e-2
    kwargs: dict[str, Any] = {"g": g, "beta": beta, "initial_state": state}
    kwargs |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    ours = kernels.gated_delta(q[0], k[0], v[0], g[0], beta[0], state[0])
    try:
        theirs = [given[0] for rule in rules for given in rule(q, k, v, **kwargs)]
        pairs = [*zip(theirs, ours * len(rules), strict=True)]
        pairs.append((conv(x, w, None, activation="silu")[0, :, -2:].T, kernels.causal_conv(x[0], w, None, 2, True)))
    except REFUSALS:
        return False
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=within, atol=within / 10) for a, b in pairs)
