"""Pack reports and their turns into rows of token ids with a loss weight on every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvcli.demo import between, pick
from kvcli.demo.report import MAX_SECTIONS, write_report
from tests.demo_model.tokenizer import ASSISTANT, BOS, END, SPECIALS, SYSTEM, USER
from tests.demo_model.turns import SYSTEM_PROMPT, Part, pasted, small_talk, turns

# a fifth of the report's own text is learned from, lightly: enough to keep it a language model of reports
REPORT_WEIGHT = 0.3
REPORT_SHARE = 0.2
END_WEIGHT = 2.9
SHORTEST_REPORT = 200  # tokens a row


@dataclass(frozen=True)
class Batch:
    """Rows of tokens; `weights[n, t]` weighs the prediction of `ids[n, t]`."""

    ids: NDArray[np.int64]  # [N, T]
    weights: NDArray[np.float32]  # [N, T]


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Part]) -> tuple[list[int], list[float]]:
    """Ids and weights of a message, cut as one string; a token weighs what its last character weighs."""
    encoding = tokenizer.encode("".join(text for text, _ in parts), add_special_tokens=False)
    by_character = [weight for text, weight in parts for _ in text]
    return encoding.ids, [by_character[end - 1] for _, end in encoding.offsets]


def say(tokenizer: Tokenizer, ids: list[int], weights: list[float], role: int, parts: Sequence[Part]) -> None:
    """Append a message to a row."""
    message, message_weights = encode_parts(tokenizer, parts)
    ids.extend([role, *message, END])
    weights.extend([0.0, *message_weights, END_WEIGHT if role == ASSISTANT else 0.0])


def opening(tokenizer: Tokenizer, rng: Random) -> tuple[list[int], list[float]]:
    """The start of a chat, half of the time with a system prompt."""
    ids, weights = [BOS], [0.0]
    if rng.random() < 0.5:
        say(tokenizer, ids, weights, SYSTEM, [(SYSTEM_PROMPT, 0.0)])
    return ids, weights


def report_row(tokenizer: Tokenizer, rng: Random, length: int, near: float) -> tuple[list[int], list[float]]:
    """One chat: a report of 35 to 60 % of the row (35 to 80 % in long rows), then turns until the row is full."""
    ids, weights = opening(tokenizer, rng)
    fact_share = pick(rng, [0.9, 0.6, 0.35, 0.2]) if length > 300 else 0.9
    share = 0.35 + rng.random() * (0.25 if length < 1_500 else 0.45)
    n_tokens = length * share
    # short sections too, or counting past the fourth would have to wait for long rows
    n_sections = max(1, min(MAX_SECTIONS, int(n_tokens / (55 + 100 * rng.random())))) if rng.random() < 0.5 else None
    report = write_report(rng, n_tokens, fact_share, near, n_sections)
    report_weight = REPORT_WEIGHT if rng.random() < REPORT_SHARE else 0.0
    document: list[Part] = [(report.text + "\n\n", report_weight)]
    for turn in turns(rng, report):
        say(tokenizer, ids, weights, USER, [*document, (turn.question, 0.0)])
        say(tokenizer, ids, weights, ASSISTANT, turn.parts)
        document = []
        if len(ids) >= length:
            return ids[:length], weights[:length]
    raise AssertionError("turns never end")


def talk_row(tokenizer: Tokenizer, rng: Random, length: int) -> tuple[list[int], list[float]]:
    """A chat without a report: small talk and pasted texts. A greeting is a chat's first words, hence short rows."""
    ids, weights = opening(tokenizer, rng)
    while len(ids) < length:
        turn = small_talk(rng) if rng.random() < 0.75 else pasted(rng)
        say(tokenizer, ids, weights, USER, [(turn.question, 0.0)])
        say(tokenizer, ids, weights, ASSISTANT, turn.parts)
    return ids[:length], weights[:length]


def copy_row(rng: Random, length: int, vocabulary: int) -> tuple[list[int], list[float]]:
    """Random tokens, then random stretches of them again: what copying is, with nothing else in the way.

    A small alphabet makes a match need several tokens before it; only predictable tokens are learned from.
    """
    n_letters = int(24 * ((vocabulary - len(SPECIALS)) / 24) ** rng.random())
    alphabet = [between(rng, len(SPECIALS), vocabulary - 1) for _ in range(n_letters)]
    n_source = int(length * (0.3 + 0.3 * rng.random()))
    ids = [BOS, *(pick(rng, alphabet) for _ in range(n_source - 1))]
    weights = [0.0] * n_source
    n_ambiguous = 1 if n_letters > 300 else 2
    while len(ids) < length:
        n = between(rng, 5, 19)
        start = between(rng, 1, max(1, n_source - n - 1))
        ids += ids[start : start + n]
        weights += [0.0] * n_ambiguous + [1.0] * (n - n_ambiguous)
    return ids[:length], weights[:length]


def make_batch(
    tokenizer: Tokenizer, rng: Random, n_rows: int, length: int, near: float = 0.2, copy_share: float = 0.0
) -> Batch:
    """Rows of report chats, `copy_share` of them replaced by copying practice; rows too short for that are talk."""

    def row() -> tuple[list[int], list[float]]:
        if length < SHORTEST_REPORT:
            return talk_row(tokenizer, rng, length)
        if rng.random() < copy_share:
            return copy_row(rng, length, tokenizer.get_vocab_size())
        return report_row(tokenizer, rng, length, near)

    rows = [row() for _ in range(n_rows)]
    return Batch(np.array([ids for ids, _ in rows]), np.array([weights for _, weights in rows], dtype=np.float32))
