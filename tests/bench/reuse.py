"""After an edit near the beginning of a document: how much sooner it is read, and how often answers are still right.

    python tests/bench/reuse.py [--model demo] [--tokens 3000] [--texts 12] [--edits 8,64] [--out FILE]

A text of a task is read and then changed: so many tokens of it, a tenth of the way in, give way to twice as many
others. Then the task's questions are asked of the changed text: read anew, and with what stands behind the edit taken
over (`reuse.method = "pie"`), by turns. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.chat.local import load  # noqa: E402
from kvcli.models.text import decode  # noqa: E402
from kvcli.quality.fit import fitted  # noqa: E402
from kvcli.quality.prompt import Prompts  # noqa: E402
from kvcli.quality.prose import Prose  # noqa: E402
from kvcli.quality.sample import Draw  # noqa: E402
from kvcli.quality.tasks import TASKS  # noqa: E402
from kvcli.settings.profile import Profile  # noqa: E402
from tests.bench.decode import machine  # noqa: E402

NAMES = ("niah_single", "passkey", "mqar", "copy_span")
SIDES = {"read anew": {"method": "none"}, "pie": {"method": "pie"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--edits", default="8,64")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    profile = Profile.load("exact").replace(exactness="approx")
    model = load(args.model, profile)
    prompts = Prompts(model.tokenizer)
    texts = {side: model.open(profile.replace(reuse=how)) for side, how in SIDES.items()}
    rows = []
    for edit in map(int, args.edits.split(",")):
        for name in NAMES:
            task, right, took, gains = TASKS[name], dict.fromkeys(SIDES, 0.0), [], []
            n = 0
            for i in range(args.texts):
                context = fitted(task, Draw(name, 7, args.tokens, i, Prose()), prompts)
                ids, at = prompts.context(context.text), args.tokens // 10
                other = ids[-2 * edit - at : -at]
                changed = [*ids[:at], *other, *ids[at + edit :]]
                for question in context.questions[:2]:
                    n, behind, times = n + 1, prompts.question(question), {}
                    for side in list(SIDES)[:: -1 if n % 2 else 1]:
                        text = texts[side]
                        text.generate([*ids, *behind], max_new_tokens=1)
                        turn = text.generate([*changed, *behind], max_new_tokens=question.max_new)
                        times[side] = turn.stats.read
                        stop = model.lm.stop_ids
                        said = question.prefix + decode(model.tokenizer, [j for j in turn.ids if j not in stop])
                        right[side] += task.score(said, question)
                    took.append(times["read anew"])
                    gains.append(times["read anew"] / times["pie"])
            row: dict[str, Any] = {"edit": edit, "task": name, "n": n}
            row |= {side: right[side] / n for side in SIDES}
            row |= {"anew, s": statistics.median(took), "sooner": [min(gains), statistics.median(gains), max(gains)]}
            rows.append(row)
            print(row, flush=True)
    about = machine()
    result = {
        "title": f"After an edit of so many tokens, a tenth of the way into {args.tokens:,}",
        "command": f"python tests/bench/reuse.py --model {args.model} --tokens {args.tokens} --texts {args.texts}",
        "machine": f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, commit {about['commit']}",
        "columns": list(rows[0]),
        "rows": rows,
        "note": "Share of right answers; how many times sooner the changed text is read, least and most in brackets.",
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
