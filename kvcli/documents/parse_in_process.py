"""Parse an untrusted format in a separate process (kvcli/worker_process.py); the parent parses nothing.

The child gets the file as an open descriptor and the job as one line of JSON on its standard input, so that no process
list shows a password. It answers in lines of JSON: one line per section, then the rest or an error.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from typing import IO, Any

from kvcli.documents.dehyphenate import unmarked
from kvcli.documents.document import Parsed, ParseJob, Section, part_of, refuse_too_much
from kvcli.errors import BadInput
from kvcli.worker_process import Limits, TooLong, TooSlow, WorkerProcess


def parse_outside(file: IO[bytes], job: ParseJob, limits: Limits | None = None) -> Parsed:
    """Return the parsed sections of an open file. Refuse with the child's error, or with the reason why it ended."""
    limits = limits or Limits()
    file.flush()
    reader = WorkerProcess("kvcli.documents.worker", limits, file.fileno())
    answer = _Answer(job)
    try:
        for line in reader.ask(json.dumps(asdict(replace(job, progress=None))).encode(), limits.wall):
            answer.take(line)
    except TooSlow:
        raise too_heavy(job, "long", f"{limits.wall:g} seconds") from None
    except TooLong:
        raise crashed(job.name, f"its parser wrote more than {limits.output / 2**20:,.0f} MiB") from None
    finally:  # the end of its output is the end of the process, or of its usefulness
        status = reader.end()
    if answer.parsed is None:
        raise _ended(status, job, limits)
    return answer.parsed


class _Answer:
    """Checked lines of the child: a compromised parser could write anything."""

    def __init__(self, job: ParseJob) -> None:
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
            elif word == "page":
                if self.job.progress is not None:
                    self.job.progress(*map(int, value))
            else:
                self.parsed = self._end(value)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise crashed(self.job.name, f"its parser answered nonsense: {error!r}"[:200]) from None

    def _section(self, number: int, label: str, text: str, is_ocr: bool = False) -> Section:
        """Return a valid section that can be cited and imitates no other; a lone surrogate is a ValueError."""
        section = Section(int(number), str(label), unmarked(str(text)), bool(is_ocr))
        section.text.encode()
        if not section.text.strip() or section.number <= (self.sections[-1].number if self.sections else 0):
            raise ValueError("a section without text, or out of order")
        if not section.label.isprintable() or not section.label or {*"[]"} & {*section.label}:
            raise ValueError("a label that no citation can hold")
        return section

    def _end(self, value: dict[str, Any]) -> Parsed:
        from pydantic import TypeAdapter  # late import: the child, which does not validate, starts sooner

        _refuse_odd(value)
        parsed = TypeAdapter(Parsed).validate_python({**value, "sections": self.sections})
        if parsed.unit == "page" and any(s.label != str(s.number) for s in self.sections):
            raise ValueError("a page under another's number")
        return parsed


def _refuse_odd(value: Any) -> None:
    """Raise a ValueError if a number is infinite or a text has a lone surrogate."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _error(value: dict[str, Any]) -> BadInput:
    _refuse_odd(value)
    return BadInput(
        str(value["message"]),
        code=str(value["code"]),
        lines=[str(line) for line in value["lines"]],
        detail=dict(value["detail"]),
        try_=[str(hint) for hint in value["try_"]],
    )


def _ended(status: int, job: ParseJob, limits: Limits) -> BadInput:
    """Return the error for a child that ended without an answer."""
    if status == -signal.SIGXCPU:
        return too_heavy(job, "long", f"{limits.cpu} seconds of processor time")
    if status < 0:
        name = signal.strsignal(-status) or f"signal {-status}"
        most = f"{limits.memory / 2**20:,.0f} MiB"
        return crashed(job.name, f"its parser was stopped ({name}): it is damaged, or needs more than {most} of memory")
    return crashed(job.name, f"its parser ended with status {status}")


def too_heavy(job: ParseJob, what: str, most: str) -> BadInput:
    return BadInput(
        f"{job.name} takes too {what} to read",
        code="document_too_heavy",
        lines=[f"more than {most}; it may be damaged, or an attack"],
        try_=[part_of(job.kind == "pdf")],
    )


def crashed(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be read", code="damaged_file", lines=[why], try_=["get the file again"])
