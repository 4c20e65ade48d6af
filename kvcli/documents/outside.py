"""Read a hostile format in a process of its own, with memory, time and output bounded; the parent parses nothing.

The child gets the file as an open descriptor and the job as one line of JSON on its standard input, so a password
stands in no list of processes. It answers in lines of JSON: a section each, then the rest or an error.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from kvcli.documents.document import SIGNS, Section, Unit
from kvcli.documents.parsed import Job, Parsed, part_of, refuse_too_much
from kvcli.documents.repair import unmarked
from kvcli.errors import BadInput

# Where to import from is told by the parent: the child must run the same kvcli and the same parsers, and must not look
# into the folder it was started in. Without the site module it starts sooner.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvcli.documents.worker import main; sys.exit(main(sys.argv[2:]))"
)
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the process that parses."""

    memory: int = 1 << 30  # bytes of address space
    cpu: int = 40  # seconds
    wall: float = 120.0  # seconds
    output: int = 1 << 28  # bytes of JSON


def parse_outside(file: IO[bytes], job: Job, limits: Limits | None = None) -> Parsed:
    """The sections of an open file. Refuses, in the words of the child or for what ended it."""
    limits = limits or Limits()
    file.flush()
    asked = asdict(job) | {"memory": limits.memory, "cpu": limits.cpu}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BOOT, json.dumps(_path()), str(file.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[file.fileno()],
        start_new_session=True,  # a group to kill, and Ctrl-C stays with the parent
    )
    answer = _Answer(job)
    try:
        assert process.stdin
        with suppress(BrokenPipeError):  # a child that died says why below
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.close()
        for line in _lines(process, limits, job):
            answer.take(line)
    finally:  # an end of its output is the end of the process, or of its usefulness
        _kill(process)
    if answer.parsed is None:
        raise _ended(process, answer, job, limits)
    return answer.parsed


class _Answer:
    """The child's lines, checked: a parser that was taken over could write anything."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sections: list[Section] = []
        self.characters = 0
        self.parsed: Parsed | None = None

    def take(self, line: bytes) -> None:
        try:
            ((word, value),) = json.loads(line).items()
            if word == "section":
                self.sections.append(self._section(*value))
                self.characters += len(self.sections[-1].text)
                refuse_too_much(self.job.name, self.characters, len(self.sections), paged=self.job.kind == "pdf")
            elif word == "error":
                raise _error(value)
            else:
                self.parsed = self._end(value)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise crashed(self.job.name, f"its parser answered nonsense: {error!r}"[:200]) from None

    def _section(self, number: int, label: str, text: str) -> Section:
        """A section that can be cited and passes for no other; half a pair of surrogates is a ValueError."""
        section = Section(int(number), str(label), unmarked(str(text)))
        section.text.encode()
        if not section.text.strip() or section.number <= (self.sections[-1].number if self.sections else 0):
            raise ValueError("a section without text, or out of order")
        if not section.label.isprintable() or not section.label or {*"[]"} & {*section.label}:
            raise ValueError("a label that no citation can hold")
        return section

    def _end(self, value: dict[str, Any]) -> Parsed:
        _refuse_odd(value)
        if value["unit"] not in SIGNS:
            raise ValueError(value["unit"])
        if value["unit"] == "page" and any(s.label != str(s.number) for s in self.sections):
            raise ValueError("a page under another's number")
        return Parsed(
            kind=str(value["kind"]),
            unit=cast(Unit, value["unit"]),
            sections=self.sections,
            title=None if value["title"] is None else str(value["title"]),
            n_pages=None if value["n_pages"] is None else int(value["n_pages"]),
            without_text=[int(n) for n in value["without_text"]],
            notes=[str(note) for note in value["notes"]],
        )


def _refuse_odd(value: Any) -> None:
    """A ValueError where a number is infinite or a text holds half a pair of surrogates."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _error(value: dict[str, Any]) -> BadInput:
    _refuse_odd(value)
    return BadInput(
        str(value["message"]),
        code=str(value["code"]),
        lines=[str(line) for line in value["lines"]],
        detail=dict(value["detail"]),
        try_=[str(hint) for hint in value["try"]],
    )


def _lines(process: subprocess.Popen[bytes], limits: Limits, job: Job) -> Iterator[bytes]:
    """Whole lines of the child's answer until it ends; refuses an answer that is too long or comes too late."""
    assert process.stdout
    deadline, held, seen = time.monotonic() + limits.wall, list[bytes](), 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise too_slow(job, f"more than {limits.wall:g} seconds")
            if not ready:
                continue
            data = os.read(process.stdout.fileno(), CHUNK)
            if not data:
                return
            seen += len(data)
            if seen > limits.output:
                raise crashed(job.name, f"its parser wrote more than {limits.output / 2**20:,.0f} MiB")
            held.append(data)
            if b"\n" in data:
                *lines, rest = b"".join(held).split(b"\n")
                held = [rest]
                yield from lines


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(BrokenPipeError):
                stream.close()


def _ended(process: subprocess.Popen[bytes], answer: _Answer, job: Job, limits: Limits) -> BadInput:
    """Why there is no answer."""
    if process.returncode == -signal.SIGXCPU:
        return too_slow(job, f"more than {limits.cpu} seconds of processor time")
    if process.returncode < 0:
        name = signal.strsignal(-process.returncode) or f"signal {-process.returncode}"
        most = f"{limits.memory / 2**20:,.0f} MiB"
        return crashed(job.name, f"its parser broke off ({name}): it is damaged, or needs more than {most} of memory")
    return crashed(job.name, f"its parser ended with status {process.returncode}")


def too_slow(job: Job, why: str) -> BadInput:
    return BadInput(
        f"{job.name} takes too long to read",
        code="document_too_heavy",
        lines=[f"{why}; it may be damaged, or made to keep a reader busy"],
        try_=[part_of(job.kind == "pdf")],
    )


def too_heavy(job: Job, memory: int) -> BadInput:
    return BadInput(
        f"{job.name} takes too much memory to read",
        code="document_too_heavy",
        lines=[f"more than {memory / 2**20:,.0f} MiB; it may be damaged, or made to fill memory"],
        try_=[part_of(job.kind == "pdf")],
    )


def crashed(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be read", code="damaged_file", lines=[why], try_=["get the file again"])


def _path() -> list[str]:
    """Where this process imports from, without the folder it happens to be in."""
    root = str(Path(__file__).resolve().parents[2])
    return [root, *(entry for entry in sys.path if entry and entry != root)]
