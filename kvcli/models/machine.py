"""What this machine has: processor, devices, memory, and what kvcli makes of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

# Instruction sets that decide how fast a CPU reads weights.
FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimddp", "bf16", "i8mm", "sve")

KEPT_FREE = 1 << 30  # bytes, at most; less where there is little, because an estimate is good to a tenth
UNSURE = 0.1


def kept_free(available: int) -> int:
    """Of what is available, the part that nothing plans with."""
    return min(KEPT_FREE, int(UNSURE * available))


@dataclass(frozen=True, slots=True)
class Found:
    """A device torch can compute on."""

    kind: str  # cpu, cuda:0, mps
    name: str
    total: int | None  # bytes
    free: int | None


def devices() -> Iterator[Found]:
    """The CPU first."""
    import torch

    memory = psutil.virtual_memory()
    yield Found("cpu", cpu_name() or platform.machine(), memory.total, memory.available)
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        yield Found(f"cuda:{i}", torch.cuda.get_device_name(i), total, free)
    if torch.backends.mps.is_available():
        yield Found("mps", "Apple GPU", None, None)


def threads() -> int:
    """Threads torch computes with."""
    import torch

    return torch.get_num_threads()


def cpu_name() -> str | None:
    """The processor's own name, where the system tells."""
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor"):
            return value.strip()
    return platform.processor() or None


def cpu_flags() -> list[str]:
    """Of the instruction sets that matter here, those this processor has."""
    have: set[str] = set()
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            have |= set(value.split())
            break
    return [flag for flag in (*FLAGS, *ARM_FLAGS) if flag in have]


def installed(package: str) -> str | None:
    """Its version, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int | None:
    """Cores this process may use, which is less than the machine has in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def kernels() -> list[tuple[str, str, str, str]]:
    """(device, op, choice, reason) of everything that dispatches, for each kind of device."""
    import torch

    from kvcli.kernels.dispatch import explain

    kinds = dict.fromkeys(found.kind.partition(":")[0] for found in devices())
    return [(kind, *choice) for kind in kinds for choice in explain(kind, torch.bfloat16)]


def quant_backends() -> dict[str, str]:
    """What runs quantized weights, by kind of device."""
    import torch

    from kvcli.kernels import gpu

    kinds = dict.fromkeys(found.kind.partition(":")[0] for found in devices())
    words = {"cpu": "packed int8 and int4", "cuda": "fused int8, int4 and nf4", "mps": "none"}
    if "cuda" in kinds and (why := gpu.why_not(torch.device("cuda", 0), torch.bfloat16)):
        words["cuda"] = f"bitsandbytes int8, fp4 and nf4: {why}"
    return {kind: words[kind] for kind in kinds}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
