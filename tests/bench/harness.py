"""The harness of all measurements: command line, machine header, turns of sides, resume, table, and JSON.

A measurement is a function whose parameters are the options of its command line. It yields rows, and may return further
figures of the result:

    @measurement("Passes of {rows} rows, by context")
    def growth(contexts: Ints = (1024, 4096), rows: int = 8, reps: Annotated[int, "repetitions"] = 9) -> Rows:
        for context in contexts:
            yield {"context": context, "ms": spread(...)}

    if __name__ == "__main__":
        growth.main()

Lists are typed with commas between (`--contexts 512,4096`). Every measurement also takes `--out FILE` for its JSON, and
`--resume FILE`, which keeps the results of `once`, so that an interrupted run continues. Rows are printed as a table
while they come; the JSON stands on the last line. A checkout without built native kernels is refused, because torch
would be measured in their place.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from kvcli.bench.run import refuse_unbuilt
from kvcli.errors import KvcliError
from kvcli.kernels.native import native, why_not
from kvcli.models.machine import cpu_name, installed

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")
Row = dict[str, Any]
Rows = Generator[Row, None, dict[str, Any] | None]
Ints, Floats, Words = tuple[int, ...], tuple[float, ...], tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """A measurement, which `main` runs as a program. Braces in `title` and `note` are filled with its parameters."""

    function: Callable[..., Rows]
    title: str
    schema: str
    columns: Sequence[str]  # of the table in the docs; by default all of the first row
    note: str
    is_counts: bool  # the figures do not depend on the machine, so only versions and the commit are recorded
    is_right: Callable[[list[Row]], bool]  # whether the program ends with 0

    def main(self, words: Sequence[str] | None = None) -> None:
        """Parse the command line, measure, print and write the result, and end the process."""
        global _known
        asked = vars(self.parser().parse_args(words))
        out, partial = asked.pop("out"), asked.pop("resume")
        before = machine(asked.get("device", "cpu"))
        _known = Known(partial) if partial else None
        rows: list[Row] = []
        try:
            more = self._measure(asked, rows)
        except KeyboardInterrupt:
            if partial:
                print(f"to continue: {self.command(asked)} --resume {partial}", file=sys.stderr)
            raise
        result = self.result(asked, before, rows, more)
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result))
        sys.exit(not self.is_right(rows))

    def _measure(self, asked: Mapping[str, Any], rows: list[Row]) -> dict[str, Any]:
        """Collect and print the rows; return the further figures."""
        coming, widths = self.function(**asked), dict[str, int]()
        while True:
            try:
                row = next(coming)
            except StopIteration as end:
                return dict(end.value or {})
            rows.append(row)
            cells = {name: cell(row[name]) for name in self.columns or row if name in row}
            if [*cells] != [*widths]:
                widths = {name: max(len(name), len(text) + 2) for name, text in cells.items()}
                print(_line(widths, cells))
            print(_line(widths, cells.values()), flush=True)

    def result(
        self, asked: Mapping[str, Any], before: dict[str, Any], rows: list[Row], more: dict[str, Any]
    ) -> dict[str, Any]:
        """The JSON document that docs/generate.py prints."""
        environment = before | {"threads": torch.get_num_threads()} | _ran
        if self.is_counts:
            environment = {name: environment[name] for name in ("torch", "transformers", "commit")}
        words = {name: ", ".join(map(str, x)) if isinstance(x, tuple) else x for name, x in asked.items()}
        said = {"schema": self.schema, "title": self.title.format(**words), "command": self.command(asked)}
        said |= {"environment": environment, "columns": [*self.columns], "note": self.note.format(**words)}
        return {name: value for name, value in said.items() if value} | {"rows": rows} | more

    def command(self, asked: Mapping[str, Any]) -> str:
        """The command line that measures this again: the options that are not the usual ones."""
        words = ["python", Path(inspect.getfile(self.function)).relative_to(ROOT).as_posix()]
        for name, parameter in inspect.signature(self.function).parameters.items():
            value, flag = asked[name], name.replace("_", "-")
            if isinstance(value, bool):
                words += [f"--{flag}" if value else f"--no-{flag}"] if value != parameter.default else []
            elif value != parameter.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += [f"--{flag}", f"'{text}'" if " " in text or not text else text]
        return " ".join(words)

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=sys.modules[self.function.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind, about = hints[name], ""
            if get_origin(kind) is Annotated:
                kind, about = get_args(kind)
            usual, flag = parameter.default, f"--{name.replace('_', '-')}"
            if kind is bool:
                action = argparse.BooleanOptionalAction if usual else "store_true"
                parser.add_argument(flag, action=action, default=usual, help=about)
            elif get_origin(kind) is Literal:
                parser.add_argument(flag, choices=get_args(kind), default=usual, help=about)
            else:
                parser.add_argument(flag, type=_reader(kind), default=usual, help=f"{about} (default: {usual})")
        parser.add_argument("--resume", type=Path, metavar="FILE", help="results so far; an interrupted run continues")
        parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON is written")
        return parser


def measurement(
    title: str = "",
    *,
    schema: str = "",
    columns: Iterable[str] = (),
    note: str = "",
    is_counts: bool = False,
    is_right: Callable[[list[Row]], bool] = lambda rows: True,
) -> Callable[[Callable[..., Rows]], Measurement]:
    """Make a measurement of a function. `title` and `note` are printed above and below its table in the docs."""
    return lambda function: Measurement(function, title, schema, tuple(columns), note, is_counts, is_right)


def is_unbroken(rows: list[Row]) -> bool:
    """Whether a stress test found nothing bad."""
    return not any(row["bad"] for row in rows)


def _reader(kind: Any) -> Callable[[str], Any]:
    """Parser of an option's text: of a tuple item by item, of `X | None` as X."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return lambda text: tuple(item(word.strip()) for word in text.split(",") if word.strip())
    return next(iter(get_args(kind)), kind)


def picked(asked: Sequence[str], known: Iterable[str]) -> list[str]:
    """The names asked for. An unknown name ends the program."""
    known = list(known)
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    return list(asked)


# ---- machine ----

_ran: dict[str, str] = {}  # what `ran` heard of the model


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, versions, commit, load, and the backend: level of the native kernels, torch, or the card.

    Ends the program in a checkout without built native kernels, and says how to build them.
    """
    try:
        refuse_unbuilt()
    except KvcliError as error:
        sys.exit(
            "\n".join(
                [f"error: {error.message}", *(f"  {x}" for x in error.lines), *map("  try: {}".format, error.try_)]
            )
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "backend": backend(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "commit": commit.strip(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def backend(device: str = "cpu") -> str:
    """What computes: a card by its name, the native kernels by their level, or torch with the reason."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    found = native()
    return f"native {found.level}" if found else f"torch: {why_not()}"


def ran(lm: Any) -> Any:
    """Record how the layers of this model run, and return the model."""
    _ran["layers"] = lm.info.backend
    return lm


# ---- turns ----


def seconds(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(sides: Mapping[str, Callable[[], T]], reps: int, warmup: int = 1) -> dict[str, list[T]]:
    """Results of each side in `reps` repetitions, after warm-ups that are dropped. Each time another side begins."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for rep in range(warmup + reps):
        first = rep % len(sides)
        for name in [*sides][first:] + [*sides][:first]:
            result = sides[name]()
            if rep >= warmup:
                found[name].append(result)
    return found


def spread(values: Iterable[float], digits: int = 5) -> list[float]:
    """Least, median, most."""
    values = list(values)
    return [round(x, digits) for x in (min(values), statistics.median(values), max(values))]


def quotients(over: Iterable[float], under: Iterable[float], digits: int = 5) -> list[float]:
    """Spread of quotients, repetition by repetition: how many times as fast `under` is as `over`, of seconds."""
    return spread((a / b for a, b in zip(over, under, strict=True)), digits)


def alone(function: Callable[..., T], *args: object) -> T:
    """Result of a function in a process of its own, which loads nothing else. Ends the program if that fails."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_send, args=(there, function, args))
    process.start()
    there.close()  # a child that dies ends the wait
    try:
        result: T = here.recv()
    except EOFError:
        sys.exit(f"{function.__name__} failed in its process; the error stands above")
    finally:
        process.join()
    return result


def _send(pipe: Any, function: Callable[..., object], args: Sequence[object]) -> None:
    pipe.send(function(*args))


# ---- resume ----


class Known:
    """Results so far: one line of JSON each, on disk."""

    def __init__(self, path: Path) -> None:
        self.path, self._found = path, dict[str, Any]()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                key, result = json.loads(line)
            except ValueError:  # interrupted while the line was written
                continue
            self._found[key] = result

    def of(self, key: str, make: Callable[[], T]) -> T:
        """The stored result of this key, or else the new one of `make`."""
        if key not in self._found:
            self._found[key] = make()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        found: T = self._found[key]
        return found


_known: Known | None = None  # of `--resume FILE`
_owner = ""


def belongs_to(key: str) -> None:
    """From here on, results of `once` are those of this key alone, such as a model and the length of a text."""
    global _owner
    _owner = f"{key} "


def once(key: str, make: Callable[[], T]) -> T:
    """Result of `make`, which is JSON. With `--resume FILE` it is computed once for this key, over several runs."""
    return _known.of(_owner + key, make) if _known else make()


# ---- table ----


def cell(value: object) -> str:
    """A figure of the table; of a spread the median, with least and most in brackets."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case [low, middle, high] if all(isinstance(x, int | float) for x in value):
            return f"{cell(middle)} ({cell(low)}–{cell(high)})"
        case dict():
            return " / ".join(map(cell, value.values()))
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}"
    return str(value)


def _line(widths: Mapping[str, int], cells: Iterable[str]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths.values(), strict=True)).rstrip()
