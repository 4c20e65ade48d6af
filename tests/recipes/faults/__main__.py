"""Put seeded faults into a copy of this checkout, one at a time, and see whether the tests that own them fail.

    python -m tests.recipes.faults [NAME ...] [--core] [--resume FILE]

Each fault runs its own test files: the core of them first (tests/core.py), then all of them (`--whole`) where the core
did not fail. Single tests that it names are tried before the rest of their file. Every module of this folder with a
list FAULTS is read. Run it from the root of a checkout whose native library is built; a fault in C builds the library
anew in the copy. In the end the tests that failed run without a fault, where they must pass: the first that does not is
`fails_anyway`. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcli.kernels.native import levels
from tests.recipes.faults.fault import Fault

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", ".venv*")
NATIVE = "kernels/native/"
PYTEST = ["-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
MOST_SECONDS = 1800  # of one run; a fault may make its tests wait for ever
NO_TESTS = 5  # pytest: all were left out
OUTCOMES = ("core", "rest", "survived", "no CPU", "error")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
CRASHED = re.compile(r'(tests/[^"]+)", line \d+ in (test_\w+)')


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    outcome: str  # "core", "rest" = killed by a test of the core, or only by another one; or another of OUTCOMES
    test: str = ""  # the test that failed; of an error, the reason


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the checkout, and how to run its tests."""

    root: Path

    @property
    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def put_in(self, fault: Fault) -> None:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        if source.count(fault.old) != 1 or fault.old == fault.new:
            raise LookupError(f"{fault.file} has the line {source.count(fault.old)} times, not once: {fault.old!r}")
        (self.root / fault.file).write_text(source.replace(fault.old, fault.new), encoding="utf-8")
        if fault.file.startswith(NATIVE):
            command = [sys.executable, "-m", "kvcli.kernels.native.build"]
            built = subprocess.run(command, cwd=self.root, env=self._environment, capture_output=True, text=True)
            if built.returncode:
                raise LookupError(f"the native library cannot be built: {built.stderr[:2000]}")

    def take_out(self, fault: Fault) -> None:
        shutil.copy2(ROOT / fault.file, self.root / fault.file)
        if fault.file.startswith(NATIVE):
            for library in (*(ROOT / NATIVE).glob("libkvcli.*"), *(ROOT / NATIVE).glob("kvcli.dll")):
                (self.root / NATIVE / library.name).unlink(missing_ok=True)  # never overwritten: see build.py
                shutil.copy2(library, self.root / NATIVE / library.name)

    def failing(self, tests: Sequence[str], *options: str) -> str:
        """Run the tests and return the first that failed, "" if none did. Raises LookupError if none could run."""
        command = [sys.executable, *PYTEST, *options, *tests]
        with subprocess.Popen(
            command, cwd=self.root, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
        ) as running:  # fmt: skip
            try:
                output, _ = running.communicate(timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                return f"no end after {MOST_SECONDS} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)  # what the tests started too
        if running.returncode < 0:
            found = CRASHED.search(output)  # what faulthandler wrote
            return f"{found[1]}::{found[2]}" if found else f"ended by signal {-running.returncode}"
        if running.returncode not in (0, 1, NO_TESTS):  # none of them may be in the core
            raise LookupError(f"pytest ends with {running.returncode}: {output[-1000:]}")
        found = FAILED.search(output)
        return (found[1] if found else output[-200:]) if running.returncode == 1 else ""


def result_of(copy: Copy, fault: Fault, core_only: bool) -> Result:
    if fault.level and fault.level not in levels():
        return Result(fault.name, "no CPU", f"runs on {fault.level} alone")
    try:
        copy.put_in(fault)
        named = fault.tests.split()
        files = list(dict.fromkeys(test.partition("::")[0] for test in named))
        for tests in ([test for test in named if "::" in test], files):
            if tests and (test := copy.failing(tests)):
                return Result(fault.name, "core", test)
        if not core_only and (test := copy.failing(files, "--whole")):
            return Result(fault.name, "rest", test)
        return Result(fault.name, "survived")
    except (LookupError, OSError) as error:
        return Result(fault.name, "error", str(error))
    finally:
        copy.take_out(fault)


def table_of_faults() -> dict[str, Fault]:
    modules = [importlib.import_module(f"{__package__}.{file.stem}") for file in sorted(HERE.glob("*.py"))
               if not file.stem.startswith("__")]  # fmt: skip
    every = [fault for module in modules for fault in getattr(module, "FAULTS", ())]
    table = {fault.name: fault for fault in every}
    assert len(table) == len(every), "two faults have one name"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.recipes.faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the faults to put in; all without one")
    parser.add_argument("--core", action="store_true", help="run the core of each fault's tests alone")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="add results to this file; leave out those in it")
    given = parser.parse_args()
    table = table_of_faults()
    if unknown := sorted(set(given.names) - set(table)):
        parser.error(f"no such fault: {', '.join(unknown)}")
    chosen = [table[name] for name in given.names or table]
    lines = given.resume.read_text(encoding="utf-8").splitlines() if given.resume and given.resume.exists() else []
    earlier = [Result(**json.loads(line)) for line in lines]
    results = {result.name: result for result in earlier if result.outcome not in ("error", "no CPU")}
    with tempfile.TemporaryDirectory(prefix="kvcli-faults-") as folder:
        copy = Copy(Path(folder, "checkout"))
        shutil.copytree(ROOT, copy.root, symlinks=True, ignore=LEFT_OUT)
        for fault in chosen:
            if fault.name not in results:
                result = results[fault.name] = result_of(copy, fault, given.core)
                print(f"{result.name:5} {result.outcome:9} {result.test}", flush=True)
                if given.resume:
                    with given.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
        shown = [results[fault.name] for fault in chosen]
        killing = sorted({result.test for result in shown if "::" in result.test})
        fails_anyway = copy.failing(killing, "--whole") if killing else ""
    print("\n| fault | outcome | file | test |\n|---|---|---|---|")
    for result in shown:
        print(f"| {result.name} | {result.outcome} | {table[result.name].file} | {result.test.partition(chr(10))[0]} |")
    names = {each: [r.name for r in shown if r.outcome == each] for each in OUTCOMES}
    print(json.dumps({"faults": len(shown), **names, "fails_anyway": fails_anyway}))
    sys.exit(1 if names["error"] or names["survived"] or fails_anyway else 0)


if __name__ == "__main__":
    main()
