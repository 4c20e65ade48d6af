"""What looking up the end of a text costs: building, searching and drafting by length of text.

python tests/bench/ngram_index.py [--files FILE,FILE]     texts to index, by default the standard library's own source
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.drafts.sources.prompt_lookup import SuffixIndex
from kvcli.methods.drafts.ngram import Ngram
from tests.bench.harness import Rows, Words, measurement, seconds

LENGTHS = (1_024, 16_384, 131_072)  # tokens
PLACES = 300  # points at which the text is searched


def measure(text: list[int], n: int) -> dict[str, float]:
    builds, undos = [], []
    for _ in range(5):
        index = SuffixIndex()
        builds.append(seconds(partial(index.extend, text[:n])))
        undos.append(seconds(partial(index.truncate, n - n // 8)))
        index.extend(text[n - n // 8 : n])
    held = index.nbytes / n
    drafter = Ngram(adaptive=False).drafter()
    drafter.start(text[:n])
    appends, searches, proposals = [], [], []
    for i in range(n, n + PLACES):
        appends.append(seconds(partial(index.extend, text[i : i + 1])))
        searches.append(seconds(index.find))
        proposals.append(seconds(partial(drafter.propose, text[: i + 1], 64)))
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


def tokens(files: Sequence[str], n: int) -> list[int]:
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


@measurement("Looking up the end of a text: microseconds by length")
def ngram_index(files: Words = ()) -> Rows:
    text = tokens(files, max(LENGTHS) + 16 * PLACES)
    for n in LENGTHS:
        yield measure(text, n)
    return {"words": len(set(text))}


if __name__ == "__main__":
    ngram_index.main()
