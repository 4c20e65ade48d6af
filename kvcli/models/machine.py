"""Hardware of this machine: processor, devices, memory, and the kernels that kvcli uses on them."""

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

KEPT_FREE = 1 << 30  # bytes, at most; less on a small machine, because an estimate is accurate to a tenth
UNSURE = 0.1
NEVER = "kvcli was never tested there; MLX and llama.cpp support it"
OF_CARD = 0.03  # share of a GPU's memory that the driver takes meanwhile; a GPU does not swap and little else uses it


def kept_free(available: int, card: int = 0) -> int:
    """Bytes of the available memory that planning leaves free. `card`: total bytes if it is a GPU's memory."""
    return min(available, int(OF_CARD * card)) if card else min(KEPT_FREE, int(UNSURE * available))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that torch can compute on."""

    kind: str  # cpu, cuda:0, mps
    name: str
    total: int | None  # bytes
    free: int | None
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    unserved: str = ""  # reason why fused kernels do not run on a GPU; "" = they do


def devices() -> Iterator[DeviceInfo]:
    """Devices of this machine, the CPU first."""
    import torch

    from kvcli.kernels.triton_support import why_not

    memory = psutil.virtual_memory()
    yield DeviceInfo("cpu", cpu_name() or platform.machine(), memory.total, memory.available)
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        is_nvidia = torch.version.hip is None  # torch for AMD calls its devices cuda, too
        capability = torch.cuda.get_device_capability(i) if is_nvidia else None
        why = why_not(torch.device("cuda", i), torch.bfloat16)
        yield DeviceInfo(f"cuda:{i}", torch.cuda.get_device_name(i), total, free, capability, why)
    if torch.backends.mps.is_available():
        yield DeviceInfo("mps", "Apple GPU", None, None)


def threads() -> int:
    """Number of threads that torch computes with."""
    import torch

    return torch.get_num_threads()


def cpu_name() -> str | None:
    """Name of the processor, if the system reports one."""
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor"):
            return value.strip()
    return platform.processor() or None


def cpu_flags() -> list[str]:
    """Instruction sets of FLAGS and ARM_FLAGS that this processor has."""
    have: set[str] = set()
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            have |= set(value.split())
            break
    return [flag for flag in (*FLAGS, *ARM_FLAGS) if flag in have]


def installed(package: str) -> str | None:
    """Version of an installed package, read without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int | None:
    """Cores this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def kernels() -> list[tuple[str, str, str, str]]:
    """(device, op, choice, reason) for each dispatched op and kind of device, and on each GPU's fused kernels."""
    import torch

    from kvcli.kernels.dispatch import explain

    there = list(devices())
    kinds = dict.fromkeys(found.kind.partition(":")[0] for found in there)
    rows = [(kind, *choice) for kind in kinds for choice in explain(kind, torch.bfloat16)]
    for found in there:
        if found.kind == "mps":
            rows.append(("mps", "all", "reference", f"plain PyTorch, samples on the host; {NEVER}"))
        elif found.kind != "cpu":
            capability = ".".join(map(str, found.capability or ()))
            served = ("Triton", f"compute capability {capability}")
            rows.append((found.kind, "fused", *(("none", found.unserved) if found.unserved else served)))
    return rows


def quant_backends() -> dict[str, str]:
    """Software that runs quantized weights, by device."""
    import torch

    from kvcli.kernels.linear_skinny.tinygemm import serves

    words = {"cpu": "int8 and int4", "mps": "none: use MLX or llama.cpp"}
    on_gpu = ("fused int8, int4 (as on a CPU)", "bitsandbytes int8, fp4", "torch int4 (in bf16), bitsandbytes int8")
    found = {d.kind: bool(d.unserved) and 1 + serves(torch.device(d.kind), torch.bfloat16) for d in devices()}
    return {kind: words.get(kind) or f"{on_gpu[way]} and nf4" for kind, way in found.items()}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
