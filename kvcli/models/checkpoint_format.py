"""Checkpoints that come packed in few bits: what reads them and what they unpack to, by config.json and headers alone.
Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any

from kvcli.errors import BadModel
from kvcli.installing import pip

# Packages that transformers reads a format with, by its `quant_method`, beside accelerate, which puts what stays packed
# on a GPU.
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
_MODULES = {"optimum-quanto": "optimum.quanto"}  # of packages that are imported by another name
_UNPACK = {"fp8", "mxfp8", "mxfp4", "compressed-tensors"}  # to the numbers of the run, while loading
_BY_KERNELS = {
    "fp8",
    "mxfp8",
    "mxfp4",
}  # ... but on CUDA with the package `kernels`, whose products read them as they are
_GPU_ONLY = {"eetq", "fbgemm_fp8", "fp_quant", "higgs", "spqr", "vptq"}
_UNSERVED = {
    "nvfp4": "transformers packs weights so, and reads no files of them",
    "torchao": "its weights are tensors of a class of its own, which no product here takes",
}
_WIDTHS = {"I32": 32, "U8": 8, "I8": 8}
_BESIDE = re.compile(
    r"qzeros|weight\.|SCB|weight_format|channel_scale|\.scales$|g_idx"
)  # GPTQ's, AWQ's and bitsandbytes'
_SCALES = ("_scale", "_scale_inv", "_scales", "_zero_point", "weight_shape", "_g_idx", ".scale")  # and the like
INSTEAD = "GGUF, or the unpacked model with --quant int4"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How the weights of a checkpoint are packed."""

    method: str = ""  # by the name that transformers has for it; "" = they are not
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(config: Mapping[str, Any]) -> CheckpointFormat:
        """By config.json of the model, or the part of it that is about text."""
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
        """Whether no device runs it."""
        return self.method in _UNSERVED

    def unpacks(self, kind: str) -> bool:
        """Whether loading makes 16-bit numbers of it on such a device, so that the model is then like any other."""
        by_kernels = self.method in _BY_KERNELS and kind == "cuda" and _is_there("kernels")
        return self.method in _UNPACK and not by_kernels

    def stays(self, kind: str) -> bool:
        """Whether its weights are multiplied as they are packed, which `load.quant` cannot change."""
        return bool(self.method) and not self.unpacks(kind)

    def missing(self, kind: str) -> list[str]:
        """Packages to install before it can be loaded."""
        placed = ("accelerate",) if self.stays(kind) and kind != "cpu" else ()
        wanted = dict.fromkeys((*_READ_WITH.get(self.method, ()), *placed))
        return [package for package in wanted if not _is_there(_MODULES.get(package, package.replace("-", "_")))]

    def shape(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of the weight that a stored tensor unpacks to, (0,) of what serves it; None where it stays as it is."""
        if self.method not in _UNPACK:
            return None
        if name.endswith(_SCALES):
            return (0,)
        if name.endswith("_blocks") and len(shape) > 1:  # two in a byte, 32 to a scale
            return (*shape[:-2], shape[-2] * shape[-1] * 2)
        if name.endswith("weight_packed") and shape:
            each = _WIDTHS.get(dtype, 32) // self._bits
            return (*shape[:-1], shape[-1] * each)
        return shape if dtype.startswith("F8") or dtype == "I8" else None

    def weights(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Weights that a stored tensor stands for: of scales and their like none, of a packed one several a number."""
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
    """A checkpoint that comes packed where nothing can read it: on such a device, or without a package."""
    packing = CheckpointFormat.of(config)
    is_elsewhere = packing.method in _GPU_ONLY and kind != "cuda"
    if why := _UNSERVED.get(packing.method) or ("transformers reads it on a GPU only" if is_elsewhere else ""):
        raise BadModel(
            f"{name} comes packed as {packing.method}, which does not run on {kind}",
            code="model_unsupported",
            lines=[why],
            try_=[INSTEAD, *(["--device cuda"] if is_elsewhere else [])],
        )
    if missing := packing.missing(kind):
        raise BadModel(
            f"{name} comes packed as {packing.method}, which needs the package{'s' * (len(missing) > 1)} "
            f"{' and '.join(missing)}",
            code="package_missing",
            lines=[f"transformers reads such weights with {'it' if len(missing) == 1 else 'them'}; none was read"],
            detail={"missing": missing},
            try_=[pip(*missing), INSTEAD],
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be part of
        return False
