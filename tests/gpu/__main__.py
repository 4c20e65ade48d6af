"""Everything that can only be found out on a GPU, in one command and a few minutes.

    python -m tests.gpu --out FILE [--budget 520] [--only exact,steps] [--at-once] [--device cpu] [--list]

Stage by stage, each in a process of its own with its share of the time, so that one which crashes, hangs or lacks a
package takes nothing from the others. FILE is JSON, written anew after each stage; a line per stage is printed. Without
a GPU it says so and ends with status 1; `--device cpu` tries every stage in a tiny form, which shows that it runs.
`--at-once` runs the stages that measure neither time nor memory side by side, on a card with 24 GiB for them.

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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# in their order, with the seconds of 520 that each has
SHARES = {
    "environment": 25,
    "compiling": 25,
    "kernels": 45,
    "bits": 50,
    "waits": 20,
    "whole": 80,
    "steps": 85,
    "bandwidth": 35,
    "exact": 35,
    "chat": 20,
    "quantized": 20,
    "memory": 30,
    "offload": 25,
    "sanitizer": 25,
}
STAGES = tuple(SHARES)
COUNTING = frozenset("kernels bits waits whole exact sanitizer".split())  # neither time nor memory
WHEELS = ROOT / ".gpu-wheels"


def run_stage(name: str, device: str, seconds: float, folder: Path, stop: Event) -> dict[str, Any]:
    """One stage in a process of its own, ended at `stop` -> how it ended, and what it found until then."""
    rows, said = folder / f"{name}.jsonl", folder / f"{name}.txt"
    carried = [str(WHEELS)] if any(WHEELS.rglob(f"*{sys.implementation.cache_tag}*")) else []
    paths = [str(ROOT), *carried, *os.environ.get("PYTHONPATH", "").split(":")]
    more = {"PYTHONPATH": ":".join(filter(None, paths)), "KVCLI_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    # tests set it, and it would have the kernels of a GPU interpreted
    env = {key: value for key, value in (os.environ | more).items() if key != "TRITON_INTERPRET"}
    began = time.monotonic()
    with said.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.stage", name, device, f"{seconds:.1f}", str(rows)],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it starts ends with it
        )
        try:
            while child.poll() is None and time.monotonic() - began < seconds and not stop.is_set():
                stop.wait(0.1)
        finally:
            status = "died" if child.poll() is not None else "late"
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
    lines = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")] if rows.exists() else []
    why = f"ended after {seconds:.0f} s" if status == "late" else f"its process ended with {code}"
    status, why = next((line["end"] for line in lines if "end" in line), (status, why))
    took = round(time.monotonic() - began, 1)
    found = {"status": status, "why": why, "seconds": took, "rows": [line["row"] for line in lines if "row" in line]}
    tail = said.read_text(errors="replace")[-3000:]
    return found if status in ("done", "missing") else {**found, "said": tail}


def write(file: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def no_gpu(environment: dict[str, Any]) -> str:
    """Why there is none; "" where there is one."""
    gpu = next((row for row in environment["rows"] if row.get("what") == "gpu"), {"why": environment["why"]})
    return "" if gpu.get("name") else str(gpu.get("why"))


def turns(names: Sequence[str], at_once: bool) -> list[list[str]]:
    """Stages in their order, those that count together where the first of them stands."""
    together = [name for name in names if at_once and name in COUNTING]
    return [together if name in together else [name] for name in names if name not in together[1:]]


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
    until, left, stop = time.monotonic() + budget, turns(names, at_once), Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(STAGES)) as pool:
        while left:
            weights = [max(SHARES[name] for name in turn) for turn in left]
            seconds = max(1.0, (until - time.monotonic()) * weights[0] / sum(weights))
            turn = left.pop(0)
            runs = {pool.submit(run_stage, name, device, seconds, Path(folder), stop): name for name in turn}
            try:
                for run in as_completed(runs):
                    name, found = runs[run], run.result()
                    result["stages"][name] = found
                    write(file, result)
                    says = found["why"] or next((row["says"] for row in reversed(found["rows"]) if "says" in row), "")
                    print(f"{name:12} {found['status']:8} {found['seconds']:6.1f} s  {says}", flush=True)
            finally:
                stop.set()  # Ctrl-C ends what is under way
            stop.clear()
            if device != "cpu" and turn == ["environment"] and (why := no_gpu(result["stages"]["environment"])):
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
