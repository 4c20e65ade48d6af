"""How long a PDF takes to become text, and how much memory: our reader with its process, and pypdf, rounds interleaved.

    python tests/bench/extract.py [--pages 200] [--large 2000] [--reps 5] [--out FILE]

The file is written here: some forty lines a page, a header, a footer. `kvcli` is read_document from start to end, with
the start of the process that parses, running lines taken away and words mended; `pypdf` is its extract_text, page by
page, in a process that has it imported already. Memory is the most that was resident, of a fresh Python that calls
read_document on the large file, and of the process that parses for it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.documents import read_document
from tests.bench.harness import ROOT, Rows, in_turns, measurement
from tests.documents.made import many_pages

# ru_maxrss of a process begins with that of the one which started it, so its own figure is read from the kernel's page
MEASURE = """
import json, re, resource, sys
from kvcli.documents import read_document
n = len(read_document(sys.argv[1]).sections)
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps([n, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def by_pypdf(path: Path) -> int:
    from pypdf import PdfReader

    return sum(len(page.extract_text()) for page in PdfReader(path).pages)


def by_kvcli(path: Path) -> int:
    return len(read_document(path).text)


def timed(read: Callable[[Path], int], path: Path) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, children included."""

    def spent() -> float:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)

    began, used = time.perf_counter(), spent()
    assert read(path)
    return time.perf_counter() - began, spent() - used


def peak(path: Path) -> dict[str, int]:
    """Bytes that were resident at most, in the process that asks and in the one that parses."""
    run = [sys.executable, "-c", MEASURE, str(path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pages, parent, worker = json.loads(subprocess.run(run, env=env, capture_output=True, check=True).stdout)
    return {"pages": pages, "parent": parent * 1024, "worker": worker * 1024}


@measurement(
    "Seconds until {pages} pages of PDF are text, and MiB at most for {large:,} pages", schema="kvcli.bench.extract/1"
)
def extract(
    pages: int = 200, large: Annotated[int, "pages of the file that memory is measured with"] = 2000, reps: int = 5
) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        path, big = Path(folder, "pages.pdf"), Path(folder, "large.pdf")
        path.write_bytes(many_pages(pages).data)
        big.write_bytes(many_pages(large).data)
        found = in_turns({"kvcli": partial(timed, by_kvcli, path), "pypdf": partial(timed, by_pypdf, path)}, reps, 0)
        memory = peak(big)
        size = {"pages": path.stat().st_size, "large": big.stat().st_size}
    for side, each in found.items():
        walls, cpus = zip(*each, strict=True)
        row = {"side": side, "seconds": median(walls), "best": min(walls), "cpu": median(cpus)}
        row = {name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}
        mib = {f"{who}_mib": round(memory[who] / 2**20, 1) for who in ("parent", "worker") if side == "kvcli"}
        yield row | mib
    return {"pages": pages, "reps": reps, "bytes": size, "memory": memory}


if __name__ == "__main__":
    extract.main()
