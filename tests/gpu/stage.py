"""What a stage is, and the process that some run in: `python -m tests.gpu.stage NAME:SHARE,.. DEVICE SECONDS FILE`.

A stage is a module of this folder with a function `run`, which yields rows as it finds them. Each row is appended to
FILE as a line of JSON at once, so that what was found stays when the process hangs or dies.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

Row = dict[str, Any]


@dataclass(frozen=True)
class On:
    """Where a stage runs, and for how long."""

    device: str  # as torch names it; on a CPU everything is tiny, and figures mean nothing
    seconds: float  # after which it is ended, and its process with it
    began: float = field(default_factory=time.monotonic)

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def left(self) -> float:
        """Seconds, less a few for what is under way."""
        return 0.95 * self.seconds - (time.monotonic() - self.began)


def interpret_on_a_cpu(on: On) -> None:
    """Have fused kernels run in Triton's interpreter, where there is no GPU; before one is imported."""
    if on.is_tiny:
        with suppress(ImportError):  # no Triton: the ops are not here
            import_module("tests.kernels.interpreted")


class Stage(Protocol):
    """One file of this folder."""

    def run(self, on: On) -> Iterator[Row]:
        """Rows; `says` of the last one is printed."""


def stage_of(name: str) -> Stage:
    """The stage of that name; raises ImportError where a package is missing."""
    return cast(Stage, import_module(f"tests.gpu.{name}"))


def why(error: BaseException) -> str:
    """The exception's class, its first line, and where it was raised."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]} ({Path(at.filename).name}:{at.lineno})"


def stand_in() -> None:
    """Python's own reader of TOML where tomli is missing: the same one, whose errors name no line."""
    try:
        import tomli  # noqa: F401
    except ImportError:
        sys.modules["tomli"] = tomllib


def main(stages: str, device: str, seconds: str, file: str) -> None:
    """One stage after another, each with its share of the seconds that are left."""
    shares = {name: float(share) for name, share in (one.split(":") for one in stages.split(","))}
    until = time.monotonic() + float(seconds)
    with open(file, "w", encoding="utf-8", buffering=1) as out:

        def put(kind: str, value: object) -> None:
            out.write(json.dumps({kind: value}, default=str) + "\n")

        stand_in()
        for name in list(shares):
            each = (until - time.monotonic()) * shares[name] / sum(shares.values())
            del shares[name]
            put("begin", [each, os.fstat(sys.stderr.fileno()).st_size])  # and where begins what it says
            try:
                for row in stage_of(name).run(On(device, each)):
                    put("row", row)
            except ImportError as error:
                put("end", ["missing", why(error)])
            except BaseException as error:
                traceback.print_exc()
                put("end", ["failed", why(error)])
            else:
                put("end", ["done", ""])
            gc.collect()
            if "torch" in sys.modules and device != "cpu":
                sys.modules["torch"].cuda.empty_cache()  # for the next one


if __name__ == "__main__":
    main(*sys.argv[1:])
