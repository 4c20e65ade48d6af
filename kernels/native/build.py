"""Compile the native kernels: `python -m kvcli.kernels.native.build`, or `--all FOLDER` for all platforms there are.

The compiler is zig's clang, which comes as the Python package `ziglang`: one compiler for all systems, and none that a
user must have. One library holds every kind of CPU; which one runs is decided where it is loaded. The hook that builds
wheels (hatch_build.py) runs this file on its own, so it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent
# By architecture: levels in rising order, as `cpu_level` in c/cpu.c counts them, and what the compiler may use.
LEVELS = {
    "x86_64": {
        "avx2": "x86_64_v3",
        "avx512": "x86_64_v4",
        "avx512bf16": "x86_64_v4+avx512bf16+avx512vnni",
        "amx": "x86_64_v4+avx512bf16+avx512vnni+amx_tile+amx_bf16+amx_int8",
    },
    "aarch64": {"neon": "generic", "neonbf16": "generic+v8_2a+bf16+dotprod+i8mm"},
}
FLAGS = ["-O3", "-std=gnu2x", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi"]
NAMES = {"linux": "libkvcli.so", "macos": "libkvcli.dylib", "windows": "kvcli.dll"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
# What wheels are made for, in pip's words, and (architecture, system) in the compiler's
PLATFORMS = {
    "manylinux_2_17_x86_64": ("x86_64", "linux"),
    "manylinux_2_17_aarch64": ("aarch64", "linux"),
    "macosx_11_0_x86_64": ("x86_64", "macos"),
    "macosx_11_0_arm64": ("aarch64", "macos"),
    "win_amd64": ("x86_64", "windows"),
}


def here() -> tuple[str, str]:
    """(architecture, system) of this machine, in the compiler's words; "" = not one of ours."""
    return MACHINES.get(platform.machine().lower(), ""), SYSTEMS.get(sys.platform, "")


def target(machine: str, system: str) -> str:
    """What the compiler calls it: on Linux the oldest C library that Python's wheels run with."""
    return f"{machine}-{system}" + {"linux": "-gnu.2.17", "windows": "-gnu", "macos": ".11.0"}[system]


def compiler(folder: Path | None = None) -> list[str]:
    """The command of the compiler in the package `ziglang` of that folder, else of the installed one; [] without it."""
    found = PathFinder.find_spec("ziglang", None if folder is None else [str(folder)])
    return [str(Path(found.origin).with_name("zig")), "cc"] if found and found.origin else []


def sources() -> str:
    """A name for what is in c/ now, exported by what was built from it; "" where kvcli was installed without c/."""
    found = sorted((HERE / "c").glob("*.[ch]"))
    return "sources_" + hashlib.sha256(b"".join(p.read_bytes() for p in found)).hexdigest()[:16] if found else ""


def build(to: Path, machine: str, system: str, cc: Sequence[str], extra: Sequence[str] = ()) -> Path:
    """Compile and link into the folder `to` -> the library. `cc`: the compiler's command; raises CalledProcessError."""
    common = [*cc, "-target", target(machine, system), *FLAGS, *extra]
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [
            ([f"-mcpu={cpu}", f"-DLEVEL={name}"], source, f"{name}_{source}")
            for name, cpu in LEVELS[machine].items()
            for source in ("attend.c", "isa.c", "page_scores.c")
        ]
        jobs += [([], "pool.c", "pool"), ([f"-DSOURCES={sources()}"], "cpu.c", "cpu")]

        def compile_one(job: tuple[list[str], str, str]) -> str:
            flags, source, name = job
            made = str(Path(scratch, name + ".o"))
            subprocess.run([*common, *flags, "-c", str(HERE / "c" / source), "-o", made], check=True)
            return made

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, jobs))
        linked, library = Path(scratch, NAMES[system]), to / NAMES[system]
        # macOS writes where a library was linked into it, unless it is told another name
        name = [f"-Wl,-install_name,@rpath/{linked.name}"] if system == "macos" else []
        subprocess.run([*common, "-shared", "-s", *name, *objects, "-lpthread", "-o", str(linked)], check=True)
        to.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # never written over: a process that runs it would read the new one's bytes
        shutil.copy(linked, library)
    return library


def main(args: Sequence[str]) -> None:
    """What the command line asks for."""
    if not (cc := compiler()):
        sys.exit("the compiler comes as a package: python -m pip install ziglang")
    match args:
        case [] if all(here()):
            jobs = [(HERE, here())]
        case ["--all", folder]:
            jobs = [(Path(folder, name), where) for name, where in PLATFORMS.items()]
        case _:
            sys.exit(f"python -m kvcli.kernels.native.build [--all FOLDER]: for {', '.join(PLATFORMS)}")
    for to, where in jobs:
        made = build(to, *where, cc)
        print(f"{made}: {made.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
