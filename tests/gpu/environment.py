"""What the machine is, what can be imported there, how fast its memory, products, launches and link to the host are."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.gpu.stage import On, Row, why

# import name -> name of the package; the last ones may take the process with them
PACKAGES = {
    **{name: name for name in ("numpy", "psutil", "jinja2", "typer", "rich", "pydantic", "pydantic_core", "tomli")},
    **{name: name for name in ("tomli", "platformdirs", "prompt_toolkit", "pypdfium2")},
    **{name: name for name in ("safetensors", "tokenizers", "huggingface_hub", "accelerate", "gguf", "pytest")},
    **{name: name for name in ("hypothesis", "torch", "transformers", "triton", "kvcli", "bitsandbytes")},
}


def run(on: On) -> Iterator[Row]:
    yield {"what": "machine", "python": sys.version, "platform": platform.platform(), "cores": os.cpu_count()}
    here = gpu(on)
    yield {"what": "gpu", **here}
    packages = {}
    for name, package in PACKAGES.items():
        packages[name] = found = _importable(name, package)
        yield {"what": "package", "name": name, "found": found}
    missing = [name for name, found in packages.items() if not found["version"]]
    if packages["torch"]["version"] and (on.is_tiny or here.get("name")):
        yield {"what": "rates", **_rates(on)}
    yield {"what": "doctor", **_doctor(on)}
    torch, device = packages["torch"]["version"], here.get("name") or here.get("why", "")
    yield {
        "what": "summary",
        "missing": missing,
        "says": f"{device}; torch {torch}; missing: {', '.join(missing) or '-'}",
    }


def gpu(on: On) -> dict[str, Any]:
    """The device by its name, or `why` there is none."""
    try:
        import torch
    except ImportError as error:
        return {"why": f"torch cannot be imported: {why(error)}"}
    if on.is_tiny:
        return {"why": "told to run on the CPU"}
    if not torch.cuda.is_available():
        return {"why": f"torch {torch.__version__} sees no CUDA device", "built_for": torch.version.cuda}
    of = torch.cuda.get_device_properties(on.device)
    free, total = torch.cuda.mem_get_info(on.device)
    return {
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "processors": of.multi_processor_count,
        "l2_bytes": getattr(of, "L2_cache_size", None),
        "memory_bytes": total,
        "free_bytes": free,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
    }


def _driver() -> str:
    if not (smi := shutil.which("nvidia-smi")):
        return "no nvidia-smi"
    asked = [smi, "--query-gpu=driver_version,pstate,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout + done.stderr).strip()[:300]


def _importable(name: str, package: str) -> dict[str, str]:
    """Its version, "" where it cannot be imported, and why not."""
    try:
        found = import_module(name)
        if found.__name__ != name:
            return {"version": "", "why": f"{found.__name__} stands in for it"}
    except BaseException as error:
        return {"version": "", "why": why(error)}
    try:
        return {"version": version(package)}
    except PackageNotFoundError:
        return {"version": str(getattr(found, "__version__", "unknown"))}


def _rates(on: On) -> dict[str, float]:
    """Gigabytes, teraflops and microseconds."""
    import statistics

    import torch

    from tests.gpu.clock import copy_rate, times, wait

    n, size = (128, 1 << 20) if on.is_tiny else (8192, 4 << 30)
    found = {"copy_gb_s": copy_rate(on.device, size) / 1e9}
    a, b = (torch.randn(n, n, device=on.device, dtype=torch.bfloat16) for _ in "ab")
    found["matmul_bf16_tflop_s"] = 2 * n**3 / statistics.median(times(lambda: a @ b, on.device, 10)) / 1e12
    one = torch.zeros(1, device=on.device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)
        wait(on.device)

    found["launch_us"] = 1e3 * statistics.median(times(launches, on.device, 3))  # of a thousand, in seconds
    host = torch.empty(size // 16, dtype=torch.uint8).fill_(1)
    there = torch.empty_like(host, device=on.device)
    kinds = {"pageable": host} if on.is_tiny else {"pageable": host, "pinned": host.pin_memory()}
    for kind, here in kinds.items():
        for way, copy in (("down", (here, there)), ("up", (there, here))):
            to, of = copy
            seconds = statistics.median(times(lambda to=to, of=of: to.copy_(of), on.device, 3))  # type: ignore[misc]
            found[f"{kind}_{way}_gb_s"] = here.nbytes / seconds / 1e9
    return {key: round(value, 3) for key, value in found.items()}


def _doctor(on: On) -> dict[str, Any]:
    """`kvcli doctor`, as a user would see it."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcli", "--json", "doctor"],
        capture_output=True,
        text=True,
        timeout=max(10.0, on.left),
        check=False,
    )
    return {"status": done.returncode, "out": done.stdout[-8000:], "err": done.stderr[-2000:]}
