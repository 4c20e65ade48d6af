"""Worker process that parses one untrusted file: enter a sandbox, read, write JSON lines. See parse_in_process.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from typing import IO, Any

from kvcli.documents.archives import kind_of
from kvcli.documents.decode import WORDS
from kvcli.documents.document import Parsed, ParseJob, damaged, refuse_pages
from kvcli.documents.parse_in_process import crashed, too_heavy
from kvcli.documents.reading_order import LinePiece
from kvcli.errors import BadInput, KvcliError
from kvcli.installing import EXTRAS, pip
from kvcli.sandbox import enter_sandbox, preload, set_limits

READERS = {kind: kind for kind in ("pdf", "epub", "docx", "mail", "notebook")} | {"html": "markup", "mhtml": "mail"}


def main(parent: int, limits: dict[str, Any], descriptor: int) -> int:
    """Read the file behind the descriptor, as the job on standard input asks."""
    set_limits(parent, limits)
    asked = json.loads(sys.stdin.buffer.readline())
    spans = tuple((first, last) for first, last in asked["spans"])
    known = {int(page): [LinePiece(**line) for line in lines] for page, lines in asked["known"].items()}
    job = ParseJob(**asked | {"spans": spans, "known": known, "progress": lambda *page: tell("page", page)})
    try:
        with os.fdopen(descriptor, "rb") as file:
            missing = prepare(job)
            enter_sandbox()
            file.seek(0)
            parsed = parse(file, job, missing)
        for section in parsed.sections:
            tell("section", (section.number, section.label, section.text, section.is_ocr))
        tell("end", asdict(replace(parsed, sections=[])))
    except MemoryError:
        tell_error(too_heavy(job, "much memory", f"{limits['memory'] / 2**20:,.0f} MiB"))
    except RecursionError:
        tell_error(damaged(job.name, WORDS.get(job.kind, "an archive (EPUB, DOCX)"), "it is nested too deeply"))
    except KvcliError as error:
        tell_error(error)
    except Exception as error:  # a parser may raise anything; the parent still reports it in the user's words
        last = str(error).strip().rpartition("\n")[2]  # onnxruntime puts a whole traceback before it
        tell_error(crashed(job.name, f"its parser failed: {type(error).__name__}: {last}"[:300]))
    return 0


def prepare(job: ParseJob) -> dict[str, str]:
    """Import all modules that the reader may need, as later opens fail. Return reader -> missing module."""
    missing = {}
    readers = ("epub", "docx") if job.kind == "zip" else [job.kind] if job.kind in READERS else []
    for reader in (*readers, *(["ocr"] if job.recognizes else [])):
        try:
            import_module(f"kvcli.documents.{READERS.get(reader, reader)}")
        except ModuleNotFoundError as error:
            missing[reader] = str(error.name)
    preload("encodings")
    return missing


def parse(file: IO[bytes], job: ParseJob, missing: Mapping[str, str] | None = None) -> Parsed:
    """Return the sections of a file by its kind; "zip" is inspected first."""
    kind = kind_of(file, job.name) if job.kind == "zip" else job.kind
    if kind not in READERS:
        raise BadInput(f"there is no reader for {kind}", code="unknown_type")
    reader = next((one for one in (kind, "ocr") if missing and one in missing), None)
    if missing and reader is not None:
        raise BadInput(
            f"{job.name} is {WORDS[kind]}, and a package that reads it is not installed",
            code="missing_extra",
            lines=[f"there is no module {missing[reader]}"],
            try_=[pip(*EXTRAS["ocr" if reader == "ocr" else "docs"])],
        )
    if kind != "pdf":
        refuse_pages(job.name, job.spans, f"it is {WORDS[kind]}")
    parsed: Parsed = import_module(f"kvcli.documents.{READERS[kind]}").read(file, replace(job, kind=kind))
    return parsed


def tell(word: str, value: Any) -> None:
    # lone surrogates, which odd PDF fonts produce, cannot be encoded as UTF-8
    line = json.dumps({word: value}, ensure_ascii=False).encode("utf-8", "replace")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def tell_error(error: KvcliError) -> None:
    tell("error", {k: getattr(error, k) for k in ("message", "code", "lines", "detail", "try_")})
