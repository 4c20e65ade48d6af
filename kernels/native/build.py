"""Compile the native kernels: `python -m kvcli.kernels.native.build`, which the build hook runs as well.

The compiler is zig's clang, which comes as the Python package `ziglang`: one compiler for all systems, and none that a
user must have. One library holds every kind of CPU; which one runs is decided where it is loaded.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# By architecture: levels in rising order, as `cpu_level` in c/cpu.c counts them, and what the compiler may use.
LEVELS = {
    "x86_64": {"avx2": "x86_64_v3", "avx512": "x86_64_v4", "avx512bf16": "x86_64_v4+avx512bf16+avx512vnni"},
    "aarch64": {"neon": "generic", "neonbf16": "generic+v8_2a+bf16+dotprod+i8mm"},
}
FLAGS = ["-O3", "-std=gnu17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi"]
NAMES = {"linux": "libkvcli.so", "macos": "libkvcli.dylib", "windows": "kvcli.dll"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}


def here() -> tuple[str, str]:
    """(architecture, system) of this machine, in the compiler's words; "" = not one of ours."""
    return MACHINES.get(platform.machine().lower(), ""), SYSTEMS.get(sys.platform, "")


def target(machine: str, system: str) -> str:
    """What the compiler calls it: on Linux the oldest C library that Python's wheels run with."""
    return f"{machine}-{system}" + {"linux": "-gnu.2.17", "windows": "-gnu", "macos": ".11.0"}[system]


def build(to: Path, machine: str, system: str, cc: Sequence[str], extra: Sequence[str] = ()) -> Path:
    """Compile and link into the folder `to` -> the library. `cc`: the compiler's command; raises CalledProcessError."""
    common = [*cc, "-target", target(machine, system), *FLAGS, *extra]
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [([f"-mcpu={cpu}", f"-DLEVEL={name}"], "level.c", name) for name, cpu in LEVELS[machine].items()]
        jobs += [([], f"{name}.c", name) for name in ("pool", "cpu")]

        def compile_one(job: tuple[list[str], str, str]) -> str:
            flags, source, name = job
            made = str(Path(scratch, name + ".o"))
            subprocess.run([*common, *flags, "-c", str(HERE / "c" / source), "-o", made], check=True)
            return made

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, jobs))
        library = to / NAMES[system]
        subprocess.run([*common, "-shared", "-s", *objects, "-lpthread", "-o", str(library)], check=True)
    return library


if __name__ == "__main__":
    made = build(HERE, *here(), [sys.executable, "-m", "ziglang", "cc"])
    print(f"{made}: {made.stat().st_size:,} bytes")
