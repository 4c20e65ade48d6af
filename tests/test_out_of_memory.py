"""Memory runs out at any point: the session survives, the declared step is taken and said, and nothing said is lost."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch

from kvcli.api import End, Event, Text
from kvcli.chat.conversation import Chat
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.chat.turn import next_fallback, repair_session
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig, DoesNotFit, ExitStatus
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.out_of_memory import CacheFull, as_cache_full
from kvcli.kv.slots import KVCache, nbytes
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseTier
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.sparse.minmax import MinMax
from kvcli.settings.profile import Profile
from tests import families, make, small_tokenizers
from tests.exact.table import DRAFTERS, prompt
from tests.fake_device import FakeDevice
from tests.policies import Ragged
from tests.test_sparse_over_tiers import ladder as recalled

torch.set_num_threads(1)
SAMPLED = Sampler(temperature=0.9, repetition_penalty=1.2, seed=3)
Make = Callable[[LM], KVCache]


def demoting(lm: LM) -> TieredCache:
    dense = make.dense(lm, step=8)
    low = SparseTier(dense, MinMax(page=3), PageBudget(0.1, 4, 2, 3), range(1, lm.n_layers), source=dense)
    return make.tiered(lm, TierLevel(low), demotes=True)


STORES: dict[str, tuple[Make, Policy | None]] = {
    **{name: (partial(make.cache, name), None) for name in ("dense", "two_dense", "three", "on_disk", "packed_4_2")},
    "evicting": (make.dense, Ragged()),
    "rounding": (partial(make.cache, "rounding"), Ragged()),
    "recalled": (lambda lm: recalled(lm, "minmax", "three"), Ragged()),
    "demoting": (demoting, Ragged()),
}
ROUNDING = ("three", "packed_4_2")  # in which the moment of moving down decides what is rounded
EVERY = 6
POINTS = [16, pytest.param(math.inf, marks=pytest.mark.slow)]  # at which memory runs out, of all that there are


@cache
def lm() -> LM:
    return make.model("llama", torch.float64, num_hidden_layers=2)


def session(store: str, drafter: Any = None) -> GenerationSession:
    build, policy = STORES[store]
    return make.session(lm(), build(lm()), drafter, SAMPLED, policy=policy, every=EVERY, chunk=13)


@cache
def truth(store: str) -> tuple[int, ...]:
    s = session(store)
    run_to_end(s.read(prompt()))
    list(iterate_events(s.stream(40)))
    return tuple(s.ids)


def check(s: GenerationSession) -> None:
    """Store, ids and committed agree: every layer holds committed positions, each once, all of them if none went."""
    assert s.committed == max(0, len(s.ids) - 1)
    for layer in range(lm().n_layers):
        for pos in s.cache.slots(layer).pos:
            held = sorted(pos[pos >= 0].tolist())
            assert len(held) == len(set(held))
            assert set(held) <= set(range(s.committed))
            if s.policy is None:
                assert held == list(range(s.committed))


def some(total: int, points: float) -> Iterable[int]:
    """So many of `total` allocations, or all of them, by an odd step: layers repeat at even ones."""
    return range(0, total, int(max(1, total // points)) | 1)


def allocations(s: GenerationSession, act: Callable[[GenerationSession], object]) -> int:
    with FakeDevice() as device:
        act(s)
    return device.allocations


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("drafter", ["off", "right", "fafo"])
@pytest.mark.parametrize("store", STORES)
def test_a_step_that_fails_at_any_allocation_is_as_if_it_had_not_begun(store: str, drafter: str, points: float) -> None:
    want = list(truth(store))
    before = session(store, None if drafter == "off" else DRAFTERS[drafter](want))
    run_to_end(before.read(prompt()))
    while before.next_compression_at - before.committed > (2 if drafter == "right" else 1):
        run_to_end(before.step(most=1))
    # the next step ends at a compression point, with a draft where those are right
    total = allocations(before.fork(), lambda s: run_to_end(s.step()))
    assert total > 100
    settled = 0
    for n in some(total, points):
        s = before.fork()
        with FakeDevice(fail_at=n), pytest.raises(torch.OutOfMemoryError):
            run_to_end(s.step())
        is_due = repair_session(s)
        check(s)
        if is_due:
            settled += 1
            run_to_end(s.compress_cache())
        s.drafter.start(s.ids, s.sampler)
        list(iterate_events(s.stream(len(before.ids) + 4 - len(s.ids))))
        assert s.ids == want[: len(s.ids)]
    assert settled or store == "dense", "the sweep covers evicting and moving down"


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("store", STORES)
def test_reading_that_fails_at_any_allocation_goes_on_from_its_last_chunk(store: str, points: float) -> None:
    def read(s: GenerationSession) -> None:
        run_to_end(s.read(prompt()[len(s.ids) :]))

    total = allocations(session(store), read)
    assert total > 11
    want = list(truth(store))
    for n in some(total, points):
        s = session(store)
        with FakeDevice(fail_at=n), pytest.raises(torch.OutOfMemoryError):
            read(s)
        is_due = repair_session(s)
        check(s)
        assert s.ids == want[: len(s.ids)]
        if is_due:
            run_to_end(s.compress_cache("read" if s.committed == len(prompt()) - 1 else "reading"))
        read(s)
        list(iterate_events(s.stream(3)))
        check(s)
        if s.policy is None:  # chunks begin elsewhere now; a policy that judges at their ends may keep others
            assert s.ids == want[: len(s.ids)] or store in ROUNDING


# steps of a profile


def model(**changes: Any) -> TextSession:
    found = make.model("llama", vocab_size=2048)
    return Model(found, small_tokenizers.demo(), Profile.load("exact").replace(exactness="approx", **changes)).open()


def text(n: int = 60) -> list[int]:
    return families.prompt(n, 2048)


def failing(m: TextSession, monkeypatch: pytest.MonkeyPatch, at: int, times: int = 1) -> None:
    """Appending runs out of memory from call `at` on, `times` times."""
    calls, real = iter(range(10**9)), Dense.append

    def append(self: Dense, *args: Any) -> None:
        if at <= next(calls) < at + times:
            raise MemoryError("full")
        real(self, *args)

    monkeypatch.setattr(Dense, "append", append)


def listen(events: Iterable[Event], said: list[str]) -> None:
    for event in events:
        said += [event.text] if isinstance(event, Text) else []


STEPS = ["prefill.chunk=-50%", "context.limit=-50%", "memory.disk=1GiB"]


@pytest.mark.parametrize("at", [0, 1, 4, 7, 20, 40])
@pytest.mark.parametrize("step", STEPS)
def test_a_declared_step_is_taken_and_said(step: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = model().generate(text(), max_new_tokens=20)
    m = model(memory={"fallbacks": [step]})
    failing(m, monkeypatch, at)
    turn = m.generate(text(), max_new_tokens=20)
    assert turn.ids == want.ids
    assert turn.text == want.text
    assert turn.finish == want.finish
    (said,) = turn.stats.shortages
    assert "out of memory at" in said
    assert step in said
    assert m.profile.memory.fallbacks == ()
    assert turn.stats.new == len(turn.ids)
    assert m.generate(text(), max_new_tokens=20).ids == want.ids


def test_steps_are_taken_in_order_until_one_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model(memory={"fallbacks": ["prefill.chunk=16", "prefill.chunk=-50%", "context.limit=-25%"]})
    limit = m.limit
    failing(m, monkeypatch, 20, times=2)
    turn = m.generate(text(), max_new_tokens=20)
    assert [words.rpartition("continuing with ")[2] for words in turn.stats.shortages] == [
        "prefill.chunk=16",
        "prefill.chunk=-50%",
    ]
    assert m.session.chunk_rows == m.profile.prefill.chunk == 8
    assert m.profile.memory.fallbacks == ("context.limit=-25%",)
    assert m.limit == limit


@pytest.mark.parametrize("memory", [{"on_oom": "fail"}, {"fallbacks": []}, {"fallbacks": ["prefill.chunk=-50%"]}])
def test_without_a_step_the_error_says_what_fits_and_hands_back_the_answer(
    memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = model(memory=memory)
    want = m.generate(text(), max_new_tokens=20)
    m.close()
    failing(m, monkeypatch, 22, times=10**6)
    said: list[str] = []
    with pytest.raises(DoesNotFit) as caught:
        listen(m.stream(text(), max_new_tokens=20), said)
    error = caught.value
    assert error.exit == ExitStatus.DOES_NOT_FIT
    assert error.code == "out_of_memory"
    assert error.detail["answer"] == "".join(said)
    assert want.text.startswith("".join(said))
    room = error.detail["tokens"] - len(text())  # less than an answer is left otherwise
    assert error.try_[0] == f"--ctx {error.detail['tokens']} --max-new-tokens {room}"
    assert error.detail["tokens"] == m.session.committed > len(text())
    check_model(m)
    monkeypatch.undo()
    again = m.generate(text(), max_new_tokens=20)
    assert again.ids == want.ids
    assert again.stats.cached >= len(text()) - 1, "the session survived with what it had read"
    shorter = model(context={"limit": error.detail["tokens"]}).generate(text(), max_new_tokens=room)
    assert shorter.ids == want.ids[:room]


def check_model(m: TextSession) -> None:
    for layer in range(m.session.lm.n_layers):
        pos = m.session.cache.slots(layer).pos[0]
        assert sorted(pos[pos >= 0].tolist()) == list(range(m.session.committed))


@pytest.mark.parametrize("at", [3, 40])
def test_a_step_that_packs_shrinks_what_is_stored_and_the_answer_goes_on(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"residual": 16, "group": 16}
    want = model().generate(text(), max_new_tokens=20)
    m = model(memory={"fallbacks": ["kv.k_bits=8", "kv.v_bits=2"]}, kv=small)
    failing(m, monkeypatch, at)
    turn = m.generate(text(), max_new_tokens=20)
    assert len(turn.ids) == 20
    assert turn.ids[: at // 3 - 1] == want.ids[: at // 3 - 1]  # what was said before stays
    assert "kv.k_bits=8" in turn.stats.shortages[0]
    assert turn.stats.kv["packed"] > 0
    assert (m.profile.kv.k_bits, m.profile.kv.v_bits) == (8, 16)
    check_model(m)
    again = m.generate(text(), max_new_tokens=20)
    assert len(again.ids) == 20


def test_a_shorter_window_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model(memory={"fallbacks": ["context.limit=70"]})
    failing(m, monkeypatch, 3 * 6)
    turn = m.generate(text(), max_new_tokens=30)
    assert turn.finish == "length"
    assert len(turn.ids) == 70 - 60
    assert turn.stats.limit == 70


def test_a_conversation_keeps_what_was_said_before_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    chat = Chat(m)
    failing(m, monkeypatch, 40, times=10**6)
    said: list[str] = []
    with pytest.raises(DoesNotFit):
        listen(chat.stream("What is the depth of the well?", max_new_tokens=60, ignore_eos=True), said)
    assert said
    assert chat.messages[-1].content == "".join(said)
    assert chat.messages[-1].finish == "interrupted"


def test_a_device_that_is_full_is_survived_by_reading_in_smaller_chunks() -> None:
    def peak(chunk: int) -> int:
        m = model(prefill={"chunk": chunk})
        with FakeDevice() as device:
            m.generate(text(400), max_new_tokens=20)
        return device.peak

    want, large, small = model().generate(text(400), max_new_tokens=20), peak(400), peak(100)
    assert small < 0.8 * large
    m = model(prefill={"chunk": 400}, memory={"fallbacks": ["prefill.chunk=-50%"] * 3})
    with FakeDevice(budget=(large + small) // 2) as device:
        turn = m.generate(text(400), max_new_tokens=20)
    assert device.failed
    assert turn.ids == want.ids
    assert 1 <= len(turn.stats.shortages) == 3 - len(m.profile.memory.fallbacks)


def test_a_device_with_little_room_moves_what_is_old_to_disk() -> None:
    want = model().generate(text(200), max_new_tokens=200)
    small: dict[str, Any] = {"prefill": {"chunk": 64}, "kv": {"group": 16}}
    m = model(memory={"device": "160KiB", "fallbacks": ["memory.disk=1GiB"]}, **small)
    events = []
    for event in m.stream(text(200), max_new_tokens=200):
        events.append(event)
        top = m.session.cache._levels[0].tier  # type: ignore[attr-defined]
        assert nbytes(top)["cpu"] <= 160 << 10
    turn = events[-1].turn  # type: ignore[union-attr]
    assert turn.ids == want.ids
    assert turn.stats.kv["disk"] > 0
    assert "memory.disk=1GiB" in turn.stats.shortages[0]


def test_a_device_without_any_room_is_refused_with_what_it_needs() -> None:
    with pytest.raises(DoesNotFit, match=r"memory.device = 16KiB") as caught:
        model(memory={"device": "16KiB"})
    assert any("memory.device=" in way for way in caught.value.try_)


def test_more_text_than_all_tiers_hold_is_refused_before_it_is_read() -> None:
    m = model(memory={"device": "160KiB", "on_oom": "fail"}, prefill={"chunk": 16})
    with pytest.raises(DoesNotFit, match="do not fit") as caught:
        m.generate(text(400), max_new_tokens=4)
    assert caught.value.detail["tokens"] == 0


@pytest.mark.parametrize(
    ("device", "n", "chunk", "offered"),
    [
        ("560KiB", 450, 400, {"memory.device", "memory.disk", "prefill.chunk"}),
        ("306KiB", 240, 16, {"memory.device", "memory.disk", "kv.k_bits"}),
        ("200KiB", 400, 128, {"memory.device", "memory.disk"}),  # a smaller chunk and fewer bits are not enough
        ("16KiB", 40, 16, {"memory.device"}),  # refused before anything is read
        ("300KiB", 60, 400, {"memory.device", "prefill.chunk"}),
    ],
)
def test_what_a_lack_of_memory_proposes_is_enough_when_typed(
    device: str, n: int, chunk: int, offered: set[str]
) -> None:
    given: dict[str, dict[str, Any]] = {"memory": {"device": device}, "prefill": {"chunk": chunk}}
    with pytest.raises(DoesNotFit) as caught:
        model(**given).generate(text(n), max_new_tokens=8, ignore_eos=True)
    found = set()
    for way in caught.value.try_:
        new, changes = 8, {table: dict(keys) for table, keys in given.items()}
        for flag, value in zip(*[iter(way.split())] * 2, strict=True):
            key, _, size = value.partition("=")
            if flag == "--set" and key != "exactness":
                table, _, name = key.partition(".")
                changes.setdefault(table, {})[name] = int(size) if size.isdigit() else size
                found.add(key)
            elif flag == "--ctx":
                changes["context"] = {"limit": int(value)}
            elif flag == "--max-new-tokens":
                new = int(value)
        assert model(**changes).generate(text(n), max_new_tokens=new, ignore_eos=True).ids, way
    assert found - {"kv.v_bits"} == offered


def test_host_memory_is_no_tier_on_a_cpu_and_the_error_says_so() -> None:
    for memory in ({"host": "1GiB"}, {"fallbacks": ["memory.host=1GiB"]}):
        with pytest.raises(BadConfig) as caught:
            model(memory=memory)
        assert caught.value.code == "no_host_tier"
        assert any("kv.k_bits" in way for way in caught.value.try_)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exactness": "exact", "kv": {"k_bits": 8}}, "kv.k_bits"),
        ({"exactness": "exact", "kv": {"v_bits": 2}}, "kv.v_bits"),
        ({"exactness": "exact", "memory": {"fallbacks": ["kv.v_bits=2"]}}, "memory.fallbacks"),
        ({"kv": {"v_bits": 4}, "memory": {"fallbacks": ["kv.v_bits=4"]}}, "frees nothing"),
        ({"memory": {"fallbacks": ["kv.residual=64"]}}, "frees nothing"),
        ({"memory": {"fallbacks": ["kv.residual=64", "kv.k_bits=8"]}}, "the step quantizes nothing"),
        ({"memory": {"fallbacks": ["kv.k_bits=4", "kv.v_bits=8", "kv.k_bits=8"]}}, '"kv.k_bits=4" comes before it'),
        ({"memory": {"fallbacks": ["kv.v_bits=4"], "on_oom": "fail"}}, "no step is ever taken"),
        ({"memory": {"fallbacks": ["policy.name=snap"]}}, "a list of steps"),
        ({"memory": {"fallbacks": ["prefill.chunk=-50%", "kv.v_bits=3"]}}, "a list of steps"),
        ({"memory": {"disk": "8"}}, "a size with its unit"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        Profile.load("exact").replace(**{"exactness": "approx", **changes})
    assert said in "\n".join(caught.value.lines)


def test_a_step_changes_one_key_and_leaves_the_list() -> None:
    profile = Profile.load("exact").replace(
        exactness="approx", memory={"fallbacks": ["context.limit=-25%", "kv.v_bits=2", "memory.disk=2GiB"]}
    )
    one = next_fallback(profile, 4096)
    two = next_fallback(one, 4096)
    three_ = next_fallback(two, 4096)
    assert (one.context.limit, two.kv.v_bits, three_.memory.disk) == (3072, 2, "2GiB")
    assert [len(p.memory.fallbacks) for p in (one, two, three_)] == [2, 1, 0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(errno.ENOSPC, "No space left on device"),
        CacheFull("full"),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception) -> None:
    found = as_cache_full(error)
    assert found is not None
    assert found.exit == ExitStatus.DOES_NOT_FIT
    assert as_cache_full(RuntimeError("shapes do not match")) is None
    assert as_cache_full(OSError(errno.EACCES, "no")) is None


def test_plain_profiles_store_in_one_tier_and_others_in_a_tiered_cache() -> None:
    assert isinstance(model().session.cache, Dense)
    assert model().session.compression_interval is None
    m = model(memory={"disk": "1GiB"})
    assert isinstance(m.session.cache, TieredCache)
    assert m.session.compression_interval == 64
    m.generate(text(), max_new_tokens=3)
    assert sum(nbytes(m.session.cache).values()) > 0


def test_the_end_of_a_turn_carries_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.schemas.turn import Run, TurnDocument

    m = model(memory={"fallbacks": ["prefill.chunk=-50%"]})
    failing(m, monkeypatch, 5)
    turn = next(e.turn for e in m.stream(text(), max_new_tokens=3) if isinstance(e, End))
    document = TurnDocument.of(turn, m.info, Run("mine"))
    assert [event["kind"] for event in document.events][-1] == "shortage"
    assert "prefill.chunk=-50%" in document.events[-1]["text"]
