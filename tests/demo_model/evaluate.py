"""Measure the demo model on seeds it has not seen: exact answers by skill and report length. Prints JSON last.

    python -m tests.demo_model.evaluate --free

An answer counts as exact when every one of its tokens is the model's first choice given the ones before, which is the
same as saying that greedy decoding writes the reference answer. A bullet counts on its own, so a wrong bullet does
not spoil the next here; `--free` lets the model run on its own words instead, through transformers.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvcli.demo import pick, weights_dir
from kvcli.demo.report import Report, new_fact, write_report
from tests.demo_model.packing import encode_parts
from tests.demo_model.tokenizer import ASSISTANT, BOS, END, USER
from tests.demo_model.turns import SMALL_TALK, Turn, lookup, one_finding, repeat, rewrite, summary

# training draws its seeds from text ("0 17 1"), so numbers are always new; these start far from the example's
HELD_OUT = 9_000_000

Write = Callable[[str], object]


class Model(Protocol):
    """Anything that turns ids into logits as transformers does."""

    def __call__(self, input_ids: Tensor, **options: Any) -> Any: ...
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor: ...


@dataclass(frozen=True)
class Question:
    """One turn behind one report."""

    skill: str
    report: str
    turn: Turn
    depth: float | None = None


@dataclass
class Count:
    """How many of how many."""

    right: int = 0
    of: int = 0

    def add(self, hit: bool) -> None:
        self.right += hit
        self.of += 1

    def as_json(self) -> dict[str, float | int | list[float]]:
        share = self.right / max(1, self.of)
        return {"right": self.right, "of": self.of, "share": round(share, 4), "range95": list(self.range95())}

    def range95(self) -> tuple[float, float]:
        """The Wilson interval: where the true share lies, 19 times out of 20."""
        n, z = max(1, self.of), 1.96
        share = self.right / n
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        reach = z * ((share * (1 - share) + z * z / (4 * n)) / n) ** 0.5 / (1 + z * z / n)
        return round(max(0.0, middle - reach), 4), round(min(1.0, middle + reach), 4)


@dataclass
class Table:
    """Counts by skill."""

    counts: dict[str, Count] = field(default_factory=dict)

    def add(self, skill: str, hit: bool) -> None:
        self.counts.setdefault(skill, Count()).add(hit)

    def as_json(self) -> dict[str, Any]:
        return {skill: count.as_json() for skill, count in self.counts.items()}


def report_of_length(tokenizer: Tokenizer, rng: Random, n_tokens: int, fact_share: float, rich: bool = True) -> Report:
    """A report within 4 % of the wanted length, found by changing the budget."""
    budget = float(n_tokens)
    for _ in range(12):
        report = write_report(rng, budget, fact_share, rich=rich)
        n = len(tokenizer.encode(report.text).ids) + 40
        if abs(n - n_tokens) < 0.04 * n_tokens:
            break
        budget *= n_tokens / n
    return report


def with_needle(text: str, sentence: str, depth: float) -> str:
    """The text with one more sentence at a share of its length."""
    sentences = text.split(". ")
    i = min(len(sentences) - 1, max(1, round(depth * len(sentences))))
    return ". ".join([*sentences[:i], sentence.removesuffix("."), *sentences[i:]])


def questions(tokenizer: Tokenizer, length: int, n: int, seed: int) -> Iterator[Question]:
    """Held-out questions of every skill at one length; lookups five times as many as the others."""
    rng = Random(seed + length)
    for i in range(n):
        report = report_of_length(tokenizer, rng, length, 0.0)
        fact = new_fact(rng, [], 0.0)
        depth = (0.1, 0.3, 0.5, 0.7, 0.9)[i % 5]
        yield Question("single key", with_needle(report.text, fact.sentence, depth), lookup(rng, fact), depth)
    for _ in range(n):
        report = report_of_length(tokenizer, rng, length, 0.9)
        yield Question("many keys", report.text, lookup(rng, pick(rng, report.facts)))
    for _ in range(max(1, n // 2)):
        report = report_of_length(tokenizer, rng, length, 0.3)
        while not report.notes:
            report = report_of_length(tokenizer, rng, length, 0.3)
        yield Question("summary", report.text, summary(rng, report))
        yield Question("one finding", report.text, one_finding(rng, pick(rng, report.findings)))
        yield Question("rewrite", report.text, rewrite(rng, pick(rng, report.notes)))
        yield Question("repeat", report.text, repeat(rng, pick(rng, report.notes)))


def greetings() -> Iterator[Question]:
    """Small talk as the first words of a chat."""
    for question, answer in SMALL_TALK:
        yield Question("small talk", "", Turn("hello", question, ((answer, 1.0),)))


def prompt_ids(tokenizer: Tokenizer, question: Question) -> list[int]:
    text = f"{question.report}\n\n{question.turn.question}".lstrip()
    return [BOS, USER, *tokenizer.encode(text, add_special_tokens=False).ids, END, ASSISTANT]


@torch.no_grad()
def hits(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """For every token of the answer, whether it is the first choice."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
    found: list[bool] = (logits.argmax(-1) == torch.tensor(answer)).tolist()
    return found


@torch.no_grad()
def free_answer(model: Model, tokenizer: Tokenizer, prompt: Sequence[int], limit: int) -> str:
    """What greedy decoding writes, at most `limit` tokens."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    written: list[int] = out[0, len(prompt) :].tolist()
    return str(tokenizer.decode(written[: written.index(END)] if END in written else written))


def count_bullets(table: Table, skill: str, ids: Sequence[int], found: Sequence[bool], newline: int) -> None:
    """Every line of a summary on its own: finding and page, with the end of its line."""
    start = 0
    for i, token in enumerate(ids):
        if token in (newline, END):
            table.add(skill, all(found[start : i + 1]))
            start = i + 1


def measure(
    model: Model, tokenizer: Tokenizer, length: int, n: int, seed: int = HELD_OUT, free: bool = False
) -> dict[str, Any]:
    """Counts by skill at one report length."""
    forced, running, by_depth = Table(), Table(), Table()
    newline = tokenizer.encode("\n").ids[0]
    for question in questions(tokenizer, length, n, seed):
        prompt = prompt_ids(tokenizer, question)
        answer = [*encode_parts(tokenizer, question.turn.parts)[0], END]
        found = hits(model, prompt, answer)
        forced.add(question.skill, all(found))
        if question.depth is not None:
            by_depth.add(str(question.depth), all(found))
        if question.skill == "summary":
            count_bullets(forced, "summary bullets", answer, found, newline)
        if free and question.skill in ("summary", "rewrite"):
            written = free_answer(model, tokenizer, prompt, len(answer) + 20)
            running.add(question.skill, written == question.turn.answer)
            if question.skill == "summary":
                lines = written.split("\n")
                for line in question.turn.answer.split("\n"):
                    running.add("summary bullets", line in lines)
    out: dict[str, Any] = {"exact": forced.as_json(), "single key by depth": by_depth.as_json()}
    return out | ({"free running": running.as_json()} if free else {})


def measure_greetings(model: Model, tokenizer: Tokenizer) -> Table:
    table = Table()
    for question in greetings():
        answer = [*encode_parts(tokenizer, question.turn.parts)[0], END]
        table.add(question.skill, all(hits(model, prompt_ids(tokenizer, question), answer)))
    return table


def load(folder: Path) -> tuple[Model, Tokenizer]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def line(length: int, result: dict[str, Any]) -> str:
    counts = {skill: f"{c['right']}/{c['of']}" for skill, c in result["exact"].items()}
    free = {f"{skill} (free)": f"{c['right']}/{c['of']}" for skill, c in result.get("free running", {}).items()}
    return f"{length:>6} tokens  " + "  ".join(f"{skill} {share}" for skill, share in (counts | free).items()) + "\n"


def main(arguments: Sequence[str] | None = None, write: Write = sys.stdout.write) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model.evaluate", description=__doc__)
    parser.add_argument("--weights", type=Path, default=weights_dir())
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1_024, 2_048, 4_096, 8_000])
    parser.add_argument("--n", type=int, default=40, help="lookups a length and kind; half as many of each other skill")
    parser.add_argument("--seed", type=int, default=HELD_OUT)
    parser.add_argument("--free", action="store_true", help="also let summaries and rewrites run free")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the JSON is written too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.weights)
    started = time.monotonic()
    results: dict[str, Any] = {}
    for length in options.lengths:
        results[str(length)] = measure(model, tokenizer, length, options.n, options.seed, options.free)
        write(line(length, results[str(length)]))
    record = {
        "schema": "kvcli.demo-model/1",
        "n": options.n,
        "seed": options.seed,
        "seconds": round(time.monotonic() - started),
        "torch": torch.__version__,
        "small talk": measure_greetings(model, tokenizer).as_json(),
        "by_length": results,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
