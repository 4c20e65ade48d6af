"""How a model is best asked for a summary: real documents, each by the general wording and by that of wordings.toml.

    apt-get download PACKAGE...; dpkg -x ...   (or install them: the documents then lie in /usr/share)
    python tests/bench/wordings.py --model MODEL [--folder /usr/share] [--names NAME,NAME] [--cache FOLDER] [--out FILE]

The documents of FILES come from Debian packages; what is not there is left out, and its package named. Of each the
named pages, or its first characters. With a cache, answers of an earlier run are taken. Counted for each summary:

- points, words; confirmed: points on the page that they name, by the check; doubtful; uncited: points without any page
- silent: parts of which nothing is told
- told: points with five words in a row that stand in the question and not in the document
- copied: points that stand in the document word for word; loops: answers that went round in one

The summaries themselves are printed.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.chat.model import Model
from kvcli.documents import Document, document_of
from kvcli.environment import Paths
from kvcli.models.catalog import stands_for
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import Done, PartEnded
from kvcli.summarize.parts import Part
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from kvcli.summarize.result import Summary
from kvcli.summarize.run import summarize
from kvcli.summarize.wording import Wording, part_messages, wording_of
from tests.bench.harness import Rows, Words, measurement

COUNTS = ("points", "words", "confirmed", "doubtful", "uncited", "silent", "told", "copied", "loops")
MOST = 9_000  # characters of a text without pages
FILES = (  # (end of the path, its package, its pages)
    ("bashref.pdf", "bash-doc", "12-14"),
    ("libtasn1.pdf", "libtasn1-doc", "6-9"),
    ("nettle.pdf.gz", "nettle-dev", "7-10"),
    ("valgrind_manual.pdf.gz", "valgrind", "24-27"),
    ("debian-faq.en.pdf.gz", "debian-faq", "9-12"),
    ("developers-reference.pdf", "developers-reference", "11-14"),
    ("base-passwd/users-and-groups.html", "base-passwd", ""),
    ("python3/python-policy.txt.gz", "python3", ""),
    ("crc-doc.1.0.pdf.gz", "zlib1g-dev", "1-4"),
    ("zoo/doc/zoo.pdf", "r-cran-zoo", "1-4"),
    ("lmtest-intro.pdf", "r-cran-lmtest", "1-4"),
    ("philosophersimprint/sample.pdf", "texlive-publishers-doc", "1-3"),
    ("common-licenses/GPL-3", "base-files", ""),
    ("common-licenses/Artistic", "base-files", ""),
    ("common-licenses/CC0-1.0", "base-files", ""),
    ("common-licenses/MPL-2.0", "base-files", ""),
    ("dpkg/spec/triggers.txt", "dpkg-dev", ""),
    ("libpng-manual.txt.gz", "libpng16-16", ""),
    ("RelNotes/2.20.0.txt", "git", ""),
    ("examples/zlib_how.html", "zlib1g-dev", ""),
)


def documents(folder: Path, wanted: set[str]) -> Iterator[tuple[str, str, str, Document]]:
    """(name, package, pages, document), of those that are there."""
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    for end, package, pages in FILES:
        if wanted and not any(name in end for name in wanted):
            continue
        path = next((path for path in every if f"/{path}".endswith(f"/{end}")), None)
        if path is None:
            print(f"{end} is not below {folder}: left out (apt-get download {package})", file=sys.stderr)
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        name = path.name.removesuffix(".gz")
        yield end, package, pages, document_of(data if pages else data[:MOST], name, pages=pages or None)


def runs(text: str, n: int) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def measure(model: Model, document: Document, wording: Wording, cache: Cache | None = None) -> dict[str, Any]:
    """One summary and its counts."""
    request = Request()
    plan = make_plan([document], request, PlanWindow.of(model), wording)
    events = list(summarize(model, [document], request, plan=plan, cache=cache))
    summary: Summary = next(event.summary for event in events if isinstance(event, Done))
    source = " ".join(section.text for section in document.sections)
    asked = " ".join(m["content"] for m in part_messages(wording, request, Part(1, ()), document.unit))
    instructions = runs(asked, 5) - runs(source, 5)
    plain = " ".join(re.findall(r"\w+", source.lower()))
    points = [point for point in summary.points if point.kind != "heading"]
    return {
        "points": len(points),
        "words": sum(point.n_words for point in points),
        "confirmed": sum(any(cite.confirmed for cite in point.cites) for point in points),
        "doubtful": sum(bool(point.cites) and not any(cite.confirmed for cite in point.cites) for point in points),
        "uncited": sum(not point.cites for point in points),
        "silent": sum(not event.points for event in events if isinstance(event, PartEnded)),
        "told": sum(bool(runs(point.text, 5) & instructions) for point in points),
        "copied": sum(" ".join(re.findall(r"\w+", point.text.lower())) in plain for point in points),
        "loops": sum(answered.turn.finish == "loop" for answered in summary.turns),
        "summary": [point.marked for point in summary.points],
    }


@measurement(
    "{model} over real documents, asked as larger models are, and in words of its own",
    schema="kvcli.bench.wordings/1",
)
def wordings(
    model: str = "smollm2-135m",
    folder: Path = Path("/usr/share"),
    names: Annotated[Words, "parts of names"] = (),
    cache: Annotated[Path | None, "a folder that keeps the answers"] = None,
) -> Rows:
    loaded = kvcli.load(stands_for(model, Paths.of(os.environ).data), "ngram")
    answers = Cache.of(cache, loaded.info, loaded.profile) if cache else None
    ways = {"general": Wording(), "its own": wording_of(loaded.info)}
    summaries = []
    for name, package, pages, document in documents(folder, set(names)):
        sides = {side: measure(loaded, document, wording, answers) for side, wording in ways.items()}
        summaries.append(sides)
        for side, found in sides.items():
            print(f"{name} ({package}, {pages}), {side}:", *found["summary"], sep="\n- ", flush=True)
    for side in ways:
        yield {"wording": side, "n": len(summaries)} | {
            key: sum(sides[side][key] for sides in summaries) for key in COUNTS
        }


if __name__ == "__main__":
    wordings.main()
