"""From checked files to a transformers model: configuration, device, precision, and every tensor accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from kvcli.errors import BadModel, UsageError
from kvcli.source import Source

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def read_config(source: Source, trust_remote_code: bool) -> Any:
    family = source.family
    known = set(transformers.CONFIG_MAPPING)
    remote = bool(source.config.get("auto_map"))
    if family not in known and remote and not trust_remote_code:
        raise BadModel(
            f"{source.id} ({family}) runs code of its own, which is off",
            code="model_remote_code",
            lines=["transformers has no such architecture; the model's folder brings Python code for it"],
            try_=["read that code, then set load.trust_remote_code = true in your own config"],
        )
    if family not in known and not remote:
        near = get_close_matches(family, known, 1)
        raise BadModel(
            f"{source.id} has an unknown architecture: {family}",
            code="model_unsupported",
            lines=[f"transformers {transformers.__version__} knows {len(known)} others"],
            try_=["pip install -U transformers", *([f'is model_type "{near[0]}"?'] if near else [])],
        )
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError, ImportError, StrictDataclassError) as error:
        raise _unreadable(source, "its config.json does not fit its architecture", error) from error


def read_weights(
    source: Source, config: Any, quant: str, dtype: str, device: torch.device, trust_remote_code: bool
) -> tuple[Any, tuple[str, ...]]:
    """The model with every tensor from its files, and what to tell about them."""
    remote = trust_remote_code and "AutoModelForCausalLM" in source.config.get("auto_map", {})
    if not remote and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadModel(
            f"{source.id} ({source.family}) is not a causal language model",
            code="model_unsupported",
            lines=["transformers has no class of that architecture that continues text"],
            try_=["docs/models.md lists what runs"],
        )
    extra: dict[str, Any] = {"quantization_config": _bitsandbytes(quant, dtype)} if quant != "none" else {}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype="auto" if dtype == "auto" else _DTYPES[dtype],
            device_map={"": str(device)} if device.type != "cpu" else None,
            attn_implementation="eager",  # ours comes once the model is built: LM.of asks it how it attends first
            use_safetensors=not source.is_pickle,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **(extra if device.type == "cuda" else {}),
        )
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError, AttributeError) as error:
        raise _unreadable(source, "transformers could not load it", error) from error
    _check_loading(source, loading)
    unused = sorted(loading["unexpected_keys"])
    notes = (f"{len(unused)} tensors of the checkpoint are not used, such as {unused[0]}",) if unused else ()
    return model, notes


def _check_loading(source: Source, loading: Mapping[str, Any]) -> None:
    """transformers would go on with random numbers; we do not."""
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


def _unreadable(source: Source, why: str, error: Exception) -> BadModel:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return BadModel(
        f"{source.id} ({source.family}) cannot be loaded: {why}",
        code="model_corrupt",
        lines=[f"{type(error).__name__}: {line}" if i == 0 else line for i, line in enumerate(lines[:4])],
        try_=["check that config.json belongs to these weights", "download the model again"],
    )


# ---- device and precision ----


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


def check_quant(source: Source, quant: str, device: torch.device) -> None:
    if quant == "none":
        return
    if quant == "nf4" and device.type == "cpu":
        raise UsageError(
            "load.quant = nf4 is for CUDA: on a CPU it is slower than no quantization at all",
            lines=["its CPU path unpacks every weight for every token"],
            try_=["--set load.quant=int4"],
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"load.quant = {quant} does not run on {device.type}", try_=["--set load.quant=none"])
    if "quantization_config" in source.config:
        raise UsageError(
            f"{source.id} is quantized already, so load.quant = {quant} cannot be applied",
            try_=["--set load.quant=none", "the original, unquantized model"],
        )


def _bitsandbytes(quant: str, dtype: str) -> Any:
    """transformers' settings for CUDA; it imports bitsandbytes itself, late."""
    if quant == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4" if quant == "nf4" else "fp4",
        bnb_4bit_compute_dtype=_DTYPES.get(dtype, torch.bfloat16),
    )
