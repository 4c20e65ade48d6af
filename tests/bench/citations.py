"""How often the checker of citations is right over generated claims, and over paraphrases of real documents.

python tests/bench/citations.py --grid --folder /usr/share --out docs/benchmarks/citations.json

`by_kind` has the kinds of which every case must come out right, and `errors` what did not: true citations that were
marked, false ones that passed. `partly` has false ones that a comparison of words cannot always find. `paraphrases` has
the true claims of tests/summarize/paraphrases.toml, and the same with plain words changed for others of the document.
Documents are those of tests/bench/wordings.py. `grid` has other shares, over generated claims of another seed and over
the documents that ENOUGH was chosen by; `paraphrases` tells those and the other documents apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Annotated, Any

import tomli

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.summarize.check import ENOUGH, Checker, Claim
from kvcli.summarize.citations import Place
from kvcli.summarize.parts import Part, pieces_of
from tests.bench.harness import Rows, measurement
from tests.bench.wordings import documents
from tests.summarize.cases import PARTLY, SURE, Case, Wanted, cases
from tests.summarize.claims import change_words

GRID = (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
PARAPHRASES = Path(__file__).parents[1] / "summarize/paraphrases.toml"
CHANGED = (1, 2)  # words


def judged(case: Case, enough: float = ENOUGH) -> tuple[Wanted, str]:
    """What becomes of the citation, and the page it names then."""
    checker = Checker(case.pages, enough=enough)
    (cite,) = checker.judge(case.claim, [Place("page", case.page)])
    return ("corrected" if cite.corrected else "confirmed" if cite.confirmed else "doubtful"), cite.place.label


def is_right(case: Case, enough: float = ENOUGH) -> bool:
    verdict, page = judged(case, enough)
    return verdict == case.wanted and page == (case.right or case.page)


def table(chosen: Iterable[Case], enough: float = ENOUGH) -> dict[str, Any]:
    """Right ones of all, by kind."""
    right, of = Counter[str](), Counter[str]()
    for case in chosen:
        of[case.kind] += 1
        right[case.kind] += is_right(case, enough)
    return {kind: {"right": right[kind], "of": of[kind]} for kind in of}


def errors(chosen: Iterable[Case], enough: float = ENOUGH) -> dict[str, int]:
    """True citations not confirmed or corrected, and false ones not doubted."""
    wrong = [case for case in chosen if not is_right(case, enough)]
    false = sum(case.wanted == "doubtful" for case in wrong)
    return {"true": len(wrong) - false, "false": false}


Texts = list[tuple[bool, Part, list[str]]]  # whether ENOUGH was chosen by it, its text, its claims


def texts(folder: Path) -> Texts:
    """The documents of the paraphrases that lie below a folder."""
    of = tomli.loads(PARAPHRASES.read_text(encoding="utf-8"))
    found = [(of[end], document) for end, _, _, document in documents(folder, set(of))]
    return [(text["is_chosen_by"], Part(1, tuple(pieces_of([document]))), text["claims"]) for text, document in found]


def paraphrases(chosen: Texts, enough: float = ENOUGH) -> dict[str, list[int]]:
    """Of true claims, and of the same with words changed: how many are confirmed by a page, of how many."""
    found: dict[str, list[int]] = {"true": [0, 0], **{f"{n} changed": [0, 0] for n in CHANGED}}
    for _, part, claims in chosen:
        checker = Checker(part.passages, enough=enough)
        for claim in claims:
            changed = {f"{n} changed": change_words(Random(claim), claim, n, part.text) for n in CHANGED}
            for kind, said in ({"true": claim} | changed).items():
                stated = Claim.of(said)
                found[kind][0] += any(checker.supports(stated, [i]) for i in range(len(checker.passages)))
                found[kind][1] += 1
    return found


@measurement(
    "Citations judged right, by kind of claim",
    schema="kvcli.bench.citations/1",
    is_counts=True,
)
def citations(
    n: Annotated[int, "cases of each kind"] = 40,
    seed: int = 1,
    grid: Annotated[bool, "also try other shares, on half as many of another seed"] = False,
    folder: Annotated[Path | None, "folder with the documents of the paraphrases"] = None,
) -> Rows:
    sure, partly = list(cases(n, seed, list(SURE))), table(cases(n, seed, list(PARTLY)))
    by_kind = table(sure)
    for kind, counts in (by_kind | partly).items():
        yield {"kind": kind, **counts}
    real = texts(folder) if folder else []
    figures = {
        "n": n,
        "seed": seed,
        "enough": ENOUGH,
        "errors": errors(sure),
        "paraphrases": {
            "chosen by": paraphrases([text for text in real if text[0]]),
            "others": paraphrases([text for text in real if not text[0]]),
        },
    }
    if grid:
        few = list(cases(max(1, n // 2), seed + 1, list(SURE)))
        figures["grid"] = [
            {
                "enough": enough,
                **errors(few, enough),
                "paraphrases": paraphrases([text for text in real if text[0]], enough),
            }
            for enough in GRID
        ]
    return figures | {"by_kind": by_kind, "partly": partly}


if __name__ == "__main__":
    citations.main()
