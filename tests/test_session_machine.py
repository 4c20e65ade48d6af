"""A session writes the text of plain decoding and stores no more than that, whatever is done to it on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvcli.engine.engine import Engine, iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.snapshot import leaves, tree_of
from kvcli.methods.prune.lazy import LazyLLM
from tests import drafters, families, make
from tests.policies import Ragged, Recent

SAMPLER = Sampler(temperature=0.9, top_k=40, repetition_penalty=1.7, seed=3)
MOST = 60  # tokens of a text
WAYS = st.sampled_from(["", "restored", "taken over", "forked"])


@dataclass(frozen=True)
class Kind:
    storage: str = "dense"
    family: str = "llama"
    is_exact: bool = True  # the text is that of a dense cache
    keeps_all: bool = True
    options: dict[str, Any] = field(default_factory=dict)


OFTEN = {"policy": Ragged(), "every": 7}
KINDS = {
    "dense": Kind(),
    "windows": Kind("given", "gemma3", keeps_all=False, options={"every": 7}),
    "demoted": Kind("demoted", keeps_all=False, options={"policy": Recent(last=6), "every": 7}),
    "checked": Kind("checked", keeps_all=False, options={"policy": Recent(last=6), "every": 7}),
    "evicted": Kind("dense", "llama", False, False, OFTEN),
    "evicted, softcap": Kind("dense", "gemma2", False, False, {"policy": Recent(1, 9), "every": 3}),
}
CORE = ("dense", "evicted")
LONG = {
    "packed": Kind("packed_8", is_exact=False, options={"every": 7}),
    "layer-wise": Kind(options={"by_layers": True}),
    "tiers": Kind("two_dense", options={"every": 7}),
    "on_disk": Kind("on_disk", options={"every": 3}),
    "evicted, windows": Kind("dense", "gemma3", False, False, {"policy": Ragged(1), "every": 5}),
    "recalled": Kind("recalled", "llama", False, False, OFTEN),
    "gear": Kind("gear", is_exact=False, options={"every": 7}),
    "minmax": Kind("minmax", is_exact=False, options={"every": 7}),
    "deferred": Kind("dense", "llama", False, False, {"pruning": LazyLLM(min_prompt=8, recent=3, sinks=1)}),
}


@cache
def lm(family: str) -> LM:
    return make.model(family, torch.float64)


@cache
def decoded(family: str, ids: tuple[int, ...], n: int) -> list[int]:
    s = make.session(lm(family), sampler=SAMPLER)
    run_to_end(s.read(ids))
    list(iterate_events(s.stream(n)))
    return s.ids


@dataclass
class Pair:
    """A session whose drafts are right now and then, and one without drafts to which the same is done."""

    drafted: GenerationSession
    plain: GenerationSession

    def do(self, work: Callable[[GenerationSession], Any]) -> Any:
        found = work(self.drafted), work(self.plain)
        assert found[0] == found[1]
        return found[0]


class Sessions(RuleBasedStateMachine):
    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.chunk = lm(self.kind.family), 9

    def new(self, drafter: Any = None) -> GenerationSession:
        kv = make.cache(self.kind.storage, self.lm)
        return make.session(self.lm, kv, drafter, SAMPLER, chunk=self.chunk, **self.kind.options)

    @property
    def pair(self) -> Pair:
        return self.pairs[-1]

    def pass_on(self, way: str) -> None:
        """To a session that restores a snapshot of this one, takes it over, or is a fork of it beside it."""
        pair = self.pair
        if way == "forked":
            self.pairs = [pair, Pair(pair.drafted.fork(), pair.plain.fork())]
        for name in ("drafted", "plain") if way in ("restored", "taken over") and pair.plain.committed else ():
            s = getattr(pair, name)
            other = self.new(s.drafter)
            if way == "restored":
                given = {key: leaf.clone() if isinstance(leaf, Tensor) else leaf for key, leaf in leaves(s.state())}
                other.restore(tree_of(given), s.ids[-1])
            else:
                other.take_over(s)
                assert s.ids == []
            setattr(pair, name, other)

    def will_say(self, pair: Pair, n: int) -> int:
        """How many tokens there is room for; the drafter comes to know them."""
        n = max(0, min(n, MOST - len(pair.plain.ids)))
        drafter = pair.drafted.drafter
        assert isinstance(drafter, drafters.Scripted)
        ahead = pair.plain.fork()
        list(iterate_events(ahead.stream(n)))
        if self.kind.is_exact:
            assert ahead.ids == decoded(self.kind.family, tuple(pair.plain.ids), n)
        drafter.truth = ahead.ids
        return n

    @initialize(
        n=st.integers(1, 30),
        seed=st.integers(1, 3),
        chunk=st.integers(1, 20),
        drafter=st.sampled_from([drafters.Moody, drafters.Bush]),
    )
    def ask_first(self, n: int, seed: int, chunk: int, drafter: type[drafters.Scripted]) -> None:
        self.chunk = chunk
        self.pairs = [Pair(self.new(drafter([], 97, -1)), self.new())]
        self.ask(0.0, n, seed, "")

    @rule(share=st.floats(0, 1), n=st.integers(1, 20), seed=st.integers(1, 3), way=WAYS)
    def ask(self, share: float, n: int, seed: int, way: str) -> None:
        """Other words behind a part of the text."""
        self.pass_on(way)
        text = [
            *self.pair.plain.ids[: int(share * min(MOST - n, len(self.pair.plain.ids)))],
            *families.prompt(n, seed=seed),
        ]
        self.pair.do(lambda s: s.start_answer(text, SAMPLER))
        self.pair.do(lambda s: run_to_end(s.read(text[len(s.ids) :])))
        assert self.pair.drafted.ids == text

    @rule(n=st.integers(1, 20), passes=st.integers(0, 4))
    def ask_and_cancel(self, n: int, passes: int) -> None:
        """The reading is cancelled after a few passes, and taken up again; the other session is not disturbed."""
        s, text = self.pair.drafted, [*self.pair.plain.ids, *families.prompt(n, seed=4)][:MOST]
        engine, before = Engine(), s.committed
        task = engine.add(s.read(text[len(s.ids) :]))
        for _ in range(passes):
            engine.step()
        task.cancel()
        assert before <= (stored := s.committed) < len(text)
        assert s.resume(text) == stored
        run_to_end(s.read(text[len(s.ids) :]))
        run_to_end(self.pair.plain.read(text[len(self.pair.plain.ids) :]))

    @precondition(lambda self: self.pair.plain.ids)
    @rule(n=st.integers(1, 9), way=WAYS)
    def stream(self, n: int, way: str) -> None:
        self.pass_on(way)
        n = self.will_say(self.pair, n)
        list(iterate_events(self.pair.drafted.stream(n)))
        list(iterate_events(self.pair.plain.stream(n)))

    @precondition(lambda self: self.pair.plain.ids)
    @rule(n=st.integers(1, 12), passes=st.integers(0, 3))
    def stream_and_cancel(self, n: int, passes: int) -> None:
        n, before = self.will_say(self.pair, n), len(self.pair.plain.ids)
        engine = Engine()
        task = engine.add(self.pair.drafted.stream(n))
        for _ in range(passes):
            engine.step()
        task.cancel()
        list(iterate_events(self.pair.plain.stream(len(self.pair.drafted.ids) - before)))

    @precondition(lambda self: len(self.pairs) > 1 and all(pair.plain.ids for pair in self.pairs))
    @rule(n=st.tuples(st.integers(1, 6), st.integers(1, 6)), passes=st.integers(0, 5))
    def stream_together(self, n: tuple[int, int], passes: int) -> None:
        """In the same passes, and beside a text that is cancelled."""
        engine, third = Engine(rows=12), self.new()
        task = engine.add(third.read(families.prompt(30)))
        for pair, each in zip(self.pairs, n, strict=True):
            each = self.will_say(pair, each)
            list(iterate_events(pair.plain.stream(each)))
            engine.add(pair.drafted.stream(each))
        for _ in range(passes):
            engine.step()
        task.cancel()
        while engine.step():
            pass

    @rule(share=st.floats(0, 1), way=WAYS)
    def rewind(self, share: float, way: str) -> None:
        self.pass_on(way)
        plain = self.pair.plain
        n, had = int(share * len(plain.ids)), plain.committed
        kept = self.pair.do(lambda s: s.rewind(n))
        assert kept in (0, n - 1)
        if self.kind.keeps_all or self.kind.storage in ("demoted", "checked"):
            assert kept == max(0, n - 1), "nothing is read again"
        if self.kind.storage == "dense" and kept < had:
            assert all(pos == list(range(kept)) for pos in self.stored(plain)), "evicted slots do not come back"

    @precondition(lambda self: len(self.pairs) > 1)
    @rule()
    def go_on_with_the_other(self) -> None:
        self.pairs.reverse()

    @invariant()
    def says_and_stores_the_same(self) -> None:
        for pair in self.pairs:
            s, plain = pair.drafted, pair.plain
            assert s.ids == plain.ids
            assert s.committed == plain.committed == max(0, len(s.ids) - 1)
            assert s.approximations == plain.approximations
            assert not self.kind.is_exact or not s.approximations
            held = dict.fromkeys(range(self.lm.n_layers), 0)
            for use in s.cache.usage():
                held[use.layer] += use.slots
            stored = self.stored(s)
            assert stored == self.stored(plain)
            assert all(set(pos) <= set(range(s.committed)) for pos in stored)
            if self.kind.keeps_all:
                assert all(pos == list(range(s.committed)) for pos in stored)
                assert set(held.values()) == {s.committed}
            if self.kind.storage == "dense":
                for layer in range(self.lm.n_layers):
                    ours, theirs = (each.cache.slots(layer) for each in (s, plain))
                    torch.testing.assert_close(ours.k[ours.pos >= 0], theirs.k[theirs.pos >= 0])
                    torch.testing.assert_close(ours.v[ours.pos >= 0], theirs.v[theirs.pos >= 0])

    def stored(self, s: GenerationSession) -> list[list[int]]:
        """Positions by layer and head."""
        layers = range(self.lm.n_layers)
        return [sorted(pos[pos >= 0].tolist()) for layer in layers for pos in s.cache.slots(layer).pos]


def holds(of_kind: Kind, n: int, steps: int) -> None:
    class Named(Sessions):
        kind = of_kind

    usual = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Named, settings=settings(usual, max_examples=n, stateful_step_count=steps))


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.core] * (k in CORE)) for k in KINDS])
def test_a_session_writes_the_text_of_plain_decoding(name: str) -> None:
    holds(KINDS[name], 8, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS | LONG)
def test_a_session_writes_the_text_of_plain_decoding_at_length(name: str) -> None:
    holds((KINDS | LONG)[name], 100, 30)
