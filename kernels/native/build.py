"""Compile the native kernels: `python -m kvcli.kernels.native.build`, or `--all FOLDER` for all platforms.

The compiler is zig's clang from the Python package `ziglang`. It compiles for all systems, and a user does not need it.
One library holds the code for every kind of CPU; the kind is chosen when the library is loaded. The hook that builds
wheels (hatch_build.py) runs this file alone, so it imports no other module of kvcli.
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
# By architecture: kinds of CPU, the best last, as `cpu_level` in c/cpu.c counts them, and the compiler's CPU names.
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
# Platforms of wheels: pip's name -> (architecture, system) as the compiler names them
PLATFORMS = {
    "manylinux_2_17_x86_64": ("x86_64", "linux"),
    "manylinux_2_17_aarch64": ("aarch64", "linux"),
    "macosx_11_0_x86_64": ("x86_64", "macos"),
    "macosx_11_0_arm64": ("aarch64", "macos"),
    "win_amd64": ("x86_64", "windows"),
}


def here() -> tuple[str, str]:
    """Return (architecture, system) of this machine, as the compiler names them; "" = not supported."""
    return MACHINES.get(platform.machine().lower(), ""), SYSTEMS.get(sys.platform, "")


def target(machine: str, system: str) -> str:
    """Return the compiler's name of the target: on Linux with the oldest C library that Python's wheels support."""
    return f"{machine}-{system}" + {"linux": "-gnu.2.17", "windows": "-gnu", "macos": ".11.0"}[system]


def compiler(folder: Path | None = None) -> list[str]:
    """Return the compiler command of the package `ziglang` in that folder, else of the installed one; [] without it."""
    found = PathFinder.find_spec("ziglang", None if folder is None else [str(folder)])
    return [str(Path(found.origin).with_name("zig")), "cc"] if found and found.origin else []


def sources() -> str:
    """Return a name with the hash of the sources in c/, which the compiled library exports; "" without c/."""
    found = sorted((HERE / "c").glob("*.[ch]"))
    return "sources_" + hashlib.sha256(b"".join(p.read_bytes() for p in found)).hexdigest()[:16] if found else ""


def build(to: Path, machine: str, system: str, cc: Sequence[str], extra: Sequence[str] = ()) -> Path:
    """Compile and link into the folder `to`; return the library. `cc`: compiler command. Raises CalledProcessError."""
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
        # macOS records the link path in the library, unless another name is given
        name = [f"-Wl,-install_name,@rpath/{linked.name}"] if system == "macos" else []
        subprocess.run([*common, "-shared", "-s", *name, *objects, "-lpthread", "-o", str(linked)], check=True)
        to.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # never overwritten: a process that runs it would read bytes of the new one
        shutil.copy(linked, library)
    return library


def main(args: Sequence[str]) -> None:
    """Run the command line."""
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
