"""Speed of an OpenAI-compatible server for several clients at a time, as they see it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise
from random import Random
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Text, Thought
from kvcli.bench.workloads import WORKLOADS, of_file
from kvcli.engines.openai import BYTES, RemoteSession
from kvcli.errors import BadInput
from kvcli.schemas.bench import ServerBenchRow

if TYPE_CHECKING:
    from kvcli.bench.measure import Tell
    from kvcli.bench.workloads import Message
    from kvcli.documents import Document
    from kvcli.engine.stats import Stats

TURN = 0.618  # of a text between the beginnings of two prompts: no prefix cache has one of the other


def prompts(name: str, files: Mapping[str, Document], n: int, seed: int) -> Iterator[list[Message]]:
    """Yield prompts of about n tokens, each with another place of the text at its beginning. Raises BadInput."""
    made, size = of_file(files[name]) if name in files else WORKLOADS[name], BYTES * n
    for i in count():
        text = made.write(Random(seed + i), n)
        if len(text) < size:
            said = f"{name} is too short: it has {len(text):,} characters, and {n:,} tokens take {size:,}"
            raise BadInput(said, code="too_short", try_=["a smaller --ctx", "--workload with a longer text file"])
        at = int(i * TURN % 1 * len(text))
        yield made.ask((text[at:] + text[:at])[:size])


def measure(
    session: RemoteSession, asks: Iterator[list[Message]], clients: Sequence[int], schedule: tuple[int, int],
    cancel: Cancel, tell: Tell, **options: Any,
) -> list[ServerBenchRow]:  # fmt: skip
    """Ask by so many clients at the same time, in rounds that take turns. `schedule`: warm-up rounds, and measured ones
    after them. `options`: as for `stream`. Raises KvcliError at the first request that fails."""
    rounds: dict[int, list[tuple[float, list[tuple[list[float], Stats]]]]] = {n: [] for n in clients}

    def answer(messages: list[Message]) -> tuple[list[float], Stats]:
        began, at = time.perf_counter(), list[float]()
        for event in session.stream((), messages=messages, cancel=cancel, **options):
            if isinstance(event, Text | Thought | End):
                at.append(time.perf_counter() - began)
        return at, event.turn.stats  # the last event is End

    for done in range(sum(schedule)):
        for n in clients:
            tell(done, sum(schedule), f"{n} clients")
            with ThreadPoolExecutor(n) as pool:
                messages, began = [*islice(asks, n)], time.perf_counter()
                found = [*pool.map(answer, messages)]
            if cancel():
                raise KeyboardInterrupt
            rounds[n] += [(time.perf_counter() - began, found)] if done >= schedule[0] else []
    return [_row(n, its) for n, its in rounds.items()]


def _row(n: int, rounds: Sequence[tuple[float, list[tuple[list[float], Stats]]]]) -> ServerBenchRow:
    answers = [one for _, found in rounds for one in found]
    stats, gaps = [one for _, one in answers], [b - a for at, _ in answers for a, b in pairwise(at[:-1])]
    drafted = sum(one.draft_tokens for one in stats)
    return ServerBenchRow(
        clients=n,
        answers=len(answers),
        prompt=round(median(one.prompt for one in stats)),
        cached=round(median(one.cached for one in stats)),
        new=round(median(one.new for one in stats)),
        tok_s=[sum(one.new for _, one in found) / seconds for seconds, found in rounds],
        first_token=median(at[0] for at, _ in answers),
        gap_p95=quantiles(gaps, n=20)[-1] if len(gaps) > 1 else None,
        acceptance_rate=sum(one.accepted_tokens for one in stats) / drafted if drafted else None,
        kv_bytes=max(one.kv_bytes for one in stats) or None,
    )
