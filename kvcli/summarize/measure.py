"""How often the checker of citations is right over generated claims, and which shares it should ask for.

python -m kvcli.summarize.measure --n 40 --grid > docs/benchmarks/citations.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvcli.summarize.cases import Case, Wanted, cases
from kvcli.summarize.check import WITH_NUMBERS, WITHOUT, Checker
from kvcli.summarize.cites import Bracket, Place

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


def table(chosen: Iterable[Case], with_numbers: float = WITH_NUMBERS, without: float = WITHOUT) -> dict[str, object]:
    """Right ones of all, by kind."""
    right, of = Counter[str](), Counter[str]()
    for case in chosen:
        of[case.kind] += 1
        right[case.kind] += is_right(case, with_numbers, without)
    return {kind: {"right": right[kind], "of": of[kind]} for kind in of}


def grid(chosen: Sequence[Case]) -> list[dict[str, float]]:
    """Errors for every pair of shares: true citations not confirmed or corrected, and false ones not doubted."""
    found = []
    for with_numbers in GRID:
        for without in GRID:
            wrong = [case for case in chosen if not is_right(case, with_numbers, without)]
            false = sum(case.wanted == "doubtful" for case in wrong)
            found.append({"with_numbers": with_numbers, "without": without, "true": len(wrong) - false, "false": false})
    return found


def main(arguments: Sequence[str] | None = None, out: Callable[[str], object] = sys.stdout.write) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvcli.summarize.measure", description=__doc__)
    parser.add_argument("--n", type=int, default=40, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--grid", action="store_true", help="also try other shares, on half as many cases of another seed"
    )
    options = parser.parse_args(arguments)
    found: dict[str, object] = {
        "schema": "kvcli.citations/1",
        "n": options.n,
        "seed": options.seed,
        "with_numbers": WITH_NUMBERS,
        "without": WITHOUT,
        "by_kind": table(cases(options.n, options.seed)),
    }
    if options.grid:
        found["grid"] = grid(list(cases(max(1, options.n // 2), options.seed + 1)))
    out(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
