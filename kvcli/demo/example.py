"""The bundled example document and questions about it that the shipped model answers right. Writes report.md.

python -m kvcli.demo.example
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvcli.demo import report_path
from kvcli.demo.report import Report, write_report

SEED = 7
N_TOKENS = 4_400
FACT_SHARE = 0.35


@dataclass(frozen=True)
class Sample:
    """A question about the example and what the shipped model writes under greedy decoding."""

    skill: str
    question: str
    answer: str


SAMPLES: tuple[Sample, ...] = ()


def example_report() -> Report:
    """The example: about twenty pages, always the same."""
    return write_report(Random(SEED), N_TOKENS, FACT_SHARE)


def example_text() -> str:
    """The contents of report.md."""
    return example_report().text + "\n"


def main(path: Path | None = None) -> None:
    (path or report_path()).write_text(example_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
