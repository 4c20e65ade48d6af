"""What the program takes in memory before any model: measured, because builds of torch differ by hundreds of MiB."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from kvcli.errors import KvcliError
from kvcli.files import private_folder, write_private
from kvcli.fit.calibration import FOLDER, digest
from kvcli.version import __version__

# Bytes that a command takes beyond its imports until it has answered, the model and its text aside: threads, compiled
# products, pages of libraries that are touched late. Like the peak it is compared with, all of this is resident memory.
AFTER = 40 << 20
CODE = "from kvcli.fit.base_memory import here; print(here())"
BASE = 463 << 20  # of the whole program where nobody measured it: torch 2.13 for CPUs, transformers 5, Linux


def here() -> int:
    """Bytes of this process, with all imported that an answer needs, documents that it has read included."""
    import kvcli.chat.model
    import kvcli.engine.hf.lm  # noqa: F401

    return int(psutil.Process().memory_info().rss) + AFTER


def elsewhere(cache: Path) -> int:
    """The same of a process of its own, measured once for each build of torch and kept in the cache."""
    file = cache / FOLDER / f"program-{build()}"
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never measured, or damaged
        found = measured()
    try:
        private_folder(file.parent)
        write_private(file, f"{found}\n")
    except OSError:  # a disk without room: measured again the next time
        pass
    return found


def measured() -> int:
    """By a process of its own, which imports and ends."""
    root = Path(__file__).parents[2]  # of a bare checkout
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise KvcliError("a bare process could not be measured", code="no_peak", lines=said, try_=["kvcli doctor"])
    return int(done.stdout.split()[-1])


def build() -> str:
    """Of what decides how much memory the program takes, without importing it."""
    found = find_spec("torch")
    stated = Path(found.origin).with_name("version.py") if found is not None and found.origin else Path()
    about = stated.read_text(encoding="utf-8") if stated.is_file() else ""  # version, CUDA's, the commit
    return digest(sys.version, stated, about, version("transformers"), __version__)
