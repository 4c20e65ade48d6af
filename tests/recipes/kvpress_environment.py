"""Python environment of kvpress. It is separate, because kvpress pins transformers below the version that kvcli needs.

    python tests/recipes/kvpress_environment.py

makes it in kvcli's cache folder. The user's own environment is not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.errors import KvcliError, UsageError
from kvcli.files import private_folder, write_private

COMMAND = "python tests/recipes/kvpress_environment.py"
PACKAGES = ("kvpress",)
_CHECK = (
    "from importlib.metadata import version as v; import kvpress; print(*(v(n) for n in ('kvpress', 'transformers')))"
)

Run = Callable[[Sequence[str]], str]


def interpreter(cache: Path) -> Path:
    """Return Python of the environment. Raises UsageError, with the command that makes it, if it is incomplete."""
    if not _done(cache).exists():
        raise UsageError(
            "--baseline kvpress needs a separate Python environment, which is not installed yet",
            code="missing_extra",
            lines=[
                "kvpress needs transformers older than 5.3, and kvcli a newer one;",
                f"the command below installs it with torch {torch_version()} in {_folder(cache)}, about 1.5 GB",
            ],
            try_=[COMMAND],
        )
    return _python(cache)


def make_environment(cache: Path, tell: Callable[[str], None], torch: str = "", run: Run | None = None) -> Path:
    """Make the environment from scratch and return its interpreter. `torch`: a version; the default is that of kvcli.

    pip's own settings apply, so torch is downloaded from the user's configured index.
    """
    run, folder, torch = run or _run, _folder(cache), torch or torch_version()
    if folder.exists():
        shutil.rmtree(folder)
    private_folder(folder.parent)
    tell(f"making {folder}")
    run([sys.executable, "-m", "venv", str(folder)])
    python = str(_python(cache))
    # torch is installed first and alone: kvpress would install the newest, which on Linux adds gigabytes of CUDA
    for wanted in (f"torch=={torch}", *PACKAGES):
        tell(f"installing {wanted}")
        run([python, "-I", "-m", "pip", "install", "--disable-pip-version-check", wanted])
    found = run([python, "-I", "-c", _CHECK]).strip()
    write_private(_done(cache), f"{found}\n")
    tell(f"kvpress and transformers {found.replace(' ', ' and ')} are ready")
    return Path(python)


def torch_version() -> str:
    """Version of the running torch without its build suffix, because a registry has only the plain version."""
    return version("torch").partition("+")[0]


def _folder(cache: Path) -> Path:
    return cache / "kvpress"


def _done(cache: Path) -> Path:
    """Marker file, written last: an environment without it is incomplete."""
    return _folder(cache) / "kvcli-ready"


def _python(cache: Path) -> Path:
    return _folder(cache) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output. Raises KvcliError with the last lines of its error output."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        said = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
        raise UsageError(
            "the environment of kvpress could not be created",
            code="no_environment",
            lines=[f"{' '.join(map(str, command[1:]))} ended with {done.returncode}", *said[-4:]],
            try_=[f"{COMMAND} --torch VERSION, with a version that your pip can find", "leave --baseline kvpress out"],
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    from kvcli.environment import Environment

    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Make the environment of `python tests/recipes/bench.py --baseline kvpress`."
    )
    parser.add_argument("--torch", default="", metavar="VERSION", help=f"default {torch_version()}, as in kvcli")
    options = parser.parse_args(arguments)
    world = Environment.real()

    def tell(line: str) -> None:
        print(line, file=world.stderr, flush=True)

    try:
        make_environment(world.paths.cache, tell, options.torch)
    except KvcliError as error:
        tell("\n".join([f"error: {error.message}", *(f"  {line}" for line in error.lines)]))
        tell("\n".join(f"  try:  {way}" for way in error.try_))
        return int(error.exit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
