"""The native kernels of this machine and of ARM, driven from C: levels, a row alone and among many, several threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcli.kernels import native
from kvcli.kernels.native import build

ARM = ("aarch64", "linux")
ARM_C_LIBRARY = "/usr/aarch64-linux-gnu"


def _levels(where: tuple[str, str], folder: Path, runner: list[str]) -> list[str]:
    """Compile the library and drive it -> the levels that are right."""
    return drive(build.build(folder, *where, build.compiler()), where, runner)


def drive(library: Path, where: tuple[str, str], runner: list[str]) -> list[str]:
    """Compile the driver beside a library and run both -> the levels that are right."""
    cc, driver = build.compiler(), library.with_name("platforms")
    source = Path(__file__).with_name("platforms.c")
    flags = ["-target", build.target(*where), "-std=gnu17", "-O1", "-Wall", "-Werror", "-ldl", "-lm"]
    subprocess.run([*cc, *flags, str(source), "-o", str(driver)], check=True)
    done = subprocess.run(
        [*runner, driver, library, *build.LEVELS[where[0]]], check=False, stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split()


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ziglang", reason="the compiler; comes with the dev extra")
    if build.here()[1] == "windows" or not all(build.here()):
        pytest.skip("the driver is for systems with dlopen")
    found = _levels(build.here(), tmp_path, [])
    library = ctypes.CDLL(str(tmp_path / build.NAMES[build.here()[1]]))
    monkeypatch.setattr(native, "_loaded", lambda: library)
    assert native._library.__wrapped__() is library
    monkeypatch.setattr(build, "sources", lambda: "sources_of_tomorrow")
    assert native._library.__wrapped__() is None  # it might take other arguments
    assert found == list(build.LEVELS[build.here()[0]])[: len(found)]


@pytest.mark.parametrize(("cpu", "levels"), [("max", ["neon", "neonbf16"]), ("neoverse-n1", ["neon"])])
def test_arm(cpu: str, levels: list[str], tmp_path: Path):
    pytest.importorskip("ziglang", reason="the compiler; comes with the dev extra")
    if not shutil.which("qemu-aarch64") or not Path(ARM_C_LIBRARY).is_dir():
        pytest.skip("needs an emulator: apt-get install qemu-user libc6-arm64-cross")
    assert _levels(ARM, tmp_path, ["qemu-aarch64", "-cpu", cpu, "-L", ARM_C_LIBRARY]) == levels


def test_numbers_are_as_wide_on_windows():
    """C's long is not: it has 32 bits there, and what Python hands over has 64."""
    for file in (build.HERE / "c").iterdir():
        assert not re.search(r"\blong\b", re.sub("//.*", "", file.read_text())), file.name
