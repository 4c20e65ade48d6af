"""Load checked files into a transformers model: device, precision, and a check that every tensor was loaded."""

from __future__ import annotations

import gc
import logging
import re
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers.core_model_loading import ConversionOps
from transformers.distributed import DistributedConfig
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvcli.engine.loading.adapters import apply_adapters
from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel, UsageError
from kvcli.installing import pip
from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import Bits, Swap, packed, quantize_, quantize_experts_, stay, swap_
from kvcli.kernels.linear_skinny import tinygemm
from kvcli.kernels.linear_skinny.module import lay_out_skinny_
from kvcli.kernels.moe_linear import weights_of
from kvcli.models.adapters import Adapter
from kvcli.models.checkpoint import INSTEAD, CheckpointFormat, refuse_unpackable, sizes_of
from kvcli.models.family import loader_of, refuse_unknown_packing, unreadable
from kvcli.models.gguf import convert
from kvcli.models.refusals import blame_files, refuse_device
from kvcli.models.source import Source
from kvcli.settings.schema import NUMBERS, Load

# Limit the size of a model to that of its weight files, whatever its config says.


_SLACK = 1 << 24  # numbers allowed for masks and tables that are not in the files
_MODULES = 64  # modules allowed per tensor of the files; a layer has about as many modules as tensors


@contextmanager
def limit_to_files(source: Source) -> Iterator[None]:
    """Stop building a model in this block once it has more numbers or modules than the files can fill; raises BadModel.

    transformers builds a model on the meta device, where a size costs nothing and a layer costs milliseconds, and only
    then reads files. So a config with a billion layers fails after as many modules as the files have tensors.
    """
    budget = _BuildCounter(source)
    hooks = [
        register_module_parameter_registration_hook(budget.add_numbers),
        register_module_buffer_registration_hook(budget.add_numbers),
        register_module_module_registration_hook(budget.add_module),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _BuildCounter:
    """Counter of registered tensors that still exist: an attribute that is set twice counts once."""

    def __init__(self, source: Source) -> None:
        stored = source.parameters
        # pickles do not state it; a quantized number has at least one bit
        if not stored or "quantization_config" in source.config:
            stored = 8 * source.nbytes
        # an output layer is built before it is tied to the embeddings: at most the size of all stored weights
        self.numbers, self.name = 2 * stored + _SLACK, source.id
        self.modules = _MODULES * (sum(len(f.tensors) for f in source.files) or source.nbytes)
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._most, self._seen = 0, 0  # upper bound of the existing numbers; number of modules

    def add_numbers(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        self._held[id(tensor)] = weakref.ref(tensor)
        self._most += tensor.numel()
        if self._most <= self.numbers:
            return
        gc.collect()
        held = [t for ref in self._held.values() if (t := ref()) is not None]
        self._held = {id(t): weakref.ref(t) for t in held}
        self._most = sum(t.numel() for t in held)
        if self._most > self.numbers:
            self._refuse()

    def add_module(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        self._seen += 1
        if self._seen > self.modules:
            self._refuse()

    def _refuse(self) -> None:
        raise BadModel(
            f"the weights of {self.name} are incomplete: config.json describes a larger model",
            code="model_incomplete",
            lines=["config.json describes more weights than its files hold"],
            try_=["check that config.json belongs to these weights", "download the model again"],
        )


# Quantization of expert weights while transformers loads them, through its official quantizer interface.
#
# Checkpoints store experts one by one or in one tensor; transformers builds that tensor layer by layer. If it is
# quantized at once, only one such tensor is in memory in full precision. If it is quantized after loading, all are.


METHOD = "kvcli_experts"


def while_loading(quant: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the quantization_config for `from_pretrained`; None if experts are not quantized."""
    if quant not in ("int8", "int4") or (device.type != "cpu" and triton_support.why_not(device, dtype)):
        return None
    return _register()(bits=8 if quant == "int8" else 4, native=device.type == "cpu")


@cache
def _register() -> Any:
    """Register the quantizer, once per process."""

    @register_quantization_config(METHOD)
    class ExpertConfig(QuantizationConfigMixin):  # type: ignore[misc]  # Any to mypy, as all of transformers
        def __init__(self, bits: Bits = 8, native: bool = True) -> None:
            """`native`: in the layout of the CPU kernel; otherwise in the order of files, for any device."""
            self.quant_method, self.bits, self.native = METHOD, bits, native

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):  # type: ignore[misc]  # the same
        is_trainable = False

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        def param_needs_quantization(self, model: nn.Module, param_name: str, **other: Any) -> bool:
            path, _, name = param_name.rpartition(".")
            return any(
                name == one and isinstance(turned, bool) for one, _, turned in weights_of(model.get_submodule(path))
            )

        def get_quantize_ops(self) -> Any:
            return QuantizeExperts(self.quantization_config.bits, self.quantization_config.native)

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            self.remove_quantization_config(model)
            return model

    return ExpertConfig


class QuantizeExperts(ConversionOps):  # type: ignore[misc]  # the same
    """The last step of loading one parameter."""

    def __init__(self, bits: Bits, native: bool) -> None:
        self.bits, self.native = bits, native

    def convert(self, found: dict[str, Any], *, model: nn.Module, **_: Any) -> dict[str, Any]:
        """Return parameters by name, quantized if possible."""
        return {name: self._packed(name, given, model) for name, given in found.items()}

    def _packed(self, full: str, given: Any, model: nn.Module) -> Any:
        weight = given[0] if isinstance(given, list) else given
        path, _, name = full.rpartition(".")
        turned = next((turned for one, _, turned in weights_of(model.get_submodule(path)) if one == name), "")
        made = turned if isinstance(turned, str) else packed(weight, turned, self.bits, native=self.native)
        if isinstance(made, str):
            return given
        drop_pages(weight)
        return nn.Parameter(made, requires_grad=False)


def load_weights(
    source: Source,
    config: Any,
    dtype: str,
    device: torch.device,
    trust_remote_code: bool,
    quant: str = "none",
    adapters: Sequence[Adapter] = (),
    ranks: int = 1,
) -> tuple[Any, tuple[str, ...]]:
    """Return the model with every tensor from its files, mapped on the CPU, and notes for the user.

    A quantized checkpoint is loaded to `device` directly, because moving it later is not allowed. Experts are quantized
    during loading, as `quant` says. `adapters` are merged into weights that are not quantized in the checkpoint.
    `ranks`: processes that share the weights; transformers gives each its part.
    """
    loader = loader_of(source, config, trust_remote_code)
    packing = CheckpointFormat.of(source.config)
    refuse_unpackable(source.id, source.config, device.type)
    if packing.unpacks(device.type):
        _have_unpacked(config)
    convert.register()
    refuse_unknown_packing(source, packing)
    if packing.method == "bitsandbytes":
        _hush_casts()
    packs = None
    if not packing.method and sizes_of(source.text_config, source.id)["experts"]:
        numbers = getattr(torch, NUMBERS[dtype]) if dtype != "auto" else config.get_text_config().dtype or torch.float32
        packs = while_loading(quant, numbers, device)
    with limit_to_files(source), blame_files(partial(_unloadable, source)):
        model, loading = loader.from_pretrained(
            source.path,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, NUMBERS[dtype]),
            device_map={"": str(device)} if packing.is_placed(device.type) else None,
            **({"quantization_config": packs} if packs else {}),
            **({"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}),
            attn_implementation="eager",  # our attention is set after building: wrap_lm first probes the model's own
            use_safetensors=not source.is_pickle,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_loading(source, loading)
    stated = getattr(model.config, "quantization_config", None)
    convert.attach_(model, convert.kept_in(model.config, stated), device, drop_pages)
    if packing.method == convert.METHOD:
        model.to(device)
    apply_adapters(model, adapters, drop_pages)
    notes = list(_unused(model, sorted(loading["unexpected_keys"])))
    if packing.unpacks(device.type):
        numbers = str(model.dtype).removeprefix("torch.")
        notes.append(f"{packing.method} weights were dequantized to {numbers}: {source.nbytes >> 20:,} MiB of files")
    return model, tuple(notes)


def _hush_casts() -> None:
    """Silence a warning at int8 products: their inputs are cast to float16, whatever the model's dtype. Newer releases
    repeat it at each product."""
    warnings.filterwarnings("ignore", "MatMul8bitLt: inputs will be cast")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _unloadable(source: Source, reason: str) -> BadModel:
    """Return the error for a failed load: a missing package or unreadable files. `said`: the error of transformers."""
    if not reason.startswith(("ImportError", "ModuleNotFoundError")):
        return unreadable(source, "transformers could not load it", reason)
    named = re.search(r"pip install (?:-U |--upgrade )?['\"]?([\w.\[\]<>=!~,-]+)|No module named '([\w-]+)", reason)
    return BadModel(
        f"{source.id} ({source.family}) needs a package that is missing or too old",
        code="package_missing",
        lines=[reason],
        try_=[pip("-U", (named[1] or named[2]).rstrip(".,"))] if named else [INSTEAD],
    )


def _have_unpacked(config: Any) -> None:
    """Ask transformers to dequantize weights, whatever this machine could multiply."""
    for part in (config, config.get_text_config()):
        if isinstance(given := getattr(part, "quantization_config", None), dict):
            given["dequantize"] = True


def _unused(model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yield notes on tensors of the checkpoint that were not loaded."""
    apart = [name for name in names if _is_left_out(model, name)]
    if apart:
        yield f"images and audio are not supported: {len(apart)} tensors for them were not loaded"
    if unused := [name for name in names if name not in apart]:
        yield f"{len(unused)} tensors of the checkpoint are not used, such as {unused[0]}"


def _is_left_out(model: nn.Module, name: str) -> bool:
    """True if a tensor belongs to a module that the model was built without."""
    part: nn.Module | None = model
    for own in name.split("."):
        if part is None or own not in part._modules:
            break
        part = part._modules[own]
    return part is None


def _check_loading(source: Source, loading: Mapping[str, Any]) -> None:
    """Raise BadModel for missing or mismatched tensors: transformers would continue with random numbers."""
    missing, wrong = sorted(loading["missing_keys"]), sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise BadModel(
            f"the weights of {source.id} are incomplete: {len(missing)} tensors are missing",
            code="model_incomplete",
            lines=[*missing[:4], *([f"and {len(missing) - 4} more"] if len(missing) > 4 else [])],
            detail={"missing": missing},
            try_=["download the model again", "check that config.json belongs to these weights"],
        )
    if wrong or loading.get("error_msgs"):
        raise BadModel(
            f"the weights of {source.id} do not have the shapes that its config.json gives",
            code="model_corrupt",
            lines=(wrong or [str(m) for m in loading["error_msgs"]])[:4],
            try_=["check that config.json belongs to these weights"],
        )


# ---- device and precision ----


def find_device(name: str) -> torch.device:
    """Return the device of this name. Raises UsageError if this machine does not have it, or it is not supported."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refuse_device(name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"load.device = {name}: no such device", try_=["auto, cpu, cuda, cuda:0 or mps"]) from error
    have = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= have.get(device.type, 0):
        raise UsageError(
            f"load.device = {name}: this machine has {have.get(device.type, 0)} {device.type} devices",
            try_=["--device cpu", "kvcli doctor"],
        )
    return device


def keeps_quantized(load: Load, found: Source) -> str:
    """Return the kind of the device if quantized weights of a GGUF file are kept as they are there; "" = they are not.

    Kernels multiply them on CPUs but in float64, and on GPUs in 16 bits if the whole model is there. `load.quant`
    quantizes anew.
    """
    device = find_device(load.device)
    dtype = getattr(torch, NUMBERS.get(load.dtype, str(found.config.get("dtype"))), None)
    is_whole = load.layers_on_gpu == load.experts_on_gpu == "auto"
    served = is_whole and dtype is not None and not triton_support.why_not(device, dtype)
    keeps = load.quant == "none" and (load.dtype != "fp64" if device.type == "cpu" else served)
    return device.type if keeps else ""


def quantize_for_gpu(root: nn.Module, quant: str, device: torch.device) -> tuple[Swap, str]:
    """Quantize every plain `nn.Linear` below `root` while moving it to `device`, and return what runs them there.

    If the fused kernels support the device, int8 and int4 give the same numbers as on a CPU, and nf4 those of
    bitsandbytes. Without Triton, int4 is on torch's kernel.
    """
    dtype = next(root.parameters()).dtype
    if why := triton_support.why_not(device, dtype):
        if quant == "int4" and tinygemm.serves(device, dtype):
            swap = swap_(root, lambda layer: tinygemm.packed(layer, device), drop_pages)
            return swap + stay(root, "torch's int4 kernel multiplies no experts"), f"torch's int4 ({why})"
        kind = "fp4" if quant == "int4" else quant
        swap = quantize_with_bitsandbytes(root, quant, device) + stay(root, "bitsandbytes quantizes no experts")
        return swap, f"bitsandbytes {kind} ({why})"
    if quant == "nf4":
        swap = quantize_with_bitsandbytes(root, quant, device) + stay(root, "experts support int8 and int4, not nf4")
    else:
        bits: Bits = 8 if quant == "int8" else 4
        swap = quantize_(root, bits, drop_pages, device) + quantize_experts_(root, bits, drop_pages, device)
    lay_out_skinny_(root, drop_pages)
    return swap, f"fused {quant}"


def quantize_with_bitsandbytes(root: nn.Module, quant: str, device: torch.device) -> Swap:
    """Convert every plain `nn.Linear` below `root` to bitsandbytes' format on `device`.

    transformers could do it, but needs one more package and moves whole layers to the device first.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise BadModel(
            f"load.quant = {quant} on this GPU needs bitsandbytes, which is not installed",
            code="package_missing",
            try_=[pip("bitsandbytes"), "--quant none"],
        ) from None
    _hush_casts()

    def packed(layer: nn.Linear) -> nn.Module:
        size, has_bias, weight = (layer.in_features, layer.out_features), layer.bias is not None, layer.weight.data
        if quant == "int8":
            fresh = bnb.nn.Linear8bitLt(*size, bias=has_bias, has_fp16_weights=False, threshold=6.0, device="meta")
            fresh.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            kind = "nf4" if quant == "nf4" else "fp4"
            fresh = bnb.nn.Linear4bit(*size, bias=has_bias, compute_dtype=weight.dtype, quant_type=kind, device="meta")
            fresh.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind)
        fresh.bias = layer.bias
        made: nn.Module = fresh.to(device).eval()  # moving is what quantizes
        return made

    return swap_(root, packed, lambda _: None)
