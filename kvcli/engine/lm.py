"""Load a Hugging Face decoder, register our attention with transformers, and check that both give the same logits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from kvcli.engine import forward, gate, seam, weights
from kvcli.engine.info import ModelInfo
from kvcli.engine.memory import give_back
from kvcli.errors import BadModel
from kvcli.kernels.linear_blocked.module import block_
from kvcli.kernels.linear_packed.module import Swap, packed_weights, quantize_
from kvcli.kernels.products import multiplies
from kvcli.models.family import read_config
from kvcli.models.gguf import quantizer
from kvcli.models.refusals import refuse_quant
from kvcli.models.sizes import count
from kvcli.models.source import Source
from kvcli.settings.schema import Sample
from kvcli.settings.values import WrongValue, check, keys_of

_ATTENTION = "kvcli"  # our name in transformers' registries
_PROBE = "kvcli_probe"


class LM:
    """A causal language model whose attention is ours. Weights only: no state of any text."""

    def __init__(self, model: Any, shape: seam.Shape, info: ModelInfo) -> None:
        self.model = model
        self.n_layers = info.layers
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.vocab = info.vocab
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.is_apart = self.device.type != "cpu"  # each time that the host asks for a result empties a queue
        self.shapes = shape.stored  # per layer
        self.sights = shape.sights  # per layer
        self.sinks = shape.sinks  # per layer, [H] learned logits of attention; None = it has none
        self.windows = tuple(sight.window for sight in self.sights)  # None = a layer sees all
        self.limit = info.limit  # tokens
        self.stop_ids = _stop_ids(model, info.id)
        self.generation = _generation(model, info.id)  # the model's own sampling settings, only those it states
        self.info = info
        self._layers = _decoder_layers(model, shape)
        self._takes_pruners = False  # known to, and behind gates

    @staticmethod
    def of(
        model: Any,
        *,
        id: str = "model",
        path: str = "",
        revision: str = "",
        quant: str = "none",
        device: torch.device | None = None,
        verify: bool = False,
        notes: tuple[str, ...] = (),
    ) -> LM:
        """Wrap a transformers causal LM that is already built; its layers are left as they are.

        With `quant` the decoder's linear layers are packed here, by what serves `device` (None: where the model is).
        Raises BadModel for a model whose attention is not one we serve.
        """
        began = time.perf_counter()
        _register()
        model.eval().requires_grad_(False)
        text = model.config.get_text_config()
        n_layers, (limit, of_limit) = (
            count(getattr(text, "num_hidden_layers", None), "num_hidden_layers", id),
            _limit(text, id),
        )
        of_rope = _settle_rope(model, text, id)
        shape = _probe(model, n_layers, limit, id)
        parameters = sum(p.numel() for p in model.parameters()) + packed_weights(model)
        backend, of_layers = _pack(model, shape, quant, device or model.device)
        model.set_attn_implementation(_ATTENTION)
        info = ModelInfo(
            id=id,
            path=path,
            family=str(model.config.model_type),
            parameters=parameters,
            layers=n_layers,
            heads=shape.n_heads,
            kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            vocab=int(model.get_output_embeddings().weight.shape[0]),
            dtype=str(model.dtype).removeprefix("torch."),
            quant=quant,
            backend=backend,
            device=str(model.device),
            limit=limit,
            weight_bytes=_weight_bytes(model),
            load_seconds=time.perf_counter() - began,
            revision=revision,
            notes=(*notes, *of_limit, *of_rope, *of_layers),
        )
        lm = LM(model, shape, info)
        if verify:
            seam.compare(lm, lambda: _attention(model, "eager"), id)
        return lm

    @staticmethod
    def load(
        source: Source,
        *,
        quant: str = "none",
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 0,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
        verify: bool = True,
    ) -> LM:
        """Load the files of `source`. Never touches the network and prints nothing; raises BadModel or UsageError.

        `quant` int8, int4 or nf4: packed by torch on the CPU, by bitsandbytes on CUDA.
        """
        began = time.perf_counter()
        where = weights.find_device(device)
        refuse_quant(source.id, quant, where.type, is_quantized="quantization_config" in source.config)
        if source.is_pickle and not allow_pickle:
            raise BadModel(f"the weights of {source.id} are pickle files", code="model_pickle", try_=["--allow-pickle"])
        if threads > 0:
            torch.set_num_threads(threads)
        with quiet():
            config = read_config(source, trust_remote_code)
            model, notes = weights.read_weights(source, config, dtype, where, trust_remote_code)
            names = {"id": source.id, "path": str(source.path), "revision": source.revision}
            lm = LM.of(model, **names, quant=quant, device=where, verify=verify, notes=notes)
        lm.block()
        lm.info = replace(lm.info, load_seconds=time.perf_counter() - began)
        return lm

    @property
    def rounds_by_rows(self) -> bool:
        """Whether a row's numbers may depend on how many rows share its pass, by more than fp32 shows."""
        return self.dtype.itemsize < 4

    def meet_pruner(self) -> None:
        """Raises BadModel where rows cannot be narrowed between layers; asked when a feed first wants that.

        Gates come with it: a call more in each layer of each pass, which most models never need.
        """
        if not self._takes_pruners:
            gate.install(self._layers or ())
            seam.compare_narrowed(self, self.info.id)
            self._takes_pruners = True

    def block(self) -> None:
        """Have bf16 linear layers on a CPU multiplied as that CPU does it fastest. Same numbers."""
        if done := block_(self.model, give_back):
            how = "in oneDNN's blocks" if multiplies(self.dtype) else "multiplied in float32"
            self.info = replace(self.info, backend=f"{self.info.backend}, {done} layers {how}")


# ---- what is packed ----


def _pack(model: Any, shape: seam.Shape, quant: str, device: torch.device) -> tuple[str, tuple[str, ...]]:
    """Bring the model to `device`, packed as asked: what runs its linear layers, and notes on what stays unpacked."""
    if quant == "none":
        if model.device.type != device.type:
            model.to(device)
        given = getattr(model.config, "quantization_config", None)
        method = getattr(given, "quant_method", "quantized")
        said = "torch packed int4" if method == quantizer.METHOD else getattr(method, "value", method)
        return ("torch" if given is None else f"{said}, as in the checkpoint"), ()
    layers = _decoder_layers(model, shape)
    assert layers is not None, "attention modules that stand in no list of layers"
    if device.type == "cpu":
        swap, backend = quantize_(layers, 8 if quant == "int8" else 4, give_back), f"torch packed {quant}"
    else:
        swap = weights.quantize_with_bitsandbytes(layers, quant, device)
        backend = f"bitsandbytes {'fp4' if quant == 'int4' else quant}"
    model.to(device)
    return backend, _swap_notes(swap, model, quant)


def _decoder_layers(model: nn.Module, shape: seam.Shape) -> nn.ModuleList | None:
    """The list of decoder layers, if the model has one: embeddings, head and whatever reads pictures are not in it."""
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == len(shape.attentions):
            pairs = zip(part, shape.attentions, strict=True)
            if all(any(inner is attention for inner in layer.modules()) for layer, attention in pairs):
                return part
    return None


def _swap_notes(swap: Swap, model: nn.Module, quant: str) -> tuple[str, ...]:
    """What stayed in full precision, one line each."""
    notes = [f"{count} linear layers stay unpacked: {why}" for why, count in swap.kept.items()]
    experts = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 3 and "expert" in n)
    if experts:
        notes.append(f"{experts:,} weights of experts are no linear layers and stay unpacked")
    if not swap.packed:
        notes.append(f"load.quant = {quant} changed nothing")
    return tuple(notes)


def _weight_bytes(model: nn.Module) -> int:
    held: dict[int, int] = {}
    for t in (*model.parameters(), *model.buffers()):
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(held.values())


# ---- what the model says of itself ----


def _limit(text: Any, name: str) -> tuple[int, tuple[str, ...]]:
    """Positions the model was made for."""
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return 1 << 20, ("its config states no context limit",)
    dynamic = [r for r in _ropes(text) if "dynamic" in str(r.get("rope_type"))]
    if dynamic:
        limit = _original(dynamic[0], limit, name)
        return limit, (f"context ends at {limit:,} tokens: beyond, dynamic rope changes keys that are stored already",)
    return count(limit, "max_position_embeddings", name), ()


def _original(rope: Mapping[str, Any], limit: Any, name: str) -> int:
    """Positions before the rope's own stretching."""
    key = "original_max_position_embeddings"
    return count(rope.get(key) or limit, key, name)


def _settle_rope(model: nn.Module, text: Any, name: str) -> tuple[str, ...]:
    """longrope has two tables and transformers picks one by the longest position of each call: a text read in chunks
    would mix them. A model that goes beyond the short table's reach uses the long one throughout."""
    longs = [r for r in _ropes(text) if r.get("rope_type") == "longrope"]
    reach = [_original(r, text.max_position_embeddings, name) for r in longs]
    if not longs or text.max_position_embeddings <= min(reach):
        return ()
    for part in model.modules():
        for table in [n for n, _ in part.named_buffers(recurse=False) if n.endswith("original_inv_freq")]:
            prefix = table.removesuffix("original_inv_freq")
            kind = {"layer_type": prefix.removesuffix("_")} if prefix else {}
            x = torch.zeros(1, dtype=torch.float32, device=getattr(part, table).device)
            part(x, torch.tensor([[max(reach)]], device=x.device), **kind)  # one position further: the long table
            setattr(part, table, getattr(part, f"{prefix}inv_freq").clone())
    return (f"rope: its table for texts beyond {min(reach):,} tokens is used for shorter ones too",)


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The rope settings, one per kind of layer where a family has several."""
    given = getattr(text, "rope_parameters", None)
    if not isinstance(given, dict):
        return []
    return [given] if "rope_type" in given else [r for r in given.values() if isinstance(r, dict)]


def _stop_ids(model: Any, name: str) -> frozenset[int]:
    stop: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        each = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        stop |= {count(i, "eos_token_id", name, least=-1) for i in each}  # -1: some say so that there is none
    return frozenset(stop)


def _generation(model: Any, name: str) -> Mapping[str, Any]:
    given = getattr(model, "generation_config", None)
    samples = bool(getattr(given, "do_sample", False))  # else transformers is greedy whatever the rest says
    keys = ("repetition_penalty", *(("temperature", "top_k", "top_p", "min_p") if samples else ()))
    said = {k: getattr(given, k, None) for k in keys}
    stated = {k: _sampling(k, v, name) for k, v in said.items() if v is not None}
    return {"temperature": 1.0 if samples else 0.0, **stated}


def _sampling(key: str, value: object, name: str) -> object:
    """A sampling setting of the model, held to what a profile may set. Raises BadModel."""
    try:
        return check(keys_of(Sample)[key].hint, value)
    except WrongValue as wrong:
        raise BadModel(
            f"generation_config.json of {name} cannot be used: {key} = {str(value)[:40]}",
            code="model_corrupt",
            lines=[wrong.message, *([wrong.hint] if wrong.hint else [])],
            try_=["download generation_config.json again"],
        ) from wrong


# ---- the seam ----


@cache
def _register() -> None:
    """Once a process. Without a mask function of that name transformers makes no mask and asks no device for it."""
    AttentionInterface.register(_ATTENTION, forward.attention)


def _probe(model: Any, n_layers: int, limit: int, name: str) -> seam.Shape:
    probe, kind = seam.Probe(), f"{name} ({model.config.model_type})"

    def attention(module: nn.Module, *args: Any, **asked: Any) -> Any:
        passed = asked.pop("kvcli_pass", None)
        if passed is not probe:
            raise seam.refusal(kind, "a row does not get through it", ["its layers do not hand on what they are told"])
        return probe.attention(module, *args, **asked)

    AttentionInterface.register(_PROBE, attention)  # which must not keep the model, either
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with _attention(model, _PROBE):
            return seam.shape_of(model, probe, n_layers, limit, name)
    finally:
        probe.layers.clear()  # transformers' registry keeps the probe, and the probe must not keep the model


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Another attention function for the length of a block."""
    before = model.config._attn_implementation
    with quiet():
        model.set_attn_implementation(name)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no warnings of transformers: what matters of them comes back as a note or an error."""
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
