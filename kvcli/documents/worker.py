"""The process that parses one hostile file: bounds itself, reads, writes lines of JSON. See outside.py."""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib import import_module
from typing import IO, Any

from kvcli.documents.outside import crashed, too_heavy
from kvcli.documents.parsed import Job, Parsed, damaged
from kvcli.documents.sniff import WORDS
from kvcli.errors import BadInput, KvcliError

READERS = ("pdf", "html", "epub", "docx")


def main(arguments: list[str]) -> int:
    """Read the file behind the descriptor in the arguments, as the line on standard input says."""
    asked = json.loads(sys.stdin.buffer.readline())
    memory = int(asked.pop("memory"))
    bound(memory, int(asked.pop("cpu")))
    job = Job(**asked | {"spans": tuple((first, last) for first, last in asked["spans"])})
    try:
        with os.fdopen(int(arguments[0]), "rb") as file:
            file.seek(0)
            parsed = parse(file, job)
        for section in parsed.sections:
            tell("section", (section.number, section.label, section.text))
        tell("end", {k: getattr(parsed, k) for k in ("kind", "unit", "title", "n_pages", "without_text", "notes")})
    except MemoryError:
        tell_error(too_heavy(job, memory))
    except RecursionError:
        tell_error(damaged(job.name, WORDS.get(job.kind, "an archive (EPUB, DOCX)"), "it is nested too deeply"))
    except KvcliError as error:
        tell_error(error)
    except Exception as error:  # a parser may raise anything; the parent still says it in the user's words
        tell_error(crashed(job.name, f"its parser failed: {type(error).__name__}: {error}"[:300]))
    return 0


def parse(file: IO[bytes], job: Job) -> Parsed:
    """The sections of a file by its kind; "zip" is looked into first."""
    kind = job.kind
    if kind == "zip":
        from kvcli.documents.zipped import kind_of

        kind = kind_of(file, job.name)
    if kind not in READERS:
        raise BadInput(f"there is no reader for {kind}", code="unknown_type")
    try:
        reader = import_module(f"kvcli.documents.{kind}")
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{job.name} is {WORDS[kind]}, whose reader is not installed",
            code="missing_extra",
            lines=[f"there is no module {error.name}"],
            try_=["pip install 'kvcli[docs]'"],
        ) from None
    parsed: Parsed = reader.read(file, job)
    return parsed


def bound(memory: int, cpu: int) -> None:
    """From here on this process can take no more than that, and leaves no core file behind."""
    # a second after the soft limit, whose signal tells the parent what happened, the hard one ends what ignores it
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(what)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(what, (soft, hard))


def tell(word: str, value: Any) -> None:
    # broken halves of surrogate pairs, as odd PDF fonts give them, are no text and no UTF-8
    line = json.dumps({word: value}, ensure_ascii=False).encode("utf-8", "replace")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def tell_error(error: KvcliError) -> None:
    tell(
        "error",
        {
            "message": error.message,
            "code": error.code,
            "lines": error.lines,
            "detail": error.detail,
            "try": error.try_,
        },
    )
