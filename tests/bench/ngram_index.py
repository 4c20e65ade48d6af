"""What looking up the end of a text costs: building, searching and drafting by length of text; last line JSON.

python tests/bench/ngram_index.py [FILE ...]     texts to index, by default the standard library's own source
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.drafts.sources.suffix_index import SuffixIndex
from kvcli.methods.drafts.ngram import Ngram

LENGTHS = (1_024, 16_384, 131_072)  # tokens
PLACES = 300  # points at which the text is searched


def main() -> None:
    text = tokens(sys.argv[1:], max(LENGTHS) + 16 * PLACES)
    table = []
    print("  tokens   build us/token   append us/token   bytes/token   search us   90 %   propose us   90 %   undo ms")
    for n in LENGTHS:
        row = measure(text, n)
        table.append(row)
        print(
            f"{n:8d} {row['build_us']:13.2f} {row['append_us']:17.2f} {row['bytes']:15.1f} {row['search_us']:12.0f}"
            f" {row['search_us_p90']:6.0f} {row['propose_us']:10.0f} {row['propose_us_p90']:8.0f} {row['undo_ms']:9.2f}"
        )
    print(json.dumps({"benchmark": "ngram_index", "words": len(set(text)), "rows": table}))


def measure(text: list[int], n: int) -> dict[str, float]:
    builds, undos = [], []
    for _ in range(5):
        index = SuffixIndex()
        builds.append(seconds(index.extend, text[:n]))
        undos.append(seconds(index.truncate, n - n // 8))
        index.extend(text[n - n // 8 : n])
    held = index.nbytes / n
    drafter = Ngram(adaptive=False).drafter()
    drafter.start(text[:n])
    appends, searches, proposals = [], [], []
    for i in range(n, n + PLACES):
        appends.append(seconds(index.extend, text[i : i + 1]))
        searches.append(seconds(index.find))
        proposals.append(seconds(drafter.propose, text[: i + 1], 64))
    return {
        "tokens": n,
        "build_us": min(builds) / n * 1e6,
        "append_us": median(appends) * 1e6,
        "bytes": held,
        "search_us": median(searches) * 1e6,
        "search_us_p90": quantiles(searches, n=10)[-1] * 1e6,
        "propose_us": median(proposals) * 1e6,
        "propose_us_p90": quantiles(proposals, n=10)[-1] * 1e6,
        "undo_ms": median(undos) * 1e3,
    }


def seconds(call: object, *args: object) -> float:
    start = time.perf_counter()
    call(*args)  # type: ignore[operator]
    return time.perf_counter() - start


def tokens(files: list[str], n: int) -> list[int]:
    """At least `n` words, numbered as they appear: letters, digits, blanks and single marks."""
    paths = [Path(f) for f in files] or sorted(Path(re.__file__).parents[1].glob("*.py"))
    number: dict[str, int] = {}
    text: list[int] = []
    for path in paths:
        words = re.findall(r"[A-Za-z]+|\d+|\n\s*|[^\S\n]+|[^\w\s]", path.read_text(encoding="utf-8", errors="ignore"))
        text += [number.setdefault(word, len(number)) for word in words]
        if len(text) >= n:
            return text[:n]
    raise SystemExit(f"{len(text)} words in these files, {n} are needed: name more files")


if __name__ == "__main__":
    main()
