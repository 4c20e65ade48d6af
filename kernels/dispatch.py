"""Choose the implementation of each op once per (op, device, dtype), and explain the choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from kvcli.kernels import native, triton_support

ON_GPUS = {  # cases that Triton kernels serve, and cases left to the reference
    "attend_invariant": "rows over slots and their pass, one sequence each; slots that rows choose are not served",
    "attend": "as attend_invariant; masked slots in plain PyTorch",
    "attend_quantized": "codes as stored, all heads at once",
    "merge_attention": "parts in order",
    "append_kv": "all layers at once",
}


@cache
def choose(op: str, device: str, dtype: torch.dtype, bent: bool = False) -> Callable[..., Any]:
    """Return the function of `op` for tensors of this device and dtype. `bent`: scores have a softcap or row limits."""
    module, _ = _decide(op, device, dtype, bent)
    return getattr(import_module(f"kvcli.kernels.{op}.{module}"), op)


def explain(device: str, dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """Return (op, implementation, reason) for each op with several implementations; `kvcli doctor` prints them."""
    names = ["attend", "attend_new_tokens", "attend_quantized"] + (
        ["attend_invariant", "merge_attention", "append_kv"] if device == "cuda" else []
    )
    ops = [(op, *_decide(op, device, dtype, False)) for op in names]
    return [*ops, ("native", *_explain_native())] if device == "cpu" else ops


def _explain_native() -> tuple[str, str]:
    if why := native.why_not():
        todo = native.remedy()
        return "none", f"{why}; torch computes instead" + (todo and f" (to have them: {todo})")
    *lesser, best = native.levels()
    also = f"; this CPU has {', '.join(lesser)} as well" if lesser else ""
    return best, f"compiled; threads {torch.get_num_threads()}{also}"


def _decide(op: str, device: str, dtype: torch.dtype, bent: bool) -> tuple[str, str]:
    if why := device == "cuda" and triton_support.why_not(torch.device(device), dtype):
        return "reference", f"plain PyTorch: {why}"
    if device == "cuda" and op in ON_GPUS:
        return "fused", f"Triton: {ON_GPUS[op]}"
    if bent:
        return "reference", "soft-capped scores and limits of rows: torch's kernels take neither"
    if device != "cpu":
        return "reference", f"plain PyTorch: no fused kernel for {device} yet"
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return "reference", f"plain PyTorch: the CPU flash kernel does not take {dtype}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return "reference", "plain PyTorch: this torch has no CPU flash kernel"
    if op == "attend_quantized":
        return _decide_packed(dtype)
    if op == "attend":
        return "cpu", "batched products for few rows, torch's CPU flash kernel for many"
    return "cpu", "torch's CPU flash kernel for a chunk, products for a tree"


def _decide_packed(dtype: torch.dtype) -> tuple[str, str]:
    if dtype in (torch.float64, torch.float32):
        return "reference", f"plain PyTorch: {str(dtype).removeprefix('torch.')} needs full precision"
    if why := import_module("kvcli.kernels.attend_quantized.probe").why_not():
        return "reference", f"plain PyTorch: {why}"
    return "cpu", "integer products for few rows over 8-bit slots, tried at start; otherwise codes widened in stretches"
