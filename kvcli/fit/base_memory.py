"""Memory of the program without a model. It is measured, because builds of torch differ by hundreds of MiB."""

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

# Bytes that a command allocates between its imports and the end of its answer, apart from the model and its KV cache:
# threads, compiled products, library pages that load late. Resident memory, like the peak that it is compared with.
AFTER = 40 << 20
CODE = "from kvcli.fit.base_memory import here; print(here())"
BASE = 463 << 20  # the whole program, if it was never measured: torch 2.13 for CPUs, transformers 5, Linux


def here() -> int:
    """Return the bytes of this process after all imports that an answer needs, with the documents loaded so far."""
    import kvcli.chat.model
    import kvcli.engine.hf.lm  # noqa: F401

    return int(psutil.Process().memory_info().rss) + AFTER


def elsewhere(cache: Path) -> int:
    """Measure the bytes in a separate process, once for each build of torch; the cache folder stores the figure."""
    file = cache / FOLDER / f"program-{build()}"
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never measured, or damaged
        found = measured()
    try:
        private_folder(file.parent)
        write_private(file, f"{found}\n")
    except OSError:  # disk full: the next run measures again
        pass
    return found


def measured() -> int:
    """Measure the bytes in a separate process that imports everything and ends."""
    root = Path(__file__).parents[2]  # of a checkout that is not installed
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise KvcliError("a bare process could not be measured", code="no_peak", lines=said, try_=["kvcli doctor"])
    return int(done.stdout.split()[-1])


def build() -> str:
    """Return a digest of the versions that determine the program's memory, without importing torch."""
    found = find_spec("torch")
    stated = Path(found.origin).with_name("version.py") if found is not None and found.origin else Path()
    about = stated.read_text(encoding="utf-8") if stated.is_file() else ""  # versions of torch and CUDA, and the commit
    return digest(sys.version, stated, about, version("transformers"), __version__)
