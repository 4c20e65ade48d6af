"""How often the checker of citations is right over generated claims, and which shares it should ask for.

python tests/bench/citations.py --grid --out docs/benchmarks/citations.json

`by_kind` has the kinds of which every case must come out right, and `errors` what did not: true citations that were
marked, false ones that passed. `partly` has false ones that a comparison of words cannot always find.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.summarize.check import WITH_NUMBERS, WITHOUT, Checker
from kvcli.summarize.citations import Bracket, Place
from tests.bench.harness import Rows, measurement
from tests.summarize.cases import PARTLY, SURE, Case, Wanted, cases

GRID = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)


def judged(case: Case, with_numbers: float = WITH_NUMBERS, without: float = WITHOUT) -> tuple[Wanted, str]:
    """What becomes of the citation, and the page it names then."""
    checker = Checker(case.pages, with_numbers=with_numbers, without=without)
    bracket = Bracket(0, 0, (Place("page", case.page),))
    (cite,) = checker.judge(case.claim, bracket).cites
    return ("corrected" if cite.corrected else "confirmed" if cite.confirmed else "doubtful"), cite.place.label


def is_right(case: Case, with_numbers: float = WITH_NUMBERS, without: float = WITHOUT) -> bool:
    verdict, page = judged(case, with_numbers, without)
    return verdict == case.wanted and page == (case.right or case.page)


def table(chosen: Iterable[Case], with_numbers: float = WITH_NUMBERS, without: float = WITHOUT) -> dict[str, Any]:
    """Right ones of all, by kind."""
    right, of = Counter[str](), Counter[str]()
    for case in chosen:
        of[case.kind] += 1
        right[case.kind] += is_right(case, with_numbers, without)
    return {kind: {"right": right[kind], "of": of[kind]} for kind in of}


def errors(chosen: Iterable[Case], with_numbers: float = WITH_NUMBERS, without: float = WITHOUT) -> dict[str, int]:
    """True citations not confirmed or corrected, and false ones not doubted."""
    wrong = [case for case in chosen if not is_right(case, with_numbers, without)]
    false = sum(case.wanted == "doubtful" for case in wrong)
    return {"true": len(wrong) - false, "false": false}


def shares(chosen: Sequence[Case]) -> list[dict[str, float]]:
    """Errors for every pair of shares."""
    return [
        {"with_numbers": with_numbers, "without": without, **errors(chosen, with_numbers, without)}
        for with_numbers in GRID
        for without in GRID
    ]


@measurement(
    "Citations judged right, by kind of claim",
    schema="kvcli.bench.citations/1",
    is_counts=True,
)
def citations(
    n: Annotated[int, "cases of each kind"] = 40,
    seed: int = 1,
    grid: Annotated[bool, "also try other shares, on half as many of another seed"] = False,
) -> Rows:
    sure, partly = list(cases(n, seed, list(SURE))), table(cases(n, seed, list(PARTLY)))
    by_kind = table(sure)
    for kind, counts in (by_kind | partly).items():
        yield {"kind": kind, **counts}
    figures = {"n": n, "seed": seed, "with_numbers": WITH_NUMBERS, "without": WITHOUT, "errors": errors(sure)}
    more = {"grid": shares(list(cases(max(1, n // 2), seed + 1, list(SURE))))} if grid else {}
    return figures | {"by_kind": by_kind, "partly": partly} | more


if __name__ == "__main__":
    citations.main()
