"""Everything that can only be found out on a GPU, in one command and a few minutes.

    python -m tests.gpu --out FILE [--budget 520] [--only exact,steps] [--at-once] [--device cpu] [--list]

Stage by stage, each with its share of the time. Those that measure time follow each other in one process, which imports
and compiles once; every other one has a process of its own. A stage that crashes or hangs takes its process with it,
and those behind it go on in another; one that lacks a package takes nothing from the others. FILE is JSON, written anew
after each stage, and a line per stage is printed; each row is in FILE.rows at once. Without a GPU it says so and ends
with status 1; `--device cpu` tries every stage in a tiny form, which shows that it runs. `--at-once` runs the stages
that measure neither time nor memory side by side, on a card with 24 GiB for them.

Kernels are compiled in the first minute there, or beforehand here: `python -m tests.gpu.compiled_before 90` fills
`.gpu-cache/` at the root of the checkout for cards of compute capability 9.0, which a machine with the same releases of
Triton and torch takes them from.

A checkout and torch and transformers are enough to begin with: kvcli runs in place. What else it needs and the machine
lacks may lie unpacked in `.gpu-wheels/` at the root of the checkout, where git ignores it; made for the Python that
runs, it goes first. For a machine without a network (here Linux, x86-64, Python 3.12) fill it beforehand:

    to="--no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64"
    to="$to --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
    pip download -d /tmp/wheels $to pydantic pydantic-core annotated-types typing-inspection typing-extensions \
        tomli platformdirs prompt-toolkit wcwidth gguf pypdfium2 bitsandbytes
    pip install --target .gpu-wheels --no-compile --no-index $to /tmp/wheels/*.whl

That is 190 MiB, nearly all of it libraries of bitsandbytes for other versions of CUDA. With 13.0 this leaves 40 MiB:

    find .gpu-wheels/bitsandbytes -name 'libbitsandbytes_cuda*' ! -name '*130*' -delete

`sanitizer` wants compute-sanitizer of the CUDA toolkit, and says so where there is none. Without any of it `compiling`,
`kernels`, `bits`, `bandwidth`, `whole` and `steps` run, bitsandbytes beside them left out; `exact`, `quantized` and
`offload` in part: n-gram drafting (`waits`) needs pydantic, profiles (`chat`, `memory`) tomli.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# in their order, most valuable first, with the seconds of 520 that each has
SHARES = {
    "environment": 20,
    "compiling": 20,
    "ceilings": 15,
    "bandwidth": 55,
    "bits": 50,
    "steps": 90,
    "peers": 70,
    "offload": 30,
    "memory": 30,
    "kernels": 30,
    "whole": 45,
    "waits": 15,
    "exact": 20,
    "chat": 10,
    "quantized": 10,
    "sanitizer": 10,
}
STAGES = tuple(SHARES)
TIMED = frozenset("ceilings bandwidth steps peers offload quantized".split())  # in one process
COUNTING = frozenset("kernels bits waits whole exact sanitizer".split())  # neither time nor memory
WHEELS, CACHE = ROOT / ".gpu-wheels", ROOT / ".gpu-cache"
Found = dict[str, Any]


def run_stages(
    names: Sequence[str], device: str, seconds: float, folder: Path, stop: Event, put: Callable[[str, Found], None]
) -> None:
    """Stages one after another in one process, ended at `stop`; where one takes its process along, the rest go on in
    another. `put` gets how each ended, and what it found until then."""
    left, until = list(names), time.monotonic() + seconds
    while left and not stop.is_set():
        for name, found in _in_a_process(left, device, max(1.0, until - time.monotonic()), folder, stop):
            left.remove(name)
            put(name, found)


def _in_a_process(
    names: Sequence[str], device: str, seconds: float, folder: Path, stop: Event
) -> Iterator[tuple[str, Found]]:
    """As far as one process gets: at least the first of them ends."""
    rows, said = folder / f"{names[0]}.jsonl", folder / f"{names[0]}.txt"
    with said.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.stage", *_arguments(names), device, f"{seconds:.1f}", str(rows)],
            cwd=ROOT,
            env=_environment(folder),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it starts ends with it
        )
    left, began, at, lines = list(names), time.monotonic(), 0, list[Any]()
    allowed = seconds if len(names) == 1 else seconds * SHARES[names[0]] / sum(SHARES[name] for name in names)
    status = "late"
    try:
        while True:
            if child.poll() is not None:  # before what it wrote is read, so that it is all of it
                status = "died"
            whole = rows.read_bytes() if rows.exists() else b""
            whole, at = whole[at : whole.rfind(b"\n") + 1], whole.rfind(b"\n") + 1
            for line in map(json.loads, whole.splitlines()):
                if "begin" in line:
                    began, lines, (allowed, start) = time.monotonic(), [], line["begin"]
                elif "row" in line:
                    lines.append(line["row"])
                else:
                    ended, why = line["end"]
                    yield left.pop(0), _found(ended, why, began, lines, said, start)
                    began, lines = time.monotonic(), []
            if status == "died" or not left or stop.is_set() or time.monotonic() - began > allowed:
                break
            stop.wait(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    if left:
        why = f"ended after {allowed:.0f} s" if status == "late" else f"its process ended with {code}"
        yield left.pop(0), _found(status, why, began, lines, said, 0)


def _found(status: str, why: str, began: float, rows: list[Any], said: Path, start: int) -> Found:
    found = {"status": status, "why": why, "seconds": round(time.monotonic() - began, 1), "rows": rows}
    tail = said.read_bytes()[start:].decode(errors="replace")[-3000:]
    return found if status in ("done", "missing") else {**found, "said": tail}


def _arguments(names: Sequence[str]) -> list[str]:
    """Names with their shares."""
    return [",".join(f"{name}:{SHARES[name]}" for name in names)]


def _environment(folder: Path) -> dict[str, str]:
    carried = [str(WHEELS)] if any(WHEELS.rglob(f"*{sys.implementation.cache_tag}*")) else []
    paths = [str(ROOT), *carried, *os.environ.get("PYTHONPATH", "").split(":")]
    more = {"PYTHONPATH": ":".join(filter(None, paths)), "KVCLI_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    if CACHE.is_dir():
        more["TRITON_CACHE_DIR"] = str(CACHE)
    # tests set it, and it would have the kernels of a GPU interpreted
    return {key: value for key, value in (os.environ | more).items() if key != "TRITON_INTERPRET"}


def write(file: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def no_gpu(environment: dict[str, Any]) -> str:
    """Why there is none; "" where there is one."""
    gpu = next((row for row in environment["rows"] if row.get("what") == "gpu"), {"why": environment["why"]})
    return "" if gpu.get("name") else str(gpu.get("why"))


def turns(names: Sequence[str], at_once: bool) -> list[list[list[str]]]:
    """Processes by turns, each with its stages in order: one for all that is timed, where the first of them stands, and
    side by side those that count."""
    timed = [name for name in names if name in TIMED]
    together = [name for name in names if at_once and name in COUNTING]
    found = []
    for name in names:
        if name in timed[1:] or name in together[1:]:
            continue
        found.append([timed] if name in timed else [[one] for one in together] if name in together else [[name]])
    return found


def measure(names: Sequence[str], device: str, budget: float, file: Path, at_once: bool = False) -> dict[str, Any]:
    """The stages in turn, each with its share of what is left."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    result: dict[str, Any] = {
        "schema": "kvcli.gpu/1",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.strip(),
        "device": device,
        "is_tiny": device == "cpu",
        "at_once": at_once,
        "stages": {},
    }
    lock = Lock()

    def put(name: str, found: Found) -> None:
        with lock:
            result["stages"][name] = found
            write(file, result)
            says = found["why"] or next((row["says"] for row in reversed(found["rows"]) if "says" in row), "")
            print(f"{name:12} {found['status']:8} {found['seconds']:6.1f} s  {says}", flush=True)

    folder = file.with_name(file.name + ".rows").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    until, left, stop = time.monotonic() + budget, turns(names, at_once), Event()
    with ThreadPoolExecutor(len(STAGES)) as pool:
        while left:
            weights = [max(sum(SHARES[name] for name in process) for process in turn) for turn in left]
            seconds = max(1.0, (until - time.monotonic()) * weights[0] / sum(weights))
            turn = left.pop(0)
            runs = [pool.submit(run_stages, process, device, seconds, folder, stop, put) for process in turn]
            try:
                for run in as_completed(runs):
                    run.result()
            finally:
                stop.set()  # Ctrl-C ends what is under way
            stop.clear()
            if device != "cpu" and turn == [["environment"]] and (why := no_gpu(result["stages"]["environment"])):
                result["no_gpu"] = why
                write(file, result)
                break
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--budget", type=float, default=520, help="seconds for all stages")
    parser.add_argument("--only", default="", help="stages, by commas")
    parser.add_argument("--at-once", action="store_true", help="side by side what measures neither time nor memory")
    parser.add_argument("--device", default="cuda", help="cpu tries every stage in a tiny form")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:12} {SHARES[name]:4} s of 520" for name in STAGES))
        return 0
    only = args.only.split(",") if args.only else STAGES
    if args.out is None or set(only) - set(STAGES):
        parser.error(f"--out FILE, and of --only {', '.join(STAGES)}")
    names = [name for name in STAGES if name in only or (name == "environment" and args.device != "cpu")]
    result = measure(names, args.device, args.budget, args.out, args.at_once)
    if "no_gpu" in result:
        print(f"no GPU here: {result['no_gpu']}. --device cpu tries every stage in a tiny form")
        return 1
    return 0 if all(found["status"] == "done" for found in result["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
