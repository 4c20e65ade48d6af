"""Open a Hugging Face decoder: load its files, register our attention with transformers, verify that both give the same
logits, and install kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from kvcli import environment
from kvcli.engine import forward
from kvcli.engine.cuda_graphs.capture import CudaGraphs
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.hf import model_settings
from kvcli.engine.hf.fused_experts import serve_experts_
from kvcli.engine.hf.fused_layers import direct_forward_of, fuse_
from kvcli.engine.hf.layer_gate_check import verify_partial_passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import attention_set, is_batch_variant, probed, quiet, reduced_model, verify_logits
from kvcli.engine.loading import weights
from kvcli.engine.loading.host_weights import move_experts_
from kvcli.engine.loading.weight_quantization import quantize_and_place, quantize_head_and_move_embeddings_, split
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.ranks import n_ranks
from kvcli.engine.resources import drop_pages, use_device, use_threads
from kvcli.errors import BadModel
from kvcli.kernels import attend_invariant, triton_support
from kvcli.kernels.invariant_activations import multiplies
from kvcli.kernels.linear import use_native_linear_
from kvcli.kernels.linear.experts import lay_out_experts_
from kvcli.kernels.linear_blocked import block_
from kvcli.kernels.linear_quantized import packed_weights
from kvcli.kernels.linear_skinny.module import lay_out_skinny_
from kvcli.kv.offload.transfer import bus_of
from kvcli.models.adapters import find_adapter
from kvcli.models.catalog import Stamped, model_files
from kvcli.models.checkpoint import CheckpointFormat, count
from kvcli.models.family import read_config
from kvcli.models.refusals import refuse_across_ranks, refuse_quant, refuse_split
from kvcli.models.source import Source

_ATTENTION = "kvcli"  # our name in transformers' registries


@environment.LargeBlocks().returned()
def open_lm(
    source: Source,
    *,
    quant: str = "none",
    adapters: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "auto",
    layers_on_gpu: int | str = "auto",
    experts_on_gpu: int | str = "auto",
    embeddings: str = "device",
    head: str = "none",
    threads: int = 0,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    verify: bool = True,
    graphs: str = "auto",
) -> LM:
    """Load the files of `source`. Never uses the network and prints nothing; raises BadModel or UsageError.

    `quant` int8, int4 or nf4: quantized weights, on CUDA by bitsandbytes if no fused kernels support them.
    `experts_on_gpu`: last layers whose experts are there; the GPU reads those of the others in host memory.
    `embeddings`: "device" or "host" memory. `head`: precision of the output layer, "none" or "int8". `graphs`: "auto"
    or "off". `adapters`: `PATH` or `PATH:WEIGHT` of LoRA adapters.
    """
    began = time.perf_counter()
    where = weights.find_device(device)
    ranks, kv_heads = n_ranks(), 0
    is_quantized = CheckpointFormat.of(source.config).stays(where.type)
    refuse_quant(source.id, quant, where.type, is_quantized=is_quantized)
    refuse_split(layers_on_gpu, experts_on_gpu, embeddings, where.type, is_quantized=is_quantized)
    if source.is_pickle and not allow_pickle:
        raise BadModel(f"the weights of {source.id} are pickle files", code="model_pickle", try_=["--allow-pickle"])
    if ranks > 1:
        keys = ("num_key_value_heads", "num_attention_heads")
        kv_heads = next((int(source.text_config[key]) for key in keys if source.text_config.get(key)), 0)
        refuse_across_ranks(
            source.id,
            quantization=quant != "none" or "quantization_config" in source.config,
            adapters=bool(adapters),
            layers_on_gpu=layers_on_gpu != "auto",
            head=head != "none",
            **{f"{kv_heads} KV heads over {ranks} processes": kv_heads % ranks > 0},
        )
    use_threads(threads or torch.get_num_threads())
    use_device(where)
    loras = [find_adapter(text) for text in adapters]
    files = files_of(source, adapters)
    with quiet():
        config = read_config(source, trust_remote_code)
        model, notes = weights.load_weights(source, config, dtype, where, trust_remote_code, quant, loras, ranks)
        lm = wrap_lm(
            model,
            id=source.id,
            path=str(source.path),
            revision=source.revision,
            quant=quant,
            device=where,
            layers_on_gpu=None if layers_on_gpu == "auto" else int(layers_on_gpu),
            experts_on_gpu=None if experts_on_gpu == "auto" else int(experts_on_gpu),
            embeddings=embeddings if layers_on_gpu == "auto" else "device",  # of a split model, in host memory anyway
            head=head,
            verify=verify,
            notes=notes,
        )
    if loras:  # the description is part of the key of the prefix cache
        lm.info = replace(lm.info, backend=f"{lm.info.backend}, adapters {' and '.join(one.name for one in loras)}")
    for file in chain(*files.values()):
        file.check()
    lm.files = files
    if lm.ranks.n > 1:
        refuse_across_ranks(
            source.id,
            recurrence=bool(lm.recurrent_layers),
            latents=bool(lm.latents),
            **{"layers of unlike heads": any(of.n_kv_heads * ranks != kv_heads for of in lm.shapes)},
        )
        model.register_forward_pre_hook(lm.ranks.check, with_kwargs=True)
        how = f"torch's linear layers, rank {lm.ranks.index} of {ranks}"  # part of the key of the prefix cache
        # the probe saw this rank's heads
        backend, heads = f"{lm.info.backend}, {how}", lm.n_heads * ranks
        lm.info = replace(lm.info, backend=backend, heads=heads, kv_heads=kv_heads)
    else:  # native and fused layers, and captured passes, expect whole weights
        install_kernels(lm)
        if lm.is_on_accelerator:
            enable_graph_capture(lm, graphs)
    lm.info = replace(lm.info, load_seconds=time.perf_counter() - began)
    return lm


def files_of(source: Source, adapters: Sequence[str] = ()) -> dict[str, list[Stamped]]:
    """Stamp all files that `open_lm` reads."""
    files = model_files(source.path, [file.path for file in source.files], source.made_of)
    if adapters:
        loras = map(find_adapter, adapters)
        files["adapters"] = [Stamped.of(path) for one in loras for path in (one.file.path, one.config)]
    return files


def wrap_lm(
    model: Any,
    *,
    id: str = "model",
    path: str = "",
    revision: str = "",
    quant: str = "none",
    device: torch.device | None = None,
    layers_on_gpu: int | None = None,
    experts_on_gpu: int | None = None,
    embeddings: str = "device",
    head: str = "none",
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
    layout = probed(model, n_layers, limit, id)
    for attends in layout.attentions:
        if (latent := layout.latents.get(forward.layer_idx_of(attends))) is not None:
            attends.kv_b_proj = latent
    parameters = sum(p.numel() for p in model.parameters()) + packed_weights(model)
    vocab = int(model.get_output_embeddings().weight.shape[0])
    if experts_on_gpu is not None and layout.layers is not None:
        move_experts_(layout.layers[: max(0, n_layers - experts_on_gpu)], quant, bus_of(device or model.device))
    of_ends = quantize_head_and_move_embeddings_(model, head, embeddings, device or model.device)
    places = None
    if layers_on_gpu is not None:
        backend, of_layers, places = split(model, layout, quant, device or model.device, layers_on_gpu)
    else:
        backend, of_layers = quantize_and_place(model, layout, quant, device or model.device)
    model.set_attn_implementation(_ATTENTION)
    info = ModelInfo(
        id=id,
        path=path,
        family=str(model.config.model_type),
        parameters=parameters,
        layers=n_layers,
        heads=max(layout.heads),
        kv_heads=max(of.n_kv_heads for of in layout.stored),
        head_dim=max(of.k_dim for of in layout.stored),
        vocab=vocab,
        dtype=str(model.dtype).removeprefix("torch."),
        quant=quant,
        backend=backend + of_ends,
        device=str(places[-1] if places is not None else model.device),
        limit=limit,
        weight_bytes=_weight_bytes(model),
        load_seconds=time.perf_counter() - began,
        revision=revision,
        notes=(*notes, *of_limit, *of_rope, *layout.notes, *of_layers, *model_settings.unkept(model)),
    )
    lm = LM(model, layout, info, verify_partial_passes, places)
    if verify:
        verify_logits(lm, lambda: attention_set(model, "eager"), id)
    return lm


@cache
def _register() -> None:
    """Register our attention, once per process. There is no mask function of that name, so transformers makes no
    mask."""
    AttentionInterface.register(_ATTENTION, forward.attention)


def _weight_bytes(model: nn.Module) -> int:
    storages: dict[int, int] = {}
    for t in (*model.parameters(), *model.buffers()):
        t = getattr(t, "to_local", lambda t=t: t)()  # a rank's part of it
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


def install_kernels(lm: LM) -> None:
    """Replace linear layers with the fastest kernels of their device, native or fused, where supported.

    Afterwards a test finds out whether the model is batch invariant.
    """
    widened = "in oneDNN's blocks" if multiplies(lm.dtype) else "multiplied in float32"
    native, experts = "layers in native panels", "weights of experts and routers in native panels"
    skinny, blocked = (lay_out_skinny_, "layers fused for small batches"), (block_, f"layers {widened}")
    if served := serve_experts_(lm.model):
        lm.info = replace(lm.info, backend=f"{lm.info.backend}, {served} layers of fused experts")
    for swap, how in ((use_native_linear_, native), (lay_out_experts_, experts), skinny, blocked):
        if done := swap(lm.model, drop_pages):
            lm.info = replace(lm.info, backend=f"{lm.info.backend}, {done} {how}")
    serves = (not attend_invariant.why_not(lm.dtype, lm.device, of.k_dim, of.v_dim) for of in lm.shapes)
    lm.has_pool = not lm.is_on_accelerator and any(serves)
    for latent in lm.latents.values():
        latent.install_kernels()
    lm.recurrent_layers.settle()
    if lm.recurrent_layers.are_by_row:
        lm.info = replace(lm.info, backend=f"{lm.info.backend}, {len(lm.recurrent_layers)} recurrences by token")
    if lm.is_split:  # fused layers expect all layers on one device
        return
    layers = list(() if lm.recurrent_layers else lm.layers or ())
    if fused := fuse_(lm, layers):
        lm.info = replace(lm.info, backend=f"{lm.info.backend}, {fused} fused")
    with reduced_model(lm, layers):
        lm.direct_forward = direct_forward_of(lm, layers)
    lm.is_row_invariant = is_invariant(lm)


def is_invariant(lm: LM) -> bool:
    """True if a test of the first and last layers finds the model batch invariant, on the threads now in use."""
    with reduced_model(lm, list(() if lm.recurrent_layers else lm.layers or ())):
        return not is_batch_variant(lm)


def capture_like(head: LM, target: LM) -> LM:
    """Enable captured passes of a draft head if its target model has them. Return the head."""
    if captured_passes(target) is not None:
        enable_graph_capture(head, "auto")
    return head


def enable_graph_capture(lm: LM, graphs: str) -> None:
    """Enable captured passes (captured_passes.py) if the device supports them. The backend's description names them,
    or why not."""
    whys = (
        triton_support.why_not(lm.device, lm.dtype) if graphs == "auto" else f"load.graphs = {graphs}",
        "its layers are on two devices" if lm.is_split else "",
        *(attend_invariant.why_not(lm.dtype, lm.device, of.k_dim, of.v_dim) for of in lm.shapes),
        lm.recurrent_layers.why_not_captured,
    )
    if not (why := next(filter(None, whys), "")):
        lm.remembers[CapturedPasses] = CapturedPasses(CudaGraphs(lm.device))
    how = f"no CUDA graphs: {why}" if why else "CUDA graphs"
    lm.info = replace(lm.info, backend=f"{lm.info.backend}, {how}")
