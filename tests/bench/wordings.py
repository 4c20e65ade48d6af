"""How a model is best asked for a summary: real documents, each by the general wording and by that of wordings.toml.

    python tests/bench/wordings.py --model FOLDER [--folder /usr/share] [--names NAME,NAME] [--out FILE]

The documents of FILES come from Debian packages; what is not installed is left out, and that is said. Of each the named
pages, or its first characters. Counted for each summary:

- points; confirmed: citations that the check found right; doubtful; uncited: points without any
- told: points with five words in a row that stand in the question and not in the document
- copied: points that stand in the document word for word; loops: answers that went round in one

Prints a line each, then JSON on the last line, with the summaries themselves, side by side.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import kvcli  # noqa: E402
from kvcli.documents import Document, document_of  # noqa: E402
from kvcli.errors import KvcliError  # noqa: E402
from kvcli.local import Model  # noqa: E402
from kvcli.summarize.events import Done  # noqa: E402
from kvcli.summarize.plan import Window, make_plan  # noqa: E402
from kvcli.summarize.prompt import Wording, part_messages, wording_of  # noqa: E402
from kvcli.summarize.request import Request  # noqa: E402
from kvcli.summarize.result import Summary  # noqa: E402
from kvcli.summarize.run import summarize  # noqa: E402
from tests.bench.decode import machine  # noqa: E402

MOST = 9_000  # characters of a text without pages
FILES = (  # (end of the path, its pages, kind)
    ("bashref.pdf", "12-14", "manual"),
    ("libtasn1.pdf", "6-9", "manual"),
    ("nettle.pdf.gz", "7-10", "manual"),
    ("valgrind_manual.pdf", "24-27", "manual"),
    ("debian-faq.en.pdf.gz", "9-12", "manual"),
    ("developers-reference.pdf", "11-14", "manual"),
    ("base-passwd/users-and-groups.html", "", "manual"),
    ("python3/python-policy.html", "", "manual"),
    ("crc-doc.1.0.pdf.gz", "1-4", "paper"),
    ("apa7/samples/longsample.pdf", "1-5", "paper"),
    ("quantumarticle/quantum-template.pdf", "1-3", "paper"),
    ("philosophersimprint/sample.pdf", "1-3", "paper"),
    ("common-licenses/GPL-3", "", "licence"),
    ("common-licenses/Artistic", "", "licence"),
    ("common-licenses/CC0-1.0", "", "licence"),
    ("common-licenses/MPL-2.0", "", "licence"),
    ("dpkg/spec/triggers.txt", "", "specification"),
    ("libpng-manual.txt.gz", "", "specification"),
    ("RelNotes/2.20.0.txt", "", "notes"),
    ("examples/zlib_how.html", "", "article"),
)


def documents(folder: Path, wanted: set[str]) -> Iterator[tuple[str, str, Document]]:
    """(name, kind, document), of those that are there."""
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    for end, pages, kind in FILES:
        if wanted and not any(name in end for name in wanted):
            continue
        path = next((path for path in every if f"/{path}".endswith(f"/{end}")), None)
        if path is None:
            print(f"{end} is not below {folder}: left out", file=sys.stderr)
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        name = path.name.removesuffix(".gz")
        yield end, kind, document_of(data if pages else data[:MOST], name, pages=pages or None)


def runs(text: str, n: int) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def measure(model: Model, document: Document, wording: Wording) -> dict[str, Any]:
    """One summary and its counts."""
    request, began = Request(), time.perf_counter()
    plan = make_plan([document], request, Window.of(model), wording)
    summary: Summary = next(e.summary for e in summarize(model, [document], request, plan=plan) if isinstance(e, Done))
    source = " ".join(section.text for section in document.sections)
    asked = " ".join(m["content"] for m in part_messages(wording, request, "", document.unit))
    instructions = runs(asked, 5) - runs(source, 5)
    plain = " ".join(re.findall(r"\w+", source.lower()))
    points = [point for point in summary.points if point.kind != "heading"]
    return {
        "points": len(points),
        "confirmed": sum(any(cite.confirmed for cite in point.cites) for point in points),
        "doubtful": sum(bool(point.cites) and not any(cite.confirmed for cite in point.cites) for point in points),
        "uncited": sum(not point.cites for point in points),
        "told": sum(bool(runs(point.text, 5) & instructions) for point in points),
        "copied": sum(" ".join(re.findall(r"\w+", point.text.lower())) in plain for point in points),
        "loops": sum(answered.turn.finish == "loop" for answered in summary.turns),
        "seconds": round(time.perf_counter() - began, 1),
        "summary": [point.marked for point in summary.points],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, default=Path("/usr/share"))
    parser.add_argument("--names", default="", help="parts of names, with commas between")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = kvcli.load(args.model, "ngram")
    wordings = {"general": Wording(), "own": wording_of(model.info)}
    rows = []
    for name, kind, document in documents(args.folder, {n for n in args.names.split(",") if n}):
        for side, wording in wordings.items():
            try:
                found = measure(model, document, wording)
            except KvcliError as error:
                print(f"{name}, {side}: {error}", file=sys.stderr)
                continue
            rows.append({"document": name, "kind": kind, "wording": side, **found})
            counts = "  ".join(f"{key} {value}" for key, value in found.items() if key != "summary")
            print(f"{name:<36} {side:<8} {counts}", flush=True)
    keys = ("points", "confirmed", "doubtful", "uncited", "told", "copied", "loops")
    totals = {side: {key: sum(r[key] for r in rows if r["wording"] == side) for key in keys} for side in wordings}
    result = {"model": model.info.id, "environment": machine(), "totals": totals, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
