"""Right answers and loops over short documents, by sampling settings.

    python tests/bench/answers.py [--model smollm2-135m] [--settings usual,none,frequency=0.1] [--files a.pdf,b.pdf]

Four documents, each with five facts that are asked for. An answer is right if it has the fact's words. Then questions
that ask for several sentences, about these documents and `--files`. A loop is an answer that `sample.stop_loops` ended.
Greedy, so that the settings alone make the difference; `usual` takes the model's own penalties, `none` none.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import Rows, Words, measurement, once

NAMES = {
    "repetition": "repetition_penalty",
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
    "dry": "dry_multiplier",
}
OFF = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "dry_multiplier": 0.0}
EXPLAIN = ("What is this text about?", "Explain the most important point.", "Which rules does the text give?")
OPEN = ("Summarize the text in a few sentences.", "List all facts of the text, one per line.")
TEXTS: list[tuple[str, dict[str, str]]] = [
    (
        """Meeting of the school board, 12 March

Present: Anna Lindqvist, Bertil Strand and Chen Wu. The boiler in the cellar was inspected on Monday. It is 31
years old and will be replaced in August, when the school is empty. The budget for the new boiler is 42,000
euros. Chen Wu asks three companies for offers by the end of April. The roof of the gym leaks above the storage
room. Bertil Strand called a roofer, who comes on Thursday. Until then the ladders are kept in the garage. The
next meeting is on 9 April at 18:30.""",
        {
            "What is the budget for the new boiler?": "42,000",
            "How old is the boiler?": "31",
            "When does the roofer come?": "Thursday",
            "When is the next meeting?": "9 April",
            "Who asks three companies for offers?": "Chen",
        },
    ),
    (
        """# Pump station Halvard: manual for operators

The station has two pumps, Nord and Sud. Each pump moves 140 litres per second. Pump Nord starts when the water
in the shaft stands 3.2 metres high, and pump Sud starts at 3.6 metres. Both stop at 1.1 metres. A red lamp on
the cabinet means that a motor is too hot. Then switch the pump off with the green handle, wait for 20 minutes,
and switch it on again. The oil of the gears is changed every 4,000 hours of operation. Use only mineral oil of
class ISO 220. The emergency number of the workshop is 0471-5530. The station was built in 1968 by the Ekholm
company.""",
        {
            "How much water does each pump move?": "140",
            "At which height does pump Sud start?": "3.6",
            "What does a red lamp on the cabinet mean?": "hot",
            "How often is the oil of the gears changed?": "4,000",
            "Which company built the station?": "Ekholm",
        },
    ),
    (
        """Dear Ms Okafor,

thank you for your order of 6 May. We have packed the four oak chairs and the round table. The chairs leave our
workshop in Graz on Tuesday and reach you within five days. The table is late, because the maple for its top
arrives in June. We will send it without charge for transport. Your order costs 1,870 euros in all. Please pay
600 euros now and the rest when the table has arrived. The wood is treated with linseed oil. Do not clean it
with soap; a dry cloth is enough. If a leg becomes loose, tighten the brass screw below the seat. The guarantee
lasts seven years.

With kind regards, Martin Huber""",
        {
            "How many chairs were ordered?": "four",
            "How much does the order cost in all?": "1,870",
            "Why is the table late?": "maple",
            "With what is the wood treated?": "linseed",
            "How long does the guarantee last?": "seven years",
        },
    ),
    (
        """The Marten River

The Marten River rises in the Talas Hills at 1,240 metres and flows south for 187 kilometres. It reaches the sea
near the town of Oriel. Its largest tributary is the Bree, which joins it at Cask Bridge. In spring the river
carries ten times as much water as in autumn. The dam at Wend was finished in 1931; it supplies power to 26,000
homes. Salmon came back in 2004, after the paper mill at Loom was closed. The river freezes in most winters
between December and February. The oldest bridge is the stone bridge of Oriel, which has nine arches.""",
        {
            "How long is the Marten River?": "187",
            "What is the largest tributary?": "Bree",
            "When was the dam at Wend finished?": "1931",
            "When did the salmon come back?": "2004",
            "How many arches does the oldest bridge have?": "nine",
        },
    ),
]


@measurement(
    "Answers of {model} over four short documents, by penalties",
    columns=["settings", "right", "of", "loops", "of answers", "tokens"],
    note="Greedy. right: answers with the fact's words. loops: answers that were ended as loops.",
)
def answers(
    model: str = "smollm2-135m",
    settings: Annotated[Words, f"usual, none, or {', '.join(NAMES)} with a number, joined by +"] = (
        "usual",
        "none",
        "repetition=1.1",
        "repetition=1.1+frequency=0.1",
        "frequency=0.1",
        "frequency=0.2",
        "frequency=0.4",
        "presence=0.4",
        "dry=0.8",
    ),
    files: Annotated[Words, "documents, such as faq.pdf"] = (),
    new: Annotated[int, "tokens of an answer, at most"] = 512,
) -> Rows:
    import kvcli

    texts = [(text, [*facts, *OPEN]) for text, facts in TEXTS]
    texts += [(kvcli.read_document(file).text, [*OPEN, *EXPLAIN]) for file in files]
    found = {fact: words.lower() for _, facts in TEXTS for fact, words in facts.items()}
    with kvcli.load(model, "ngram", {"sample.temperature": 0.0}) as loaded:

        def ask(text: str, question: str, keys: dict[str, float]) -> tuple[str, str, int]:
            with loaded.open() as session:
                turn = session.generate(f"{text}\n\n{question}", new, **keys)
            return turn.text, turn.finish, turn.stats.new

        for setting in settings:
            keys = penalties(setting)
            said = {
                question + text: once(f"{setting} {question} {text}", partial(ask, text, question, keys))
                for text, questions in texts
                for question in questions
            }
            right = sum(
                words in said[question + text][0].lower()
                for text, questions in texts
                for question, words in found.items()
                if question in questions
            )
            loops = sum(finish == "loop" for _, finish, _ in said.values())
            tokens = sum(count for *_, count in said.values())
            of = {"of": len(found), "loops": loops, "of answers": len(said), "tokens": tokens}
            yield {"settings": setting, "right": right, **of}


def penalties(setting: str) -> dict[str, float]:
    """Options of the answer."""
    if setting == "usual":
        return {}
    words = [word.partition("=") for word in setting.split("+") if word != "none"]
    return OFF | {NAMES[name]: float(number) for name, _, number in words}


if __name__ == "__main__":
    answers.main()
