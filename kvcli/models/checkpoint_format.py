"""Quantized checkpoints: packages that load a format and the dtype it dequantizes to, by config.json and headers.
Only the standard library is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any

from kvcli.errors import BadModel
from kvcli.installing import pip

# Packages with which transformers loads a format, by its `quant_method`. accelerate places quantized weights on a GPU.
_READ_WITH: dict[str, tuple[str, ...]] = {
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate",),
    "mxfp8": ("accelerate",),
    "mxfp4": ("accelerate",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel", "accelerate"),
    "hqq": ("hqq",),
    "auto-round": ("auto-round",),
    "aqlm": ("aqlm", "accelerate"),
    "bitnet": ("accelerate",),
    "quanto": ("optimum-quanto", "accelerate"),
}
_MODULES = {"optimum-quanto": "optimum.quanto"}  # import names that differ from the package's name
_UNPACK = {"fp8", "mxfp8", "mxfp4", "compressed-tensors"}  # dequantized to the dtype of the run while loading
# formats that stay quantized on CUDA if the package `kernels` is installed, because it multiplies them directly
_BY_KERNELS = {"fp8", "mxfp8", "mxfp4"}
_GPU_ONLY = {"eetq", "fbgemm_fp8", "fp_quant", "higgs", "spqr", "vptq"}
_UNSERVED = {
    "nvfp4": "transformers quantizes weights to it, but loads no files of it",
    "torchao": "its weights are a tensor class of torchao, which kvcli cannot multiply",
}
_WIDTHS = {"I32": 32, "U8": 8, "I8": 8}
# tensors of GPTQ, AWQ and bitsandbytes that hold no weights
_BESIDE = re.compile(r"qzeros|weight\.|SCB|weight_format|channel_scale|\.scales$|g_idx")
# names of scales and similar tensors
_SCALES = ("_scale", "_scale_inv", "_scales", "_zero_point", "weight_shape", "_g_idx", ".scale")
INSTEAD = "GGUF, or the unquantized model with --quant int4"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Quantization format of a checkpoint's weights."""

    method: str = ""  # `quant_method` of transformers; "" = not quantized
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(config: Mapping[str, Any]) -> CheckpointFormat:
        """Read the format from config.json of a model or from its text part."""
        text = config.get("text_config")
        for at in (config, text if isinstance(text, dict) else {}):
            if isinstance(found := at.get("quantization_config"), dict):
                is_bnb = found.get("load_in_4bit") or found.get("load_in_8bit")
                return CheckpointFormat(
                    "bitsandbytes" if is_bnb else str(found.get("quant_method") or "unnamed")[:40], found
                )
        return CheckpointFormat()

    @property
    def is_unserved(self) -> bool:
        """True if no device can run the format."""
        return self.method in _UNSERVED

    def unpacks(self, kind: str) -> bool:
        """True if loading on this kind of device dequantizes the weights to 16 bits, as in an unquantized model."""
        by_kernels = self.method in _BY_KERNELS and kind == "cuda" and _is_there("kernels")
        return self.method in _UNPACK and not by_kernels

    def stays(self, kind: str) -> bool:
        """True if the weights stay quantized when multiplied, so `load.quant` cannot change them."""
        return bool(self.method) and not self.unpacks(kind)

    def missing(self, kind: str) -> list[str]:
        """Packages that must be installed before the checkpoint can be loaded."""
        placed = ("accelerate",) if self.stays(kind) and kind != "cpu" else ()
        wanted = dict.fromkeys((*_READ_WITH.get(self.method, ()), *placed))
        return [package for package in wanted if not _is_there(_MODULES.get(package, package.replace("-", "_")))]

    def shape(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of the weight that a tensor dequantizes to; (0,) for scales and the like, None if it does not."""
        if self.method not in _UNPACK:
            return None
        if name.endswith(_SCALES):
            return (0,)
        if name.endswith("_blocks") and len(shape) > 1:  # two weights per byte, 32 per scale
            return (*shape[:-2], shape[-2] * shape[-1] * 2)
        if name.endswith("weight_packed") and shape:
            each = _WIDTHS.get(dtype, 32) // self._bits
            return (*shape[:-1], shape[-1] * each)
        return shape if dtype.startswith("F8") or dtype == "I8" else None

    def weights(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Number of weights in a stored tensor: 0 for scales and the like, several per number of a packed tensor."""
        if not self.method:
            return prod(shape)
        if (unpacked := self.shape(name, dtype, shape)) is not None:
            return prod(unpacked)
        if name.endswith(_SCALES) or _BESIDE.search(name):
            return 0
        is_packed = name.endswith((".data", "weight", "qweight", "_blocks"))
        return prod(shape) * (_WIDTHS[dtype] // self._bits if is_packed and dtype in _WIDTHS else 1)

    @property
    def _bits(self) -> int:
        if type(bits := self.settings.get("bits", 8 if self.settings.get("load_in_8bit") else None)) is int:
            return min(max(bits, 1), 8)
        groups = self.settings.get("config_groups")
        each = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
        stated = [of["num_bits"] for one in each if isinstance(of := one.get("weights"), dict) and "num_bits" in of]
        return next((n for n in stated if isinstance(n, int) and 0 < n <= 8), 4)


def refuse_unpackable(name: str, config: Mapping[str, Any], kind: str) -> None:
    """Raise BadModel for a quantized checkpoint that this kind of device cannot load or that lacks a package."""
    packing = CheckpointFormat.of(config)
    is_elsewhere = packing.method in _GPU_ONLY and kind != "cuda"
    if why := _UNSERVED.get(packing.method) or ("transformers loads it on a GPU only" if is_elsewhere else ""):
        raise BadModel(
            f"{name} is quantized as {packing.method}, which does not run on {kind}",
            code="model_unsupported",
            lines=[why],
            try_=[INSTEAD, *(["--device cuda"] if is_elsewhere else [])],
        )
    if missing := packing.missing(kind):
        raise BadModel(
            f"{name} is quantized as {packing.method}, which needs the package{'s' * (len(missing) > 1)} "
            f"{' and '.join(missing)}",
            code="package_missing",
            lines=[f"transformers needs {'it' if len(missing) == 1 else 'them'} to load the weights; none were loaded"],
            detail={"missing": missing},
            try_=[pip(*missing), INSTEAD],
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
