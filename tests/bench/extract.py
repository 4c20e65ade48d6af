"""How long a PDF takes to become text, and how much memory: our reader with its process, and pypdf, rounds interleaved.

    python tests/bench/extract.py [--pages 200] [--large 2000] [--reps 5] [--out FILE]

The file is written here: some forty lines a page, a header, a footer. `kvcli` is read_document from start to end, with
the start of the process that parses, running lines taken away and words mended; `pypdf` is its extract_text, page by
page, in a process that has it imported already. Memory is the most that was resident, of a fresh Python that calls
read_document on the large file, and of the process that parses for it. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.documents import read_document
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


def machine() -> dict[str, Any]:
    about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in about if "model name" in line), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit.strip(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--large", type=int, default=2000, help="pages of the file that memory is measured with")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, times = machine(), {"kvcli": [], "pypdf": []}
    with tempfile.TemporaryDirectory() as folder:
        path, large = Path(folder, "pages.pdf"), Path(folder, "large.pdf")
        path.write_bytes(many_pages(args.pages).data)
        large.write_bytes(many_pages(args.large).data)
        for _ in range(args.reps):
            for side, read in (("kvcli", by_kvcli), ("pypdf", by_pypdf)):
                times[side].append(timed(read, path))
        memory = peak(large)
        size = {"pages": path.stat().st_size, "large": large.stat().st_size}
    rows = [
        {
            "side": side,
            "seconds": round(statistics.median(wall for wall, _ in found), 3),
            "best": round(min(wall for wall, _ in found), 3),
            "cpu": round(statistics.median(cpu for _, cpu in found), 3),
        }
        for side, found in times.items()
    ]
    rows[0] |= {f"{who}_mib": round(memory[who] / 2**20, 1) for who in ("parent", "worker")}
    print(f"{args.pages:,} pages   seconds   best   of the processor")
    for row in rows:
        print(f"{row['side']:11} {row['seconds']:8.2f} {row['best']:6.2f} {row['cpu']:8.2f}")
    print(f"{args.large:,} pages   {memory['parent'] / 2**20:.0f} MiB, {memory['worker'] / 2**20:.0f} MiB to parse")
    result = {
        "schema": "kvcli.bench.extract/1",
        "environment": before,
        "pages": args.pages,
        "reps": args.reps,
        "bytes": size,
        "rows": rows,
        "memory": memory,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
