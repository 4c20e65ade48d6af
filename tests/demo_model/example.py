"""The bundled example document and questions about it that the shipped model answers right. Writes report.md.

python -m tests.demo_model.example
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


SAMPLES: tuple[Sample, ...] = (
    Sample(
        "lookup",
        "What is the stock of depot Gimness?",
        "The stock of depot Gimness is 59 boxes of oil.",
    ),
    Sample(
        "lookup",
        "What is the depth of well Volras?",
        "The depth of well Volras is 256 metres.",
    ),
    Sample(
        "lookup",
        "What is the badge number of surveyor Mela Tremini?",
        "The badge number of surveyor Mela Tremini is 6834.",
    ),
    Sample(
        "finding",
        "What is the main finding of section 4?",
        "Main finding of section 4: the dusty barn at Skendale drifted for two hours [p. 7].",
    ),
    Sample(
        "summary",
        "Summarise the main findings.",
        (
            "- Main finding of section 1: the hidden bridge at Gannau improved on the second day [p. "
            "1].\n"
            "- Main finding of section 2: the cold pump at Hundale recovered without delay [p. "
            "3].\n"
            "- Main finding of section 3: the rusted path at Runholt collapsed after the thaw [p. "
            "5].\n"
            "- Main finding of section 4: the dusty barn at Skendale drifted for two hours [p. "
            "7].\n"
            "- Main finding of section 5: the stone tower at Stultov shifted at low tide [p. "
            "8].\n"
            "- Main finding of section 6: the bright shelter at Dirheim leaked at noon [p. "
            "10].\n"
            "- Main finding of section 7: the northern valve at Hanby flooded in early spring [p. "
            "13].\n"
            "- Main finding of section 8: the slow mast at Kuntov narrowed after the thaw [p. "
            "15].\n"
            "- Main finding of section 9, the last: the minor stream at Branbek stopped before dawn [p. "
            "17]."
        ),
    ),
    Sample(
        "rewrite",
        "Rewrite field note 3 and replace Fovmere by Gremrum.",
        (
            "Field note 3: The heavy ladder at Gremrum improved at low tide. "
            "We counted 84 metres of filter because the iron tower sank. "
            "The upper channel widened while Grushin Demquist inspected the shelter."
        ),
    ),
    Sample(
        "repeat",
        "Repeat field note 8.",
        (
            "Field note 8: We closed 13 metres of fence because the tank drifted. "
            "The copper slope at Grirstad cooled before the frost. "
            "Jola Tremert cleaned the steep filter and the steep tunnel."
        ),
    ),
)


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
