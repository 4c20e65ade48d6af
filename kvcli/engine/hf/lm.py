"""Load a Hugging Face decoder, register our attention with transformers, and verify that both give the same logits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from kvcli import environment
from kvcli.engine import forward
from kvcli.engine.cuda_graphs.captured_pass import CapturedPasses, CudaGraphs
from kvcli.engine.hf import layer_gate_check, layer_gates, model_probe, model_settings
from kvcli.engine.hf.cache_shim import current
from kvcli.engine.hf.fused_layers import DirectForward, direct_forward_of, fuse_
from kvcli.engine.hf.model_probe import is_batch_variant, reduced_model
from kvcli.engine.loading import weights
from kvcli.engine.loading.weight_quantization import quantize_and_place, split, with_devices
from kvcli.engine.resources import drop_pages, free_device_bytes, use_device, use_threads
from kvcli.engine.stats import ModelInfo
from kvcli.errors import BadModel
from kvcli.kernels import attend_invariant, triton_support
from kvcli.kernels.invariant_activations import multiplies
from kvcli.kernels.linear import use_native_linear_
from kvcli.kernels.linear.experts import lay_out_experts_
from kvcli.kernels.linear_blocked import block_
from kvcli.kernels.linear_quantized import packed_weights
from kvcli.kernels.linear_skinny import MOST
from kvcli.kernels.linear_skinny.module import lay_out_skinny_
from kvcli.kernels.rope import Rotary
from kvcli.kv.offload.transfer import bus_of
from kvcli.models.catalog import Hashes, Stamped, model_files
from kvcli.models.checkpoint import CheckpointFormat, count
from kvcli.models.family import read_config
from kvcli.models.refusals import refuse_quant, refuse_split
from kvcli.models.source import Source

_ATTENTION = "kvcli"  # our name in transformers' registries
_PROBE = "kvcli_probe"


class LM:
    """A causal language model that runs with our attention. It holds weights only, no state of any sequence."""

    def __init__(
        self, model: Any, shape: model_probe.ModelLayout, info: ModelInfo, places: Sequence[torch.device] | None = None
    ) -> None:
        """`places`: the device of each layer, if they differ from the model's."""
        self.model = model
        self.n_layers = len(shape.attentions)  # layers with attention
        self.recurrent_layers = shape.recurrent_layers  # recurrent layers; none in most models
        self.recurrent_layers.settle()
        self.heads = shape.heads  # query heads by layer; keys and values are described in `shapes`
        self.vocab = info.vocab
        self.dtype: torch.dtype = model.dtype
        self.entry: torch.device = model.device  # device of the token ids
        self.device = places[-1] if places is not None else self.entry  # device of the logits
        self.is_split = places is not None
        self.is_on_accelerator = self.device.type != "cpu"  # reading a result there waits for the device
        self.shapes = with_devices(shape.stored, places, self.device)  # per layer
        # layers that store slots; each other layer reads the slots of one of these
        self.storing = [layer for layer, of in enumerate(self.shapes) if of.shared_from is None]
        self.attentions = shape.attentions  # per layer
        self.latents = shape.latents  # by layer, for layers that store latents
        self.attention_params = shape.attention_params  # per layer
        self.sinks = shape.attention_sink_logits  # per layer, [H] learned sink logits of attention; None = none
        self.windows = tuple(params.window for params in self.attention_params)  # None = full attention
        self.sliding = [layer for layer, window in enumerate(self.windows) if window is not None]
        # the largest number of any layer
        self.n_heads, self.n_kv_heads, self.head_dim = info.heads, info.kv_heads, info.head_dim
        self.limit = info.limit  # tokens
        self.stop_ids = model_settings.stop_ids(model, info.id)
        self.stop_strings = model_settings.stop_strings(model)
        self.generation = model_settings.generation_defaults(model, info.id)
        self.info = info
        self.files: dict[str, list[Stamped]] = {}  # files that it was loaded from, with their state at that time
        self.hashes = Hashes()  # hashes of these files, and those of earlier runs if set
        # batch invariant, as tested: a row has the same bits whatever else is in the pass
        self.is_row_invariant = False
        self.has_pool = False  # native kernels run on threads of their own, once installed (resources.py)
        self.direct_forward: DirectForward | None = None  # forward pass without transformers' loop, once installed
        self.captured_passes: CapturedPasses | None = None  # captured passes, if the device supports them
        # rotary embedding of keys by layer, once requested (rope.py)
        self.rotaries: tuple[Rotary | None, ...] | None = None
        self.remembers: dict[object, Any] = {}  # data kept between sequences, by kind: findings of drafters, MTP layers
        self._layers = model_probe.decoder_layers(model, shape)
        self._has_gates = False  # layer gates are installed and work
        self._is_shown = False  # input of the output layer is recorded

    @staticmethod
    def of(
        model: Any,
        *,
        id: str = "model",
        path: str = "",
        revision: str = "",
        quant: str = "none",
        device: torch.device | None = None,
        layers_on_gpu: int | None = None,
        verify: bool = False,
        notes: tuple[str, ...] = (),
    ) -> LM:
        """Wrap a transformers causal LM that is already built. Its layers are unchanged, except that modules that
        expand latents are wrapped.

        With `quant` the decoder's linear layers are quantized for `device` (None: the model's device). With
        `layers_on_gpu` so many last layers and the output layer move to `device`; the rest remains. Raises BadModel if
        the model's attention is not supported.
        """
        began = time.perf_counter()
        _register()
        model.eval().requires_grad_(False)
        text = model.config.get_text_config()
        n_layers = count(getattr(text, "num_hidden_layers", None), "num_hidden_layers", id)
        limit, of_limit = model_settings.context_limit(text, id)
        of_rope = model_settings.settle_rope(model, text, id)
        shape = probed(model, n_layers, limit, id)
        for attends in shape.attentions:
            if (latent := shape.latents.get(forward.layer_idx_of(attends))) is not None:
                attends.kv_b_proj = latent
        parameters = sum(p.numel() for p in model.parameters()) + packed_weights(model)
        places = None
        if layers_on_gpu is not None:
            backend, of_layers, places = split(model, shape, quant, device or model.device, layers_on_gpu)
        else:
            backend, of_layers = quantize_and_place(model, shape, quant, device or model.device)
        model.set_attn_implementation(_ATTENTION)
        info = ModelInfo(
            id=id,
            path=path,
            family=str(model.config.model_type),
            parameters=parameters,
            layers=n_layers,
            heads=max(shape.heads),
            kv_heads=max(of.n_kv_heads for of in shape.stored),
            head_dim=max(of.k_dim for of in shape.stored),
            vocab=int(model.get_output_embeddings().weight.shape[0]),
            dtype=str(model.dtype).removeprefix("torch."),
            quant=quant,
            backend=backend,
            device=str(places[-1] if places is not None else model.device),
            limit=limit,
            weight_bytes=_weight_bytes(model),
            load_seconds=time.perf_counter() - began,
            revision=revision,
            notes=(*notes, *of_limit, *of_rope, *shape.notes, *of_layers, *model_settings.unkept(model)),
        )
        lm = LM(model, shape, info, places)
        if verify:
            model_probe.verify_logits(lm, lambda: _attention(model, "eager"), id)
        return lm

    @staticmethod
    @environment.return_large_blocks()
    def load(
        source: Source,
        *,
        quant: str = "none",
        dtype: str = "auto",
        device: str = "auto",
        layers_on_gpu: int | str = "auto",
        threads: int = 0,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
        verify: bool = True,
        graphs: str = "auto",
    ) -> LM:
        """Load the files of `source`. Never uses the network and prints nothing; raises BadModel or UsageError.

        `quant` int8, int4 or nf4: quantized weights, on CUDA by bitsandbytes if no fused kernels support them.
        `graphs`: "auto" or "off".
        """
        began = time.perf_counter()
        where = weights.find_device(device)
        is_quantized = CheckpointFormat.of(source.config).stays(where.type)
        refuse_quant(source.id, quant, where.type, is_quantized=is_quantized)
        refuse_split(layers_on_gpu, where.type, is_quantized=is_quantized)
        if source.is_pickle and not allow_pickle:
            raise BadModel(f"the weights of {source.id} are pickle files", code="model_pickle", try_=["--allow-pickle"])
        use_threads(threads or torch.get_num_threads())
        use_device(where)
        files = model_files(source.path, [file.path for file in source.files], source.made_of)
        with quiet():
            config = read_config(source, trust_remote_code)
            model, notes = weights.load_weights(source, config, dtype, where, trust_remote_code, quant)
            lm = LM.of(
                model,
                id=source.id,
                path=str(source.path),
                revision=source.revision,
                quant=quant,
                device=where,
                layers_on_gpu=None if layers_on_gpu == "auto" else int(layers_on_gpu),
                verify=verify,
                notes=notes,
            )
        for file in (*files["weights"], *files["files"]):
            file.check()
        lm.files = files
        lm.install_kernels()
        if lm.is_on_accelerator:
            lm.enable_graph_capture(graphs)
        lm.info = replace(lm.info, load_seconds=time.perf_counter() - began)
        return lm

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
            layer_gates.install(self._layers or ())
            layer_gate_check.verify_partial_passes(self)
        except BaseException:
            self._has_gates = False
            raise

    def enable_hidden_states(self) -> None:
        """Record the input of the output layer in passes that request it; called by the first such request."""
        if not self._is_shown:
            self._is_shown = True
            self.model.get_output_embeddings().register_forward_pre_hook(_show)

    def install_kernels(self) -> None:
        """Replace linear layers with the fastest kernels of their device, native or fused, where supported.

        Afterwards a test finds out whether the model is batch invariant.
        """
        widened = "in oneDNN's blocks" if multiplies(self.dtype) else "multiplied in float32"
        native, experts = "layers in native panels", "weights of experts and routers in native panels"
        skinny, blocked = (lay_out_skinny_, "layers fused for small batches"), (block_, f"layers {widened}")
        for swap, how in ((use_native_linear_, native), (lay_out_experts_, experts), skinny, blocked):
            if done := swap(self.model, drop_pages):
                self.info = replace(self.info, backend=f"{self.info.backend}, {done} {how}")
        serves = (not attend_invariant.why_not(self.dtype, self.device, of.k_dim, of.v_dim) for of in self.shapes)
        self.has_pool = not self.is_on_accelerator and any(serves)
        for latent in self.latents.values():
            latent.install_kernels()
        self.recurrent_layers.settle()
        if self.recurrent_layers.are_by_row:
            self.info = replace(
                self.info, backend=f"{self.info.backend}, {len(self.recurrent_layers)} recurrences by token"
            )
        if self.is_split:  # fused layers expect all layers on one device
            return
        layers = list(() if self.recurrent_layers else self._layers or ())
        if fused := fuse_(self, layers):
            self.info = replace(self.info, backend=f"{self.info.backend}, {fused} fused")
        with reduced_model(self, layers):
            self.direct_forward = direct_forward_of(self, layers)
            self.is_row_invariant = not is_batch_variant(self)

    def enable_graph_capture(self, graphs: str) -> None:
        """Enable captured passes (captured_pass.py) if the device supports them. The backend's description names them,
        or why not."""
        whys = (
            triton_support.why_not(self.device, self.dtype) if graphs == "auto" else f"load.graphs = {graphs}",
            "its layers are on two devices" if self.is_split else "",
            *(attend_invariant.why_not(self.dtype, self.device, of.k_dim, of.v_dim) for of in self.shapes),
            self.recurrent_layers.why_not_recorded,
        )
        if not (why := next(filter(None, whys), "")):
            self.captured_passes = CapturedPasses(CudaGraphs(self.device))
        how = f"no CUDA graphs: {why}" if why else "CUDA graphs"
        self.info = replace(self.info, backend=f"{self.info.backend}, {how}")

    @cached_property
    def free_device_bytes(self) -> int:
        """Bytes of the device that were free beside the weights at the first call: one number for all sequences."""
        return free_device_bytes(self.device)

    def release(self) -> None:
        """Free the device memory of an ended sequence: captured passes over its KV cache and pinned memory."""
        if self.captured_passes is not None:
            self.captured_passes.release()
        bus_of(self.device).release()


def _show(output: nn.Module, given: tuple[Tensor, ...]) -> None:
    its_pass = current()
    if getattr(its_pass, "shows", False):
        its_pass.hidden_states = given[0][0]


def _weight_bytes(model: nn.Module) -> int:
    storages: dict[int, int] = {}
    for t in (*model.parameters(), *model.buffers()):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


# ---- registration with transformers ----


@cache
def _register() -> None:
    """Register our attention, once per process. There is no mask function of that name, so transformers makes no
    mask."""
    AttentionInterface.register(_ATTENTION, forward.attention)


def probed(model: Any, n_layers: int, limit: int, name: str) -> model_probe.ModelLayout:
    """Run one row to find out how the layers call attention; raises BadModel for unsupported calls."""
    probe = model_probe.Probe()
    AttentionInterface.register(_PROBE, probe.attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with _attention(model, _PROBE):
            return model_probe.probe_layers(model, probe, n_layers, limit, name)
    finally:
        probe.layers.clear()  # transformers' registry keeps the probe, so the probe must not keep the model alive


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Set another attention function for the length of a block."""
    # an outer class may have another setting, which it keeps
    before = model.config.get_text_config()._attn_implementation
    with quiet():
        model.set_attn_implementation(name)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars and warnings of transformers. Relevant ones are reported as a note or an error."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
