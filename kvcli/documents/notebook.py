"""Jupyter notebook reader: its texts, code and printed output as markdown, without pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from kvcli.documents.document import Parsed, ParseJob, damaged
from kvcli.documents.markdown import headed_markdown
from kvcli.documents.plain import headed_text

PACKED = re.compile(r"data:[\w/+.-]{1,80};base64,[A-Za-z0-9+/=]*")  # a picture within the text
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return sections under the headings of its texts, or blocks of lines."""
    try:
        book = json.loads(file.read())
        cells = book["cells"] if "cells" in book else [cell for sheet in book["worksheets"] for cell in sheet["cells"]]
        text = "\n\n".join(part for cell in cells for part in _parts(cell) if part.strip())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(job.name, "a notebook", f"{type(error).__name__}: {error}"[:200]) from None
    return headed_text(job, headed_markdown(PACKED.sub("(picture)", text)), "its cells are empty")


def _parts(cell: Any) -> Iterator[str]:
    source = _joined(cell.get("source", cell.get("input", "")))
    if cell["cell_type"] != "code":
        yield "#" * int(cell.get("level", 0)) + f" {source}" if cell["cell_type"] == "heading" else source
        return
    number = cell.get("execution_count", cell.get("prompt_number"))
    yield f"In [{number if number is not None else ' '}]:\n{_fenced(source)}" if source.strip() else ""
    for output in cell.get("outputs", []):
        shown = output.get("data", output)
        text = _joined(shown.get("text/markdown", shown.get("text/plain", shown.get("text", ""))))
        if output.get("output_type") in ("error", "pyerr"):
            text = f"{output.get('ename')}: {output.get('evalue')}"
        yield _fenced(COLOURS.sub("", text)) if text.strip() else ""


def _joined(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _fenced(text: str) -> str:
    """Put text in a fence longer than any fence in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text.strip(chr(10))}\n{fence}"
