"""History of benchmark results: one file per saved benchmark, listed as a trend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from kvcli.errors import BadInput, reading
from kvcli.files import private_folder, write_private
from kvcli.schemas.bench import BenchArgs, BenchDocument, BenchHistoryDocument, HistoryEntry

Note = Callable[[str], None]


def save(folder: Path, document: BenchDocument) -> Path:
    """Write a new file below `folder`, readable by its owner only; never replaces one."""
    private_folder(folder)
    stamp = re.sub(r"[^0-9T]", "", document.env.date[:19])
    stem = f"{stamp}-{re.sub(r'[^A-Za-z0-9.]+', '-', document.model.id).strip('-')[-40:]}"
    path, n = folder / f"{stem}.json", 2
    while path.exists():
        path, n = folder / f"{stem}-{n}.json", n + 1
    write_private(path, json.dumps(document.document(), ensure_ascii=False) + "\n")
    return path


def read(path: Path) -> BenchDocument:
    """Read one result file. Raises BadInput that names the first mistake."""
    make = "kvcli bench --format json -o FILE.json"
    try:
        with reading(path, try_=[make]):
            return BenchDocument.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise BadInput(
            f"{path.name} is no result of kvcli bench",
            code="bad_result",
            lines=[f"{where}: {first['msg']}"],
            try_=[make],
        ) from None


def history(folder: Path, model: str, ctx: Sequence[int], workloads: Sequence[str], note: Note) -> BenchHistoryDocument:
    """List saved rows of a model, oldest first; empty `ctx` or `workloads` mean all. `note` gets unreadable files."""
    entries = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = read(path)
        except BadInput as error:
            note(f"{error.message}: {'; '.join(error.lines)}" if error.lines else error.message)
            continue
        if document.model.id == model:
            entries += [e for e in _entries(document, path.name) if _wanted(e, ctx, workloads)]
    entries.sort(key=lambda entry: entry.date)
    return BenchHistoryDocument(model=model, entries=entries)


def _wanted(entry: HistoryEntry, ctx: Sequence[int], workloads: Sequence[str]) -> bool:
    return (not ctx or entry.ctx in ctx) and (not workloads or entry.workload in workloads)


def _unusual(args: BenchArgs) -> str:
    return f", temperature {args.temperature:g}" * bool(args.temperature) + f", {args.batch} texts" * (args.batch > 1)


def _entries(document: BenchDocument, file: str) -> Iterator[HistoryEntry]:
    for row in document.rows:
        ratio = row.ratio.tok_s
        yield HistoryEntry.from_attributes(
            row,
            document.env,
            document,
            profile=row.profile + _unusual(document.args),
            tok_s=row.median.tok_s,
            first_token=row.median.first_token,
            ratio=ratio.median if ratio else None,
            verdict=ratio.verdict if ratio else None,
            same=row.same.share if row.same else None,
            file=file,
        )
