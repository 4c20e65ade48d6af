"""Available memory of this machine, or of a described machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from kvcli.errors import UsageError
from kvcli.fit.cuda_overhead import CONTEXT
from kvcli.models.machine import kept_free
from kvcli.models.refusals import refuse_device

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LIMITS = (  # files of a container's cgroup: limit, bytes in use, and the field of reclaimable pages
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory of the device that a model would run on."""

    device: str  # cpu, cuda:0, mps
    available: int  # bytes available on the device
    name: str = ""
    is_described: bool = False  # given by --vram or --ram, not measured on this machine
    host: int = 0  # for a GPU: bytes of host memory that the KV cache may use
    total: int = 0  # bytes of the device, used ones included; 0 = the available bytes are all
    capability: tuple[int, int] | None = None  # of a GPU: its compute capability; None = unknown
    unserved: str = ""  # why a GPU's fused kernels do not run there; "" = they run, as assumed for a described GPU

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def kept_free(self) -> int:
        """Bytes of the available memory that no plan uses."""
        return kept_free(self.available, (self.total or self.available) if self.kind == "cuda" else 0)

    @property
    def usable(self) -> int:
        """Bytes that a plan may use."""
        return self.available - self.kept_free

    @property
    def empty(self) -> AvailableMemory:
        """Memory of the same device with no other program on it. Unlike the available memory, it does not vary."""
        return replace(self, available=max(self.available, self.total - CONTEXT * (self.kind == "cuda")))


def rooms(vram: int | None = None, ram: int | None = None) -> dict[str, AvailableMemory]:
    """Return the memory of each device of this machine, the CPU first; `vram` and `ram` replace the measured sizes."""
    from kvcli.models import machine

    found: dict[str, AvailableMemory] = {}
    for device in machine.devices():
        if device.free is not None:
            free = min(device.free, container_room()) if device.kind == "cpu" else device.free
            more = (device.total or 0, device.capability, device.unserved) if device.kind != "cpu" else ()
            found[device.kind] = AvailableMemory(device.kind, free, device.name, False, 0, *more)
    if ram is not None:
        found["cpu"] = AvailableMemory("cpu", ram, is_described=True)
    if vram is not None:
        found = {
            "cpu": found["cpu"],
            "cuda:0": AvailableMemory("cuda:0", max(0, vram - CONTEXT), is_described=True, total=vram),
        }
    behind = found["cpu"].usable
    return {kind: replace(room, host=behind if room.kind == "cuda" else 0) for kind, room in found.items()}


def look() -> AvailableMemory:
    """Return the memory of the first GPU, else of the CPU. Avoids torch, because its import takes seconds."""
    if smi := shutil.which("nvidia-smi"):
        asked = [smi, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
            said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
            free, total = (int(number) << 20 for number in said.splitlines()[0].split(","))
            return AvailableMemory("cuda:0", max(0, free - CONTEXT), total=total)
    memory = psutil.virtual_memory()
    total = min(memory.total, container_room(is_empty=True))
    return AvailableMemory("cpu", min(memory.available, container_room()), total=total)


def choose(found: dict[str, AvailableMemory], device: str) -> AvailableMemory:
    """Return the device that `load.device` names; auto is the first GPU, else the CPU."""
    if device == "auto":
        return next((room for kind, room in found.items() if kind.startswith("cuda")), found["cpu"])
    refuse_device(device)
    wanted = "cuda:0" if device == "cuda" else device
    if wanted not in found:
        raise UsageError(
            f"load.device = {device}: its memory is unknown",
            code="no_such_device",
            lines=[f"this machine has {', '.join(found)}"],
            try_=["--vram 12GiB describes a GPU", "--device cpu"],
        )
    return found[wanted]


def container_room(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup"), *, is_empty: bool = False
) -> int:
    """Return the bytes that the limit of this container or cgroup leaves; a very large number without a limit.

    With `is_empty`: the bytes left if nothing were in use.
    """
    left = 1 << 62
    for most, used, field in _LIMITS:
        for group in _groups(own):
            folder = (root / most).parent / group
            limit, now = _read(folder / Path(most).name), _read(folder / Path(used).name)
            if limit is not None and now is not None:
                taken = 0 if is_empty else now - _stat(folder / "memory.stat", field)
                left = min(left, max(0, limit - taken))
    return left


def _groups(own: Path) -> list[str]:
    """Return this process's cgroup and its parents, outermost first: a job or a service has its limit in a child."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    found = {"."}
    for line in lines:  # 0::/user.slice/job, or 4:memory:/job
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "none", "")
        if controllers in ("", "memory"):
            parts = [part for part in path.split("/") if part and part != ".."]
            found |= {"/".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return sorted(found)


def size(text: str, flag: str) -> int:
    """Parse `12GiB`, `12G`, `11.6gib` or `800MiB` to bytes; refuse a bare number, because its unit is ambiguous."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])(?:ib|b)?", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise UsageError(f"{flag} takes a size with its unit, not {text!r}", try_=[f"{flag} 12GiB", f"{flag} 800MiB"])
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _stat(file: Path, field: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == field), 0)
