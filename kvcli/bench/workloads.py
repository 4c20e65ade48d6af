"""Prompts of a benchmark: a text and a question about it, cut so that prompt and answer fill the context.

The texts are real ones, with questions in workloads.toml, a file of the user's, or reports in the language of the demo
model, written from a seed at any length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import tomli

from kvcli.bench.texts import text_of
from kvcli.demo.report import write_report
from kvcli.documents import Document, with_documents
from kvcli.errors import BadInput
from kvcli.models.text import render_prompt, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
Write = Callable[[Random, float], str]  # makes a text of about this many tokens, or returns its only text
Ask = Callable[[str], list[Message]]  # makes the messages around a text
TABLE = Path(__file__).with_name("workloads.toml")
GROW = 1.05  # aim a little above the needed length, then cut
TRIES = 6
SUMMARY = "{text}\n\nSummarise the main findings."


@dataclass(frozen=True)
class Workload:
    """A kind of prompt: the source of its long text, and the question about it."""

    about: str
    write: Write
    ask: Ask


def prompt_of(
    name: str,
    files: Mapping[str, Document],
    tokenizer: PreTrainedTokenizerBase,
    vocab: int,
    ctx: int,
    new: int = 0,
    seed: int = 0,
) -> list[int]:
    """Ids that fill the context together with the new tokens. Raises BadInput if the text is too short for that."""
    n = ctx - new
    if name == "random":
        return random_ids(tokenizer, n, vocab, seed)
    made = of_file(files[name]) if name in files else WORKLOADS[name]
    aim, length = float(n), 0
    for _ in range(TRIES):
        text = made.write(Random(seed), aim)
        length = len(render_prompt(tokenizer, made.ask(text)))
        if length >= n:
            return cut(tokenizer, text, made.ask, n)
        aim *= GROW * n / max(1, length)
    raise BadInput(
        f"{name} is too short to fill the context",
        code="too_short",
        lines=[f"its prompt has {length:,} tokens, and {n:,} are needed in addition to new tokens"],
        detail={"tokens": length, "needed": n},
        try_=[f"--ctx {length + new}", "--workload with a longer text file"],
    )


def of_file(document: Document) -> Workload:
    """Workload that summarises a file of the user's."""
    ask = with_documents("Summarise the main points.", [Document(document.name, "{text}", document.sha256)])
    return Workload("", lambda rng, n: document.text.strip("\n"), partial(turns, [ask]))


def cut(tokenizer: PreTrainedTokenizerBase, text: str, ask: Ask, n: int) -> list[int]:
    """The prompt with the longest beginning of the text that keeps it within `n` tokens."""

    def ids_of(size: int) -> list[int]:
        return render_prompt(tokenizer, ask(text[:size]))

    low, high = 0, len(text)
    if len(best := ids_of(0)) > n:
        raise BadInput(
            "the context is too short for this workload",
            code="too_short",
            lines=[f"the question alone has {len(best):,} tokens, and the prompt can have {n:,}"],
            try_=["a larger --ctx", "a smaller -n"],
        )
    while low < high:
        middle = (low + high + 1) // 2
        found = ids_of(middle)
        if len(found) <= n:
            low, best = middle, found
        else:
            high = middle - 1
    return best


def random_ids(tokenizer: PreTrainedTokenizerBase, n: int, vocab: int, seed: int) -> list[int]:
    """Random ids without control tokens: nothing to copy and nothing to predict."""
    rng, special = Random(seed), special_ids(tokenizer)
    allowed = [i for i in range(min(vocab, len(tokenizer))) if i not in special]
    return [allowed[int(rng.random() * len(allowed))] for _ in range(n)]


# ---- texts ----


def report(rng: Random, n: float) -> str:
    """Write a field report."""
    return write_report(rng, n, fact_share=0.35).text


# ---- questions ----


def turns(said: Sequence[str], text: str) -> list[Message]:
    """Alternate user and assistant messages, the user's first, with `{text}` replaced by the text."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": one.replace("{text}", text)} for i, one in enumerate(said)
    ]


def ask_copy(text: str) -> list[Message]:
    """Ask for the longest note in the cut report, word for word."""
    kept = re.findall(r"^(Field note \d+): (.+)$", text, re.MULTILINE)
    name = max(kept, key=lambda note: len(note[1]))[0] if kept else "Field note 1"
    return turns([f"{{text}}\n\nRepeat {name.lower()}."], text)


def ask_lookup(text: str) -> list[Message]:
    """Ask for the fact nearest to the middle of the cut report."""
    told = facts_in(text)
    question = f"What is the {told[len(told) // 2][0]}?" if told else "What is the access code?"
    return turns([f"{{text}}\n\n{question}"], text)


def ask_chat(text: str) -> list[Message]:
    """A report, four answered questions about it, and a fifth question."""
    told = facts_in(text)
    asked = [told[i * len(told) // 6] for i in range(1, 6)] if len(told) >= 6 else told
    if not asked:
        return turns([SUMMARY], text)
    said = [f"{{text}}\n\nWhat is the {asked[0][0]}?"]
    for (of, value), (following, _) in pairwise(asked):
        said += [f"The {of} is {value}.", f"What is the {following}?"]
    return turns(said, text)


def facts_in(text: str) -> list[tuple[str, str]]:
    """(attribute of entity, value) of the sentences of a report that state a fact."""
    return re.findall(r"\bThe ([a-z ]+ of (?:depot|surveyor|well|gauge) [^.\n]+?) is ([^\n]+?)\.(?=\s|$)", text)


def of_table(about: str, text: str, ask: list[str]) -> Workload:
    """Workload over a text that ships with kvcli."""
    return Workload(about, lambda rng, n: text_of(text), partial(turns, ask))


WORKLOADS: Mapping[str, Workload] = {
    **{name: of_table(**row) for name, row in tomli.loads(TABLE.read_text(encoding="utf-8")).items()},
    "summary": Workload("a field report and a request for a summary", report, partial(turns, [SUMMARY])),
    "chat": Workload("a field report, four questions with their answers, and a fifth", report, ask_chat),
    "copy": Workload("a field report of which one note is to be repeated word for word", report, ask_copy),
    "lookup": Workload("a field report and a question about one fact in its middle", report, ask_lookup),
}
NAMES = (*WORKLOADS, "random")


def usual(model: str) -> Sequence[str]:
    """Default workloads of a model, the first for runs with a single workload.

    The demo model is trained on reports only; with other models the repetitions in reports would favour drafting.
    """
    return ("summary", "chat", "copy") if model == "demo" else ("article", "talk", "code")
