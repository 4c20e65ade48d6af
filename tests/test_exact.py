"""The heart: whatever drafts, the text is that of plain decoding with the same storage, policy and sampler (I2).

Rows of the table: storage x policy x drafter x sampler x precision. A new storage, policy or drafter adds its row here
before anybody speaks of its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from kvcli.build import view
from kvcli.drafts.base import Drafter, Off
from kvcli.drafts.lookahead import Lookahead
from kvcli.drafts.mix import Mix
from kvcli.drafts.ngram import Ngram
from kvcli.engine import Engine, drive, events
from kvcli.feed import Feed, Work
from kvcli.kv.dense import Dense
from kvcli.model import LM
from kvcli.policies.random import Random
from kvcli.policies.window import Window
from kvcli.rows import Rows
from kvcli.sample import Sampler
from kvcli.session import Session
from tests import drafters, families
from tests.policies import KeepAll, Ragged

NEW = 40
STOP = 96  # drawn now and then by the sampled rows; greedy rows end by length

MODELS = {"dense": "llama", "sliding": "gemma3", "sinks": "gpt_oss", "rounded": "llama", "blocks": "llama"}
# no packed product is made in float64
NONE = {("rounded", "fp32"), ("blocks", "fp64")}
STORAGES = [(name, dtype) for name in MODELS for dtype in ("fp32", "fp64") if (name, dtype) not in NONE]
BLOCKS = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 24}  # linear layers in 4-bit groups of 32, as in GGUF
POLICIES = {"all": (None, None), "keepall": (KeepAll(), 16), "ragged": (Ragged(), 16)}
POLICIES |= {"window": (Window(sinks=2, window=13), 11), "random": (Random(budget=17, sinks=2, window=5), 11)}
SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, repetition_penalty=1.3, seed=11),
}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

Make = Callable[[Sequence[int]], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda truth: Ngram().drafter(),
    "lookahead": lambda truth: Lookahead(adaptive=False, window=3, ngram=4).drafter(),
    "fafo": lambda truth: Lookahead(adaptive=False, view="stream", sinks=2, local=5, refresh=3).drafter(),
    "blind": lambda truth: Lookahead(adaptive=False, view="stream", sinks=0, local=1, refresh=1).drafter(),
    "pages": lambda truth: Lookahead(
        adaptive=False, view="quest", page=3, pages=2, sinks=1, local=4, refresh=4
    ).drafter(),
    "mix": lambda truth: Mix(adaptive=False, view="stream", sinks=2, local=9).drafter(),
    "eager": lambda truth: Ngram(adaptive=False, max=7).drafter(),  # drafts from the first pass on, whatever it costs
    **{
        kind.__name__.lower(): (lambda truth, kind=kind: kind(truth, 97, STOP))  # type: ignore[misc]
        for kind in drafters.ADVERSARIES
    },
}


@cache
def lm(storage: str, dtype: str) -> LM:
    if storage == "blocks":
        return LM.of(families.build(MODELS[storage], DTYPES[dtype], **BLOCKS), quant="int4")
    return LM.of(families.build(MODELS[storage], DTYPES[dtype]))


def prompt() -> list[int]:
    # a phrase that returns, so that n-grams match; longer than the sliding window
    phrase = families.prompt(9)
    return families.prompt(17, seed=2) + phrase + families.prompt(5, seed=3) + phrase[:6]


def opened(storage: str, policy: str, sampler: str, dtype: str, drafter: Drafter) -> Session:
    model = lm(storage, dtype)
    keep, every = POLICIES[policy]
    stored = torch.float32 if storage == "rounded" else model.dtype  # kv.dtype below that of the model
    kv = Dense(model.n_layers, model.n_kv_heads, model.head_dim, stored)
    reads = view(model, kv, drafter)
    return Session(model, kv, drafter, SAMPLERS[sampler], view=reads, policy=keep, every=every, chunk=13)


def written(session: Session) -> Work[object, list[int]]:
    yield from session.read(prompt())
    yield from session.stream(NEW, stop={STOP})
    return session.ids


def decode(storage: str, policy: str, sampler: str, dtype: str, drafter: Drafter) -> list[int]:
    session = opened(storage, policy, sampler, dtype, drafter)
    for said in events(written(session)):
        assert session.committed == len(session.ids) - 1 or isinstance(said, int)
    return session.ids


@cache
def plain(storage: str, policy: str, sampler: str, dtype: str) -> list[int]:
    return decode(storage, policy, sampler, dtype, Off())


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
def test_any_drafter_gives_the_text_of_plain_decoding(
    storage: str, policy: str, drafter: str, sampler: str, dtype: str
) -> None:
    want = plain(storage, policy, sampler, dtype)
    assert decode(storage, policy, sampler, dtype, DRAFTERS[drafter](want)) == want


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
def test_texts_side_by_side_are_those_of_plain_decoding_alone(
    storage: str, policy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight in one engine, by turns every drafter with every sampler; one is cancelled, and one breaks on the way.

    All that the host learns of a pass is read back at once, as from a GPU.
    """
    monkeypatch.setattr(lm(storage, dtype), "is_apart", True)
    pairs = list(product(DRAFTERS, SAMPLERS))
    first = 7 * (list(POLICIES).index(policy) + len(POLICIES) * STORAGES.index((storage, dtype)))
    engine, texts = Engine(rows=40), []
    for at in range(8):
        drafter, sampler = pairs[(first + at) % len(pairs)]
        want = plain(storage, policy, sampler, dtype)
        session = opened(storage, policy, sampler, dtype, DRAFTERS[drafter](want))
        texts.append((engine.add(broken(session) if at == 3 else written(session)), want))
    for n in range(10_000):
        if not engine.round():
            break
        if n == 9:
            texts[5][0].cancel()
    for at, (ticket, want) in enumerate(texts):
        assert ticket.is_over
        if at == 3:
            assert isinstance(ticket.error, MemoryError)
        elif at != 5:
            assert ticket.result() == want


def broken(session: Session) -> Work[object, list[int]]:
    """A text whose pass breaks, alone as among others."""
    yield from session.read(prompt())

    class Torn(Dense):
        def attend(self, *args: Any) -> Any:
            raise MemoryError("no room")

    torn = Torn(session.lm.n_layers, session.lm.n_kv_heads, session.lm.head_dim, session.kv.dtype)
    yield Feed(session.lm, Rows.chain([1], len(session.ids)), torn)
    raise AssertionError("it went on")


def test_the_right_guesses_are_taken_and_the_wrong_ones_are_not() -> None:
    want = plain("dense", "all", "greedy", "fp32")
    right = drafters.Right(want, 97, STOP)
    decode("dense", "all", "greedy", "fp32", right)
    wrong = drafters.Wrong(want, 97, STOP)
    decode("dense", "all", "greedy", "fp32", wrong)
    assert len(right.steps) == -(-NEW // 8)
    assert all(step.n_accepted == step.n_drafted for step in right.steps)
    assert len(wrong.steps) == NEW
    assert all(step.n_accepted == 0 for step in wrong.steps)


def test_some_rows_of_the_table_do_end_at_a_stop_token() -> None:
    ended = [p for p in POLICIES for s in SAMPLERS if plain("dense", p, s, "fp32")[-1] == STOP]
    assert ended, "choose a STOP that the samplers draw, or the table does not cover it"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_reading_in_other_chunks_gives_the_same_text(sampler: str) -> None:
    texts = []
    for chunk in (1, 7, 13, 512):
        model = lm("sliding", "fp64")
        kv = Dense(model.n_layers, model.n_kv_heads, model.head_dim, model.dtype)
        session = Session(model, kv, Off(), SAMPLERS[sampler], chunk=chunk)
        drive(session.read(prompt()))
        list(events(session.stream(20)))
        texts.append(session.ids)
    assert texts[1:] == texts[:-1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_another_turn_after_an_undo_gives_the_same_text(drafter: str) -> None:
    model = lm("dense", "fp64")
    first, second = prompt(), [*prompt(), *families.prompt(8, seed=9)]

    def fresh(maker: Make, truth: Sequence[int]) -> Session:
        kv = Dense(model.n_layers, model.n_kv_heads, model.head_dim, model.dtype)
        return Session(model, kv, maker(truth), Sampler(), chunk=13)

    alone = fresh(lambda _: Off(), [])
    drive(alone.read(second))
    list(events(alone.stream(20)))
    session = fresh(DRAFTERS[drafter], alone.ids)
    drive(session.read(first))
    list(events(session.stream(10)))
    cached = session.resume(second)
    assert cached >= len(first) - 1
    drive(session.read(second[len(session.ids) :]))
    list(events(session.stream(20)))
    assert session.ids == alone.ids
