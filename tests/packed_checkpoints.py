"""Tiny checkpoints in formats that models are downloaded in, written by hand: no package of a format is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import build

Tensors = dict[str, Tensor]
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def _fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of 128 x 128 with a scale each, as Qwen's FP8 files -> what is stored, and what that means."""
    n, k = weight.shape
    scale = torch.empty(-(-n // 128), -(-k // 128))
    codes, means = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scale[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            means[at] = codes[at].float() * scale[i, j]
    return {"weight": codes, "weight_scale_inv": scale}, means


def _int4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Groups of 32 inputs, 8 codes in an int32, low ones first: compressed-tensors' pack-quantized."""
    n, k = weight.shape
    scale = weight.view(n, k // 32, 32).abs().amax(2) / 7
    codes = (weight.view(n, k // 32, 32) / scale[..., None]).round().clamp(-8, 7)
    places = (codes.view(n, k // 8, 8).to(torch.int64) + 8) << (4 * torch.arange(8))
    packed = places.sum(2)
    packed = (packed - (packed >= 1 << 31) * (1 << 32)).to(torch.int32)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return stored, (codes * scale[..., None]).view(n, k)


def _channel_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """A scale for each output: compressed-tensors' float-quantized."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """[E, in, out] of gpt-oss -> blocks [E, out, in / 32, 16] of two codes a byte and a power of two for each."""
    flat = weight.transpose(1, 2).contiguous()
    e, n, k = flat.shape
    groups = flat.view(e, n, k // 32, 32)
    power = (groups.abs().amax(3).clamp_min(2**-60).log2() - 2).floor()
    scaled = groups / power.exp2()[..., None]
    which = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    codes = (which + 8 * (scaled < 0)).to(torch.uint8)
    means = _E2M1[which] * scaled.sign() * power.exp2()[..., None]
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    stored = {"blocks": blocks, "scales": (power + 127).to(torch.uint8)}
    return stored, means.view(e, n, k).transpose(1, 2).contiguous()


def _ct(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, _fp8),
    "compressed-int4": (
        _ct("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
        _int4,
    ),
    "compressed-fp8": (_ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), _channel_fp8),
}


def written(folder: Path, name: str) -> Path:
    """A checkpoint of that format below `folder`; beside it, in `plain`, the same model in bfloat16."""
    if name == "mxfp4":
        settings, pack, family, packs = {"quant_method": "mxfp4"}, _mxfp4, "gpt_oss", lambda key: key.endswith("proj")
    else:
        (settings, pack), family = FORMATS[name], "llama"
        packs = lambda key: key.endswith("proj.weight")  # noqa: E731
    model = build(family, **_SIZES).to(torch.bfloat16)
    for at in (folder / name, folder / "plain"):
        model.save_pretrained(at)
    stored, plain = Tensors(), load_file(folder / "plain" / "model.safetensors")
    for key in list(plain):
        if not packs(key):
            stored[key] = plain[key]
            continue
        tensors, means = pack(plain[key].float())
        stem = key.removesuffix("weight")
        stored |= {f"{stem}{'_' if stem == key else ''}{part}": t for part, t in tensors.items()}
        plain[key] = means.to(torch.bfloat16)
    save_file(stored, folder / name / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder / name, quantization_config=settings)
    return folder / name


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
