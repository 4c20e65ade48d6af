"""The hook that compiles the native kernels into a wheel: which wheel it makes, and what that says without them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NATIVE = "kvcli/kernels/native"

wheels = pytest.importorskip("hatchling.builders.wheel", reason="the build backend; comes with the dev extra")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook's module, in an environment without the compiler and without an index to get it from."""
    for name in ("KVCLI_WHEEL", "UV", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", "")  # the hook sets both: put back afterwards
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", "")
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.native, "compiler", lambda folder=None: [])
    monkeypatch.setattr(module, "platform_tags", lambda: ["linux_x86_64", "manylinux_2_17_x86_64"])
    return module


def _pack(hook: Any, folder: Path) -> tuple[zipfile.ZipFile, list[str]]:
    """The wheel, and what was warned of."""
    builder, said = wheels.WheelBuilder(str(ROOT)), list[str]()
    builder.app.display_warning = said.append
    made = hook.NativeKernels(str(ROOT), {}, builder.config, builder.metadata, str(folder), "wheel", builder.app)
    builder.get_build_hooks = lambda directory: {"custom": made}
    return zipfile.ZipFile(next(builder.build(directory=str(folder), versions=["standard"]))), said


def _compiles(hook: Any, outcome: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.native, "compiler", lambda folder=None: ["cc"])
    monkeypatch.setattr(hook.native, "build", lambda to, machine, system, cc: outcome(to))


def test_without_its_compiler_a_wheel_is_of_python_alone_and_says_so(hook: Any, tmp_path: Path):
    wheel, (warning,) = _pack(hook, tmp_path)
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert "the package ziglang, could not be downloaded" in warning
    wheel.extractall(tmp_path / "installed")
    code = "from kvcli.kernels import native; print(native.native()); print(native.why_not()); print(native.remedy())"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, stdout=-1, text=True)
    functions, why, remedy = done.stdout.splitlines()
    assert functions == "None"
    assert "when kvcli was installed: their compiler, the package ziglang, could not be downloaded" in why
    assert "pip install --force-reinstall" in remedy


def test_with_it_a_wheel_is_for_one_platform(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _compiles(hook, lambda to: (to / "libkvcli.so").write_text("made"), monkeypatch)
    wheel, said = _pack(hook, tmp_path)
    assert (str(wheel.filename).rpartition("-none-")[2], said) == ("manylinux_2_17_x86_64.whl", [])
    assert wheel.read(f"{NATIVE}/libkvcli.so") == b"made"
    assert b"Root-Is-Purelib: false" in wheel.read(next(n for n in wheel.namelist() if n.endswith("/WHEEL")))
    assert not [n for n in wheel.namelist() if n.startswith(NATIVE) and n.endswith((".c", ".h", ".txt"))]


def test_what_does_not_compile_is_said(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(to: Path) -> None:
        raise subprocess.CalledProcessError(1, "cc")

    _compiles(hook, fails, monkeypatch)
    wheel, _ = _pack(hook, tmp_path)
    assert wheel.read(f"{NATIVE}/why_not.txt") == b"they did not compile\n"


def test_pip_is_asked_what_it_would_install(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Python on musl takes no manylinux wheel, whatever the machine is called."""
    monkeypatch.setattr(hook, "platform_tags", lambda: ["linux_x86_64", "musllinux_1_2_x86_64"])
    wheel, (warning,) = _pack(hook, tmp_path)
    assert str(wheel.filename).endswith("-any.whl")
    assert "none are written for this platform" in warning


def test_a_platform_asked_for_by_name_is_built_or_refused(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVCLI_WHEEL", "win_amd64")
    with pytest.raises(hook.Unavailable):
        _pack(hook, tmp_path)
    monkeypatch.setenv("KVCLI_WHEEL", "beos")
    with pytest.raises(ValueError, match=r"beos, but wheels are for manylinux_2_17_x86_64, .+ any"):
        _pack(hook, tmp_path)
    assert not [*tmp_path.glob("*.whl")]
