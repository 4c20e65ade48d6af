"""Prompts of a benchmark: seeded texts of any length, cut so that prompt and answer fill the context asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from kvcli.demo.report import write_report
from kvcli.documents import Document, with_documents
from kvcli.errors import BadInput
from kvcli.text import render_prompt, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
Write = Callable[[Random, float], str]  # a text of about so many tokens
Ask = Callable[[str], list[Message]]  # the messages around a text
GROW = 1.05  # aim a little beyond what is needed, then cut
TRIES = 6


@dataclass(frozen=True)
class Workload:
    """A kind of prompt: how its long text is written, and what is asked about it."""

    about: str
    write: Write
    ask: Ask


def build_prompt(workload: str, tokenizer: PreTrainedTokenizerBase, n: int, vocab: int, seed: int) -> list[int]:
    """Ids of a prompt of at most `n` tokens, at least as near to it as one line of its text."""
    if workload == "random":
        return random_ids(tokenizer, n, vocab, seed)
    made = WORKLOADS[workload]
    text, aim = "", float(n)
    for _ in range(TRIES):
        text = made.write(Random(seed), aim)
        length = len(render_prompt(tokenizer, made.ask(text)))
        if length >= n:
            return cut(tokenizer, text, made.ask, n)
        aim *= GROW * n / max(1, length)
    return cut(tokenizer, text, made.ask, n)


def file_prompt(document: Document, tokenizer: PreTrainedTokenizerBase, n: int, new: int) -> list[int]:
    """Ids that ask for a summary of the beginning of a file. Refuses a file that is too short for the context."""

    def ask(text: str) -> list[Message]:
        return _user(with_documents("Summarise the main points.", [Document(document.name, text, document.sha256)]))

    length = len(render_prompt(tokenizer, ask(document.text)))
    if length < n:
        raise BadInput(
            f"{document.name} is too short to fill the context",
            code="too_short",
            lines=[f"its prompt has {length:,} tokens, {n:,} are needed beside the new ones"],
            detail={"tokens": length, "needed": n},
            try_=[f"--ctx {length + new}", "a longer file"],
        )
    return cut(tokenizer, document.text, ask, n)


def cut(tokenizer: PreTrainedTokenizerBase, text: str, ask: Ask, n: int) -> list[int]:
    """The prompt with the longest beginning of the text that lets it have at most `n` tokens."""

    def ids_of(size: int) -> list[int]:
        return render_prompt(tokenizer, ask(text[:size]))

    low, high = 0, len(text)
    if len(best := ids_of(0)) > n:
        raise BadInput(
            "the context is too short for this workload",
            code="too_short",
            lines=[f"the question alone has {len(best):,} tokens, the prompt may have {n:,}"],
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
    """Ids without meaning, none of them a control token: nothing to copy and nothing to expect."""
    rng, special = Random(seed), special_ids(tokenizer)
    allowed = [i for i in range(min(vocab, len(tokenizer))) if i not in special]
    return [allowed[int(rng.random() * len(allowed))] for _ in range(n)]


# ---- the texts ----


def report(rng: Random, n: float) -> str:
    """A field report."""
    return write_report(rng, n, fact_share=0.35).text


def code(rng: Random, n: float) -> str:
    """A Python module of small functions over records, as much alike as such modules are."""
    nouns = "order invoice parcel reading sensor account ticket route sample batch user session".split()
    fields = "total weight price count level score size delay rate".split()
    verbs = "sum filter sort group merge scale check clean".split()
    blocks = ["from __future__ import annotations\n\nfrom dataclasses import dataclass"]
    while sum(map(len, blocks)) < 3 * n:
        noun, field, verb = (_pick(rng, words) for words in (nouns, fields, verbs))
        limit = 1 + int(rng.random() * 99)
        blocks.append(
            f"def {verb}_{noun}s_by_{field}(items: list[{noun.title()}], limit: int = {limit}) -> list[{noun.title()}]:"
            f'\n    """Return the {noun}s whose {field} is at least `limit`."""\n    found = []\n'
            f"    for item in items:\n        if item.{field} >= limit:\n            found.append(item)\n"
            f"    return sorted(found, key=lambda item: item.{field})"
        )
    return "\n\n\n".join(blocks) + "\n"


# ---- what is asked ----


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def ask_summary(text: str) -> list[Message]:
    return _user(f"{text}\n\nSummarise the main findings.")


def ask_copy(text: str) -> list[Message]:
    """Ask for the longest note of what was kept of the report, word for word."""
    kept = re.findall(r"^(Field note \d+): (.+)$", text, re.MULTILINE)
    name = max(kept, key=lambda note: len(note[1]))[0] if kept else "Field note 1"
    return _user(f"{text}\n\nRepeat {name.lower()}.")


def ask_code(text: str) -> list[Message]:
    return _user(f"{text}\n\nRewrite this module and rename `limit` to `least`.")


def ask_lookup(text: str) -> list[Message]:
    """Ask for the fact nearest to the middle of what was kept of the report."""
    told = facts_in(text)
    question = f"What is the {told[len(told) // 2][0]}?" if told else "What is the access code?"
    return _user(f"{text}\n\n{question}")


def ask_chat(text: str) -> list[Message]:
    """A report, four questions about it that were answered, and a fifth."""
    told = facts_in(text)
    asked = [told[i * len(told) // 6] for i in range(1, 6)] if len(told) >= 6 else told
    if not asked:
        return ask_summary(text)
    messages = _user(f"{text}\n\nWhat is the {asked[0][0]}?")
    for (of, value), (following, _) in pairwise(asked):
        messages.append({"role": "assistant", "content": f"The {of} is {value}."})
        messages += _user(f"What is the {following}?")
    return messages


def facts_in(text: str) -> list[tuple[str, str]]:
    """(attribute of entity, value) of the sentences of a report that state one."""
    return re.findall(r"\bThe ([a-z ]+ of (?:depot|surveyor|well|gauge) [^.\n]+?) is ([^\n]+?)\.(?=\s|$)", text)


def _pick(rng: Random, words: Sequence[str]) -> str:
    return words[int(rng.random() * len(words))]


WORKLOADS: dict[str, Workload] = {
    "summary": Workload("a field report and the wish for a summary", report, ask_summary),
    "chat": Workload("a report, four questions with their answers, and a fifth", report, ask_chat),
    "code": Workload("a Python module to be rewritten", code, ask_code),
    "copy": Workload("a report of which one note is to be repeated word for word", report, ask_copy),
    "lookup": Workload("a report and a question about one fact in its middle", report, ask_lookup),
}
NAMES = (*WORKLOADS, "random")
