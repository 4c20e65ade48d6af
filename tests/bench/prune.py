"""Reading with tokens left behind: what it saves of the first token's time, and what it costs in answers.

    python tests/bench/prune.py [--n 20] [--tokens 4096] [--budgets lazy,lazy-fast] [--out FILE]
    python tests/bench/prune.py --model random-152M --tokens 16384 [--reps 3]

Every method stands at the cost of a profile, its budget: the mean share of the tokens that a layer is given. Beside it
stands `random`, which leaves as many behind by lot. The demo model is asked for facts and for summaries of held-out
reports, the question in sight; an answer is right if greedy decoding, without drafts, writes the reference, and of a
summary each line counts. Other models are timed alone. Sides by turns, in turned order; "kept" counts the rows that
layers were given in fact, a look ahead included, so 1 / kept is the speed-up to expect of reading; in brackets without
the last layer, of which reading needs keys and values alone. Intervals are paired bootstraps over questions. Prints a
table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli import load  # noqa: E402
from kvcli.bench.texts import text_of  # noqa: E402
from kvcli.demo.evaluate import HELD_OUT, Question, prompt_ids, questions  # noqa: E402
from kvcli.engine.engine import drive, events  # noqa: E402
from kvcli.engine.sample import Sampler  # noqa: E402
from kvcli.models.text import decode  # noqa: E402
from kvcli.quality.statistics import bootstrap  # noqa: E402
from kvcli.settings.profile import Profile  # noqa: E402
from tests.bench.decode import machine  # noqa: E402
from tests.bench.random_model import write  # noqa: E402

SKILLS = {"single key": "lookup", "many keys": "lookup", "one finding": "lookup", "summary": "summary"}
ONE_CUT = 0.5  # share of depth below which methods with one cut let all on

Table = dict[str, Any]


def mean_kept(table: Table, layers: int, lm: Any) -> float:
    """The share that a schedule gives a layer, tokens that always go on aside."""
    from kvcli.prune.lazy import Lazy

    left, shares = 1.0, []
    cuts = Lazy(**{k: v for k, v in table.items() if k != "method"}).cuts(lm)
    for layer in range(layers):
        left = cuts.get(layer, left)
        shares.append(left)
    return fmean(shares)


def sides_of(budget: str, lm: Any) -> dict[str, Table]:
    """Tables of [prune] by name, all of the cost that the profile of this name has."""
    own = Profile.load(budget).prune
    names = ("start_prune_layer", "end_prune_layer", "num_prune", "start_keep_ratio", "end_keep_ratio")
    schedule = {name: getattr(own, name) for name in names}
    n = lm.n_layers
    cost = mean_kept(schedule, n, lm)
    below = max(1, round(ONE_CUT * n))
    once = {"method": "cut", "layer": ONE_CUT}
    again = (cost * n - below) / n
    found = {
        "lazy": {"method": "lazy", **schedule},
        "lazy, back": {"method": "lazy", **schedule, "scope": "prefill+decode"},
        "chunked": {"method": "chunked", **schedule},
        "cut": {**once, "keep": max(0.01, (cost * n - below) / (n - below))},
        "random": {"method": "random", **schedule},
    }
    if again > 0:
        found["cut, again"] = {**once, "keep": again, "again": True}
    return {f"{budget}: {name}": table for name, table in found.items()}


class Asked:
    """One prompt, and how its answer is judged."""

    def __init__(self, ids: list[int], question: Question | None = None, tokenizer: Any = None) -> None:
        self.ids, self._question = ids, question
        self.kind = SKILLS[question.skill] if question is not None else "none"
        self.new = len(tokenizer.encode(question.turn.answer, add_special_tokens=False)) + 8 if question else 1

    def score(self, said: str) -> float:
        """1 for the reference, and of a summary the share of its lines."""
        assert self._question is not None
        lines, want = said.strip().split("\n"), self._question.turn.answer.split("\n")
        return fmean(line in lines for line in want) if self.kind == "summary" else float(said.strip() == want[0])


def asked_of(model: Any, name: str, tokens: int, n: int, reps: int) -> Iterator[Asked]:
    """What the model is asked: questions of the demo, prose alone of others."""
    if name == "demo":
        backend = model.tokenizer.backend_tokenizer
        for question in questions(backend, tokens, n, HELD_OUT):
            if question.skill in SKILLS:
                yield Asked(prompt_ids(backend, question), question, model.tokenizer)
        return
    ids = model.tokenizer.encode(text_of("prose") + text_of("manual"))
    for rep in range(reps):
        start = Random(rep).randrange(len(ids))
        yield Asked((ids[start:] + ids * (tokens // len(ids) + 1))[:tokens])


def answered(model: Any, asked: Asked) -> dict[str, float]:
    """Seconds to the end of reading and to the first token, rows that layers were given, and the score."""
    session = model.new_session()
    session.begin(asked.ids, Sampler())
    given, append, take = [0] * model.lm.n_layers, session.kv.append, session.kv.take

    def appended(layer: int, k: Any, *rest: Any) -> None:
        given[layer] += k.shape[1]
        append(layer, k, *rest)

    def taken(layer: int, slots: Any) -> None:
        given[layer] += slots.n_slots
        take(layer, slots)

    session.kv.append, session.kv.take = appended, taken
    began = time.perf_counter()
    while drive(session.chunk(asked.ids)):
        pass
    read, kept = time.perf_counter() - began, [n / session.committed for n in given]
    said = list(drive(session.step()).new)
    first = time.perf_counter() - began
    stop = model.lm.stop_ids
    if asked.kind != "none" and said[-1] not in stop:
        said += [i for step in events(session.stream(asked.new, stop)) for i in step.new]
    text = decode(model.tokenizer, [i for i in said if i not in stop])
    found = {"read": read, "first": first, "kept": fmean(kept), "whole": time.perf_counter() - began}
    found["kept_below"] = fmean(kept[:-1])
    return found | ({} if asked.kind == "none" else {"score": asked.score(text)})


def row_of(side: str, table: Table | None, asked: list[Asked], found: dict[str, list[dict[str, float]]]) -> Table:
    """What one side made of everything, beside reading all of it."""
    mine, whole = found[side], found["exact"]
    kept = fmean(of["kept"] for of in mine)
    row: Table = {"side": side, "prune": table or {"method": "none"}, "kept": kept, "expected": 1 / kept}
    row["expected_below"] = 1 / fmean(of["kept_below"] for of in mine)
    for name in ("read", "first", "whole"):
        gains = sorted(a[name] / b[name] for a, b in zip(whole, mine, strict=True))
        row |= {f"{name}_s": median(of[name] for of in mine), f"{name}_gain": median(gains)}
        row[f"{name}_gain_quartiles"] = [gains[len(gains) // 4], gains[3 * len(gains) // 4]]
    for kind in sorted({one.kind for one in asked} - {"none"}):
        at = [i for i, one in enumerate(asked) if one.kind == kind]
        lost = [100 * (whole[i]["score"] - mine[i]["score"]) for i in at]
        row[kind] = {"of": len(at), "score": 100 * fmean(mine[i]["score"] for i in at), "lost": fmean(lost)}
        row[kind]["lost_range95"] = bootstrap({kind: lost}, 0) or (min(lost), max(lost))
    return row


def told(row: Table) -> str:
    """One line of the table."""
    line = f"{row['side']:<22} kept {row['kept']:.2f}  read {row['read_gain']:.2f}x of {row['expected']:.2f}x "
    line += f"({row['expected_below']:.2f}x)  first token {row['first_gain']:.2f}x  end to end {row['whole_gain']:.2f}x"
    for kind in ("lookup", "summary"):
        if kind in row:
            low, high = row[kind]["lost_range95"]
            line += f"  {kind} {row[kind]['score']:.1f} (lost {row[kind]['lost']:.1f}, {low:.1f} to {high:.1f})"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--n", type=int, default=20, help="lookups of a kind; half as many summaries")
    parser.add_argument("--reps", type=int, default=3, help="prompts of another model than demo")
    parser.add_argument("--budgets", default="lazy,lazy-fast")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        if name == "random-152M":
            name = str(Path(folder, name))
            write(Path(name))
        model = load(name, "exact", {"load.threads": args.threads})
        asked = list(asked_of(model, args.model, args.tokens, args.n, args.reps))
        tables: dict[str, Table | None] = {"exact": None}
        for budget in args.budgets.split(","):
            tables |= sides_of(budget, model.lm)
        models = {
            side: model if table is None else model.with_profile(model.profile.replace(exactness="approx", prune=table))
            for side, table in tables.items()
        }
        found: dict[str, list[dict[str, float]]] = {side: [] for side in tables}
        for side in tables:  # gates are put up, and memory is taken
            answered(models[side], asked[0])
        for i, one in enumerate(asked):
            for side in list(tables)[:: -1 if i % 2 else 1]:
                found[side].append(answered(models[side], one))
    rows = [row_of(side, table, asked, found) for side, table in tables.items()]
    for row in rows:
        print(told(row))
    about = machine()
    result = {
        "title": "Reading with tokens left behind",
        "command": f"python tests/bench/prune.py --model {args.model} --tokens {args.tokens} --n {args.n}",
        "machine": f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, commit {about['commit']}",
        "model": args.model,
        "tokens": args.tokens,
        "prompts": len(asked),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
