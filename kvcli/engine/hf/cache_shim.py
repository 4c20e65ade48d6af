"""What layers get as their cache in a call of a model, and of which pass it is: both reach those that drop keywords."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcli.engine.hf.mla import LatentProjection
    from kvcli.engine.hf.recurrent_layers import SequenceSlice


class CacheShim:
    """What layers get as their cache in one call of a model: only what they ask of one, and no transformers Cache.

    It stores nothing: keys and values are handed on to attention, whose pass knows the past. Of layers that expand
    what they store it notes that, and leaves them nothing to expand.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # by layer, of which it has none
    layers: tuple[object, ...] = ()
    parts: Sequence[SequenceSlice] = ()  # of its texts, where mixers ask for their states (recurrent_layers.py)

    def __init__(
        self, latents: Mapping[int, LatentProjection] = MappingProxyType({}), *, may_expand: bool = False
    ) -> None:
        """`latents`: by layer, of those that expand what they store; `may_expand`: where that pays they do."""
        self.latents, self.may_expand = latents, may_expand
        self.noted: dict[int, Tensor] = {}  # by layer: keys [1, N, R + T] over latents
        self.expanded: dict[
            int, tuple[LatentProjection, Tensor, Tensor, Tensor]
        ] = {}  # and q, k, v [H, N, ..] made of them

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, N, D] of the rows of the call, as they came; or latents and turned parts [1, 1, N, ..]
        for which one row of nothing is given back where they are not to be expanded."""
        if (latent := self.latents.get(layer_idx)) is None:
            return k, v
        self.noted[layer_idx] = torch.cat((k, v), -1)[0]
        if self.may_expand and k.shape[2] >= latent.expand_threshold:
            return k, v
        return latent.nothing(k), v[:, :, :1]

    def advance_state(self, i: int) -> Callable[[int], None] | None:
        """What has the states of its i-th text take in so many of its rows (recurrent_layers.py); None = there are
        none."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows bring their positions, and those of several texts in one call have no common past.

        Nor may a recorded call ask how long one is.
        """
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as above."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask is over, and where they begin: the rows of the call."""
        return query_length, 0


@lru_cache(64)
def cache_name(model: Any) -> str | None:
    """What this class calls its cache: renamed in transformers 5.24, which warns in each call under the old name."""
    told = signature(getattr(model, "forward", model)).parameters
    return next((name for name in ("cache", "past_key_values") if name in told), None)


class _Stack(threading.local):
    """Of each thread its own: engines in two threads know nothing of each other, over one model or several."""

    def __init__(self) -> None:
        self.passes: list[tuple[object, CacheShim]] = []


_stack = _Stack()  # a registered function is all that a model calls: what it finds its pass by is a process's, too


@contextmanager
def active_pass(its_pass: object, trial: CacheShim | None = None) -> Iterator[None]:
    """For the length of a call it is of this pass, or of what travels in its place; None = of none. `trial`: what
    layers get as their cache."""
    _stack.passes.append((its_pass, trial or CacheShim()))
    try:
        yield
    finally:
        _stack.passes.pop()


def current() -> Any:
    """Of which pass the innermost call of this thread is; None = of none."""
    return _stack.passes[-1][0] if _stack.passes else None


def target_hidden_states(like: Tensor) -> Tensor:
    """Hidden states of the model that writes, as they came with the innermost pass, in the type and shape of `like`
    [1, N, E]; zeros where the call is of none, or brings none."""
    given: Tensor | None = getattr(current(), "hidden", None)
    return torch.zeros_like(like) if given is None else given.to(like).unsqueeze(0)


def latent_notes(layer: int) -> tuple[LatentProjection, Tensor] | None:
    """What the innermost call of this thread noted of a layer that stores latents: what expands them, and the keys of
    its rows [1, N, R + T]; None = the layer stores what it hands to attention."""
    trial = _stack.passes[-1][1]
    return (trial.latents[layer], trial.noted[layer]) if layer in trial.noted else None
