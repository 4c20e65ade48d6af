"""Put the native kernels, compiled, into a wheel: hatchling runs this before it packs one.

The compiler is the package `ziglang`, 100 MB to download, and no requirement of the build: an install without network,
or on a platform that the kernels are not written for, gives a wheel of Python alone that says so, and kvcli computes
with torch.

KVCLI_WHEEL=win_amd64 builds for another platform (PLATFORMS in kernels/native/build.py), and fails if it cannot;
KVCLI_WHEEL=any compiles and downloads nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "kernels" / "native"
# By its file: neither kvcli nor torch can be imported where a wheel is built.
native = SimpleNamespace(**run_path(str(FOLDER / "build.py")))


class NativeKernels(BuildHookInterface):
    """A wheel gets the library and its platform's name; for an editable install the library goes into the checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the files are packed."""
        self.made = TemporaryDirectory()
        to = FOLDER if version == "editable" else Path(self.made.name)
        platform, note = self.platform(), to / "why_not.txt"
        note.unlink(missing_ok=True)
        try:
            self.compile(platform, to)
        except Unavailable as reason:
            if os.environ.get("KVCLI_WHEEL", "any") != "any":
                raise
            note.write_text(f"{reason}\n", encoding="utf-8")
            self.app.display_warning(f"no native kernels, kvcli will compute with torch: {reason}")
            platform = "any"
        if version == "editable":
            return
        # Not the C: what is installed cannot use it. All by name, as hatchling excludes nothing from a forced folder.
        sources = {p: f"kvcli/{p.relative_to(ROOT).as_posix()}" for p in sorted((ROOT / "kernels").rglob("*.py"))}
        made = {p: f"kvcli/kernels/native/{p.name}" for p in to.iterdir()}
        build_data["force_include"] |= {str(p): name for p, name in (sources | made).items()}
        build_data["pure_python"] = platform == "any"
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After they are packed."""
        self.made.cleanup()

    def platform(self) -> str:
        """What the wheel is for; "any" = none of those that kernels are written for, or none is wanted."""
        names = (*native.PLATFORMS, "any")
        if (asked := os.environ.get("KVCLI_WHEEL")) and asked not in names:
            raise ValueError(f"KVCLI_WHEEL is {asked}, but wheels are for {', '.join(names)}")
        # Of pip's own list, or it would refuse what it has just built: musl, a 32-bit Python, an old system.
        return asked or next((name for name in platform_tags() if name in native.PLATFORMS), "any")

    def compile(self, platform: str, to: Path) -> None:
        """The library into the folder `to`; raises Unavailable."""
        if platform == "any":
            asked = "KVCLI_WHEEL" in os.environ
            raise Unavailable("none were asked for" if asked else "none are written for this platform")
        with TemporaryDirectory() as scratch:
            cc = native.compiler() or self.fetch(Path(scratch))
            for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):  # 80 MB that nobody would look for later
                os.environ[name] = os.environ.get(name) or str(Path(scratch, "cache"))
            try:
                native.build(to, *native.PLATFORMS[platform], cc)
            except (OSError, subprocess.CalledProcessError) as error:
                raise Unavailable("they did not compile") from error

    def fetch(self, scratch: Path) -> list[str]:
        """The compiler's command, installed into that folder; raises Unavailable."""
        wanted = [need for need in self.metadata.core.optional_dependencies["dev"] if need.startswith("ziglang")]
        what = ["--target", str(scratch), "--no-deps", "--only-binary", ":all:", *wanted]
        try:
            subprocess.run([*installer(scratch / "pip"), *what], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable("their compiler, the package ziglang, could not be downloaded") from error
        return native.compiler(scratch)


class Unavailable(Exception):
    """There will be no native kernels; the words follow "none were built when kvcli was installed:"."""


def installer(scratch: Path) -> list[str]:
    """A command that installs packages. Where wheels are built pip may be missing; uv at least names itself."""
    if uv := os.environ.get("UV"):
        return [uv, "pip", "install", "--python", sys.executable]
    # -I: pip's own build environment hides the pip that started it
    if subprocess.run([sys.executable, "-I", "-m", "pip", "--version"], capture_output=True).returncode == 0:
        python = sys.executable
    else:
        venv.create(scratch, with_pip=True)
        python = str(scratch / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    return [python, "-I", "-m", "pip", "install", "--retries", "1", "--disable-pip-version-check"]
