"""A loaded model as passes, policies and KV caches see it. `loading.open_lm` opens one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.engine.hf import layer_gates, model_settings
from kvcli.engine.hf.cache_shim import current
from kvcli.engine.hf.direct_forward import DirectForward
from kvcli.engine.hf.mla import LatentProjection
from kvcli.engine.hf.recurrent_layers import RecurrentLayers
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.ranks import Ranks
from kvcli.environment import LargeBlocks
from kvcli.kernels.linear_skinny import MOST
from kvcli.kernels.rope import Rotary
from kvcli.kv.slots import AttentionParams, LayerShape
from kvcli.models.catalog import Hashes, Stamped
from kvcli.models.sampling import generation_defaults


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The properties of a model that our attention and KV cache need."""

    heads: tuple[int, ...]  # query heads by layer
    attention_params: tuple[AttentionParams, ...]
    attention_sink_logits: tuple[Tensor | None, ...]
    attentions: tuple[nn.Module, ...]
    stored: tuple[LayerShape, ...]
    recurrent_layers: RecurrentLayers
    latents: Mapping[int, LatentProjection]  # by the layer's own index, for layers that store latents
    layers: nn.ModuleList | None  # decoder layers, if the model has a list of them
    notes: tuple[str, ...]


class LM:
    """A causal language model that runs with our attention. It holds weights only, no state of any sequence."""

    def __init__(
        self,
        model: Any,
        layout: ModelLayout,
        info: ModelInfo,
        check_gates: Callable[[LM], None],
        places: Sequence[torch.device] | None = None,
    ) -> None:
        """`check_gates` raises BadModel if rows cannot be stopped between layers. `places`: the device of each layer,
        if they differ from the model's."""
        self.model = model
        self.n_layers = len(layout.attentions)  # layers with attention
        self.recurrent_layers = layout.recurrent_layers  # recurrent layers; none in most models
        self.recurrent_layers.settle()
        self.heads = layout.heads  # query heads by layer; keys and values are described in `shapes`
        self.vocab = info.vocab
        self.dtype: torch.dtype = model.dtype
        self.entry: torch.device = model.device  # device of the token ids
        self.device = places[-1] if places is not None else self.entry  # device of the logits
        self.is_split = places is not None
        self.is_on_accelerator = self.device.type != "cpu"  # reading a result there waits for the device
        self.shapes = _with_devices(layout.stored, places, self.device)  # per layer
        # layers that store slots; each other layer reads the slots of one of these
        self.storing = [layer for layer, of in enumerate(self.shapes) if of.shared_from is None]
        self.attentions = layout.attentions  # per layer
        self.latents = layout.latents  # by layer, for layers that store latents
        self.attention_params = layout.attention_params  # per layer
        self.sinks = layout.attention_sink_logits  # per layer, [H] learned sink logits of attention; None = none
        self.windows = tuple(params.window for params in self.attention_params)  # None = full attention
        self.sliding = [layer for layer, window in enumerate(self.windows) if window is not None]
        # the largest number of any layer
        self.n_heads, self.n_kv_heads, self.head_dim = info.heads, info.kv_heads, info.head_dim
        self.limit = info.limit  # tokens
        self.stop_ids = model_settings.stop_ids(model, info.id)
        self.stop_strings = model_settings.stop_strings(model)
        # texts -> ids of the tokens that contain one of them; set with the tokenizer
        self.tokens_with: Callable[[tuple[str, ...]], frozenset[int]] = lambda texts: frozenset()
        self.generation = generation_defaults(getattr(model, "generation_config", None), info.id)
        self.info = info
        self.files: dict[str, list[Stamped]] = {}  # files that it was loaded from, with their state at that time
        self.hashes = Hashes()  # hashes of these files, and those of earlier runs if set
        # batch invariant, as tested: a row has the same bits whatever else is in the pass
        self.is_row_invariant = False
        self.has_pool = False  # native kernels run on threads of their own, once installed (resources.py)
        self.direct_forward: DirectForward | None = None  # forward pass without transformers' loop, once installed
        self.ranks = Ranks()  # the processes that share the weights; alone without torchrun
        self.clock: Callable[[], float] = time.perf_counter if self.ranks.n == 1 else self.ranks.clock
        self.free_bytes: int | None = None  # free bytes of the device, once measured (resources.free_beside_weights)
        self.stream: int | None = None  # CUDA stream of its passes, once one ran (resources.check_stream)
        # rotary embedding of keys by layer, once requested (rope.py)
        self.rotaries: tuple[Rotary | None, ...] | None = None
        # data kept between sequences, by kind: findings of drafters, MTP layers, captured passes
        self.remembers: dict[object, Any] = {}
        self.large_blocks = LargeBlocks()
        self.layers = layout.layers  # decoder layers, if the model has a list of them
        self._check_gates, self._has_gates = check_gates, False  # layer gates are installed and work
        self._shown = set[int]()  # layers whose inputs are recorded; -1 = the output layer

    def __deepcopy__(self, memo: object) -> LM:
        """Return itself: copied sequences share the model."""
        return self

    @property
    def is_batch_variant(self) -> bool:
        """True if a row's numbers may depend on how many rows share its pass, by more than float32 rounding."""
        return self.dtype.itemsize < 4 and not self.is_row_invariant

    @property
    def max_invariant_rows(self) -> int | None:
        """Most decoding rows of a pass without prompt rows that is still batch invariant; None = any number."""
        return MOST if self.is_on_accelerator and self.is_row_invariant else None

    def check_layer_gates(self) -> None:
        """Raise BadModel if rows cannot be stopped between layers; called by the first request that needs it.

        It installs the gates. They add a call per layer and pass, and most models never need them.
        """
        if self._has_gates:
            return
        try_ = ["--set prefill.order=chunks", "--set prune.method=none", "--set reuse.method=none"]
        self.recurrent_layers.refuse(self.info.id, "tokens cannot stop between them", try_)
        self._has_gates = True  # set for the passes of the check
        try:
            layer_gates.install(self.layers or ())
            self._check_gates(self)
        except BaseException:
            self._has_gates = False
            raise

    def enable_hidden_states(self, layers: Collection[int]) -> None:
        """Record the inputs of these layers in passes that request them; -1 = of the output layer."""
        for layer in {*layers} - self._shown:
            self._shown.add(layer)
            module = self.model.get_output_embeddings() if layer < 0 else (self.layers or ())[layer]
            module.register_forward_pre_hook(partial(_show, layer))


def _show(layer: int, module: nn.Module, given: tuple[Tensor, ...]) -> None:
    its_pass = current()
    if its_pass is not None and layer in its_pass.shows:
        its_pass.hidden_states[layer] = given[0][0]


def _with_devices(
    stored: Sequence[LayerShape], places: Sequence[torch.device] | None, device: torch.device
) -> tuple[LayerShape, ...]:
    """Return the layers' shapes with the device of those on another device."""
    elsewhere = [None if place == device else place for place in places or [device] * len(stored)]
    return tuple(replace(of, device=place) if place else of for of, place in zip(stored, elsewhere, strict=True))
