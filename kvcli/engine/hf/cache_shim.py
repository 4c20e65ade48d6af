"""A call of a transformers model: the cache object that its layers get, and the stack of running passes. Neither is
passed by a keyword of its own, which some layers would drop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import ismethod, signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.tables import sent

if TYPE_CHECKING:
    from kvcli.engine.hf.mla import LatentProjection
    from kvcli.kv.slots import AttentionParams


class CacheShim:
    """A stand-in for a transformers Cache in one model call, with only the members that layers use.

    It stores no KV. Keys and values are passed on to attention, whose pass has the KV cache. For layers that expand
    latents it notes the latents; the layer expands them only if `may_expand`, and if that is faster.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # by layer; there are none
    layers: tuple[object, ...] = ()
    has_states = False  # it has recurrent states too (recurrent_layers.py)

    def __init__(
        self, latents: Mapping[int, LatentProjection] = MappingProxyType({}), *, may_expand: bool = False
    ) -> None:
        """`latents`: by layer, projections of layers that store latents; `may_expand`: expand them if that is
        faster."""
        self.latents, self.may_expand = latents, may_expand
        self.noted: dict[int, Tensor] = {}  # by layer: keys [1, N, R + T] over latents
        # by layer: the projection, and expanded q, k, v [H, N, ..]
        self.expanded: dict[int, tuple[LatentProjection, Tensor, Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values [1, K, N, D] of the rows unchanged. For latents and rotary parts [1, 1, N, ..]
        that are not to be expanded, return a single placeholder row."""
        if (latent := self.latents.get(layer_idx)) is None:
            return k, v
        self.noted[layer_idx] = torch.cat((k, v), -1)[0]
        if self.may_expand and k.shape[2] >= latent.expand_threshold:
            return k, v
        return latent.nothing(k), v[:, :, :1]

    def advance_state(self, i: int) -> Callable[[int], None] | None:
        """Return the function that advances the recurrent states of the i-th sequence by so many rows
        (recurrent_layers.py); None = no recurrent layers."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: rows have explicit positions, and the sequences in one call share no cache.

        A captured call could not read a length anyway.
        """
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero, as above."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys under a mask and the first of them: the rows of the call."""
        return query_length, 0


@lru_cache(64)
def cache_name(model: Any) -> str | None:
    """Return the name of the cache argument of this class. transformers 5.24 renamed it and warns in each call with the
    old name."""
    parameters = signature(getattr(model, "forward", model)).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


class RunningPass:
    """A pass through the layers of a model, as the replaced functions and modules of the model find it (`current`)."""

    layers: range | None = None  # layers to run; None = all
    last = -1  # last layer whose output is needed; -1 = run to the logits
    hidden: Tensor | None = None  # [N, E] input of the first of these layers; after the last one, its output
    shows: tuple[int, ...] = ()  # layers whose inputs are recorded; -1 = the output layer
    hidden_states: dict[int, Tensor]  # by layer [N, E], those inputs; of the output layer of the wanted rows only
    cache_shim: CacheShim | None = None  # the layers' cache; None = an empty one

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer: q [H, N, D], k, v [K, N, D] after rotary embedding -> [H, N, D]."""
        raise NotImplementedError


class _Stack(threading.local):
    """The stack of running passes of one thread. Engines in two threads are independent, over one model or several."""

    def __init__(self) -> None:
        self.passes: list[tuple[RunningPass | None, CacheShim]] = []


# process-wide, because a model calls only the registered attention function, which finds its pass here
_stack = _Stack()


@contextmanager
def active_pass(its_pass: RunningPass | None, cache_shim: CacheShim | None = None) -> Iterator[None]:
    """Make this the running pass for the length of a model call; None = no pass. `cache_shim`: the layers' cache; by
    default that of the pass."""
    cache_shim = cache_shim or (its_pass.cache_shim if its_pass is not None else None) or CacheShim()
    _stack.passes.append((its_pass, cache_shim))
    try:
        yield
    finally:
        _stack.passes.pop()


def current() -> RunningPass | None:
    """Return the innermost running pass of this thread; None = no pass."""
    return _stack.passes[-1][0] if _stack.passes else None


def target_hidden_states(like: Tensor) -> Tensor:
    """Return the target model's hidden states from the innermost pass, in the dtype and shape of `like` [1, N, E];
    zeros without a pass or without hidden states."""
    its_pass = current()
    given = its_pass.hidden if its_pass is not None else None
    return torch.zeros_like(like) if given is None else given.to(like).unsqueeze(0)


def latent_notes(layer: int) -> tuple[LatentProjection, Tensor] | None:
    """Return the latent projection of a layer and the keys of its rows [1, N, R + T], noted in the innermost call of
    this thread; None = the layer stores what it passes to attention."""
    cache_shim = _stack.passes[-1][1]
    return (cache_shim.latents[layer], cache_shim.noted[layer]) if layer in cache_shim.noted else None


def weak(forward: Callable[..., Any]) -> Callable[[], Any]:
    """Return a weak reference to a module's own forward, for what replaces it: a module that refers to itself would
    outlive its model. Replacements by others (accelerate's) are no methods, and are kept."""
    return WeakMethod(forward) if ismethod(forward) else lambda: forward


def call(
    model: Any,
    ids: Sequence[int] | Tensor,
    pos: Sequence[int] | Tensor | None = None,
    want: Sequence[int] | Tensor | None = None,
    *,
    device: torch.device | None = None,
    its_pass: RunningPass | None = None,
    cache_shim: CacheShim | None = None,
) -> Tensor:
    """Return the logits [len(want), V] of one forward pass of a transformers model. Without `pos`, positions count from
    0; without `want`, all rows are wanted. Tensors are int64 on the model's device.

    `device`: the device of the model; None = found by a search through its modules. `its_pass`: the pass to which
    `forward.attention` hands the rows; None if the model has another attention function. `cache_shim`: the layers'
    cache; by default that of the pass, and none without a pass.
    """
    where = device or model.device

    def tensor(numbers: Sequence[int] | Tensor) -> Tensor:
        return numbers if isinstance(numbers, Tensor) else sent(torch.tensor(list(numbers), dtype=torch.int64), where)

    more: dict[str, object] = {}
    with torch.inference_mode(), active_pass(its_pass, cache_shim):
        if (its_pass, cache_shim) != (None, None) and (name := cache_name(model.__class__)) is not None:
            more[name] = _stack.passes[-1][1]
        if pos is not None:
            more["position_ids"] = tensor(pos).unsqueeze(0)
        if want is not None:
            more["logits_to_keep"] = tensor(want)
        logits: Tensor = model(input_ids=tensor(ids).unsqueeze(0), use_cache=False, **more).logits[0]
    return logits
