"""Companions of a sequence: whichever fails, and wherever, the text that follows is right, or is read anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli.chat.turn import repair_session
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.forward_request import await_passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.companion import Companion
from kvcli.kv.snapshot import SnapshotMismatch
from kvcli.methods.policies.compress_prefix import compress_prefix
from kvcli.methods.prune.lazy import LazyLLM
from kvcli.methods.reuse.pie import Pie
from tests import families, make
from tests.policies import Ragged, Recent

LAZY = LazyLLM(min_prompt=8, recent=3, sinks=1, scope="prefill+decode", revive_interval=4)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "evicted": ("llama", {"policy": Ragged(), "every": 7}),
    "recurrent": ("lfm2", {"policy": Recent(last=6), "every": 7}),
    "layer-wise": ("llama", {"by_layers": True}),
    "deferred": ("deep", {"pruning": LAZY}),
    "reused": ("llama", {"reusing": Pie(8)}),
    "condensed": ("llama", {}),
}
N = {"plain": 4, "evicted": 4, "recurrent": 4, "layer-wise": 5, "deferred": 5, "reused": 5, "condensed": 5}
FIRST, SECOND = families.prompt(40), families.prompt(12, seed=6)


@cache
def lm(name: str) -> LM:
    if name == "deep":
        return make.model("llama", torch.float64, num_hidden_layers=8)
    return make.model(name, torch.float64)


def new(kind: str) -> GenerationSession:
    name, options = KINDS[kind]
    return make.session(lm(name), chunk=9, **options)


def read(s: GenerationSession, ids: list[int]) -> None:
    s.start_answer(ids, Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass


def begun(kind: str) -> GenerationSession:
    """A session in the middle of an answer."""
    return _begun(kind).fork()


@cache
def _begun(kind: str) -> GenerationSession:
    s = new(kind)
    if kind == "reused":
        read(s, FIRST)
        read(s, [9, *FIRST])
        assert s.approximations == {"reused"}
    else:
        read(s, FIRST)
    if kind == "condensed":
        assert run_to_end(compress_prefix(s, 30, 12))
        run_to_end(s.read(FIRST[30:]))
    list(iterate_events(s.stream(5)))
    return s


def answer(s: GenerationSession, ids: list[int]) -> list[int]:
    read(s, ids)
    list(iterate_events(s.stream(12)))
    return s.ids[len(ids) :]


@cache
def fresh_answer(kind: str, text: tuple[int, ...]) -> list[int]:
    return answer(new(kind), [*text])


class Fault(Exception):
    pass


def broken(one: Companion, name: str, *, late: bool) -> None:
    """Have a method fail once, before or after its effect."""
    whole: Callable[..., Any] = getattr(one, name)

    def once(*args: Any) -> Any:
        delattr(one, name)
        return fails(*args) if name == "compress" else run_to_end(fails(*args))

    def fails(*args: Any) -> Iterator[Any]:
        if late:
            yield from await_passes(whole(*args))
        raise Fault

    setattr(one, name, once)


CASES = [(kind, i) for kind, n in N.items() for i in range(n)]
LATE = pytest.mark.parametrize("late", [False, True], ids=["before", "after"])


@pytest.mark.parametrize("kind", N)
def test_every_companion_of_a_kind_is_in_the_table(kind: str) -> None:
    assert len(begun(kind).companions) == N[kind]


@LATE
@pytest.mark.parametrize(("kind", "i"), CASES)
def test_a_fault_in_a_rewind_leaves_a_text_that_is_read_anew(kind: str, i: int, late: bool) -> None:
    s = begun(kind)
    text = [*s.ids[:20], *SECOND]
    broken(s.companions[i], "rewind", late=late)
    with pytest.raises(Fault):
        s.rewind(20)
    repair_session(s)
    assert (s.ids, s.committed, s.approximations) == ([], 0, set())
    assert answer(s, text) == fresh_answer(kind, (*text,))


@LATE
@pytest.mark.parametrize(("kind", "i"), CASES)
def test_a_fault_at_a_compression_point_is_one_that_is_due_again(kind: str, i: int, late: bool) -> None:
    s = begun(kind)
    whole = s.fork()
    run_to_end(whole.compress_cache())
    broken(s.companions[i], "compress", late=late)
    s.next_compression_at = s.committed
    with pytest.raises(Fault):
        run_to_end(s.compress_cache())
    assert repair_session(s), "it is due"
    text = [*whole.ids, *SECOND]
    if s.committed:
        run_to_end(s.compress_cache())
        assert s.approximations == whole.approximations
        assert answer(s, text) == answer(whole, text)
    else:
        assert answer(s, text) == fresh_answer(kind, (*text,))


@LATE
@pytest.mark.parametrize(("kind", "i"), [case for case in CASES if case[0] != "condensed"])
def test_a_fault_in_a_restore_leaves_an_empty_sequence(kind: str, i: int, late: bool) -> None:
    whole, s = begun(kind), new(kind)
    broken(s.companions[i], "restore", late=late)
    with pytest.raises(Fault):
        s.restore(whole.state(), whole.ids[-1])
    assert (s.ids, s.committed, s.approximations) == ([], 0, set())
    assert answer(s, FIRST[:30]) == fresh_answer(kind, (*FIRST[:30],))
    s.restore(whole.state(), whole.ids[-1])
    text = [*whole.ids, *SECOND]
    assert answer(s, text) == answer(whole, text)


def test_kv_saved_without_span_reuse_is_restored_with_it() -> None:
    whole, s = begun("plain"), new("reused")
    s.restore(whole.state(), whole.ids[-1])
    assert s.approximations == set()
    text = [*whole.ids, *SECOND]
    assert answer(s, text) == answer(whole, text)
    reused = begun("reused")
    s.restore(reused.state(), reused.ids[-1])
    assert s.approximations == {"reused"}


def test_the_example_in_the_docs_follows_its_sequence() -> None:
    page = Path(__file__).parents[1] / "docs/design/engine.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    kind = names["SlotHistory"]
    s = make.session(lm("llama"), chunk=9, policy=Recent(last=6), every=8, companions=[kind()])
    read(s, FIRST)
    list(iterate_events(s.stream(20)))
    one = s.find(kind)
    assert [*one.points] == [9, 18, 27, 36, 39, 40, 48, 56]
    assert max(one.points.values()) < 40
    fork, other = s.fork(), make.session(lm("llama"), companions=[kind()])
    other.restore(s.state(), s.ids[-1])
    assert other.find(kind).points == one.points
    fork.rewind(0)
    assert (fork.find(kind).points, len(one.points)) == ({}, 8)
    with pytest.raises(SnapshotMismatch, match="slot_history"):
        other.restore({name: part for name, part in s.state().items() if name != "slot_history"}, 1)
