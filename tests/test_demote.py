"""What a policy lets go moves down a tier: nothing is lost, nothing is chosen twice, and rows that want it find it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble, load
from kvcli.chat.model import Model
from kvcli.chat.turn import approximation_note, describe_losses
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig
from kvcli.heads.sample import ProbeSample, samples
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import KVCache, nbytes
from kvcli.kv.sparse.page_source import PageTier
from kvcli.kv.tiers.host import HostTier
from kvcli.settings.profile import Profile, load_profile
from tests import families, make
from tests.exact import table as exactness
from tests.fake_device import FakeDevice
from tests.test_tiered_cache import D, K, L, fill, positions, read

DEMOTE = {"evicted": "demote"}
SMALL = {"method": "sketch", "page": 3, "floor": 4, "sinks": 1, "recent": 4, "dense_layers": 0}


def demoting(lower: Any = None, most: int | None = None, **more: Any) -> TieredCache:
    lower = lower or make.dense((L, K, D))
    return make.tiered((L, K, D), TierLevel(lower, most), demotes=True, **more)


def some(kv: KVCache, seed: int = 0) -> list[Tensor]:
    """Masks over what the store shows: about half of it, other slots in each head."""
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(K, kv.n_slots(layer), generator=g) < 0.5 for layer in range(L)]


# ---- the tiered cache ----


LOWER: dict[str, Callable[[], PageTier]] = {
    "dense": lambda: make.dense((L, K, D)),
    "host": lambda: HostTier(make.dense((L, K, D)), "cpu"),
    "disk": lambda: make.disk((L, K, D)),
}


@pytest.mark.parametrize("lower", LOWER)
def test_what_masks_let_go_is_read_as_before_and_shown_no_more(lower: str) -> None:
    one = make.dense((L, K, D))
    kv = demoting(LOWER[lower]())
    fill(one, 40)
    fill(kv, 40)
    masks = some(kv)
    assert kv.compress(masks)
    assert not kv.forgets
    assert positions(kv) == [row.nonzero().flatten().tolist() for row in masks[1]]
    for window in (None, 9):
        torch.testing.assert_close(read(kv, window), read(one, window))
    assert kv.usage()[0].slots + kv.usage()[L].slots >= 40


def test_the_oldest_go_too_where_the_top_is_full() -> None:
    kv = demoting(holds=10, sinks=2)
    fill(kv, 40, settle_at=1000)
    masks = [torch.arange(40).expand(K, -1) % 2 == 0 for _ in range(L)]
    kv.compress(masks)
    assert positions(kv) == [[0, *range(20, 40, 2)]] * K


@pytest.mark.parametrize("lower", LOWER)
def test_a_full_tier_forgets_what_came_first_and_says_so(lower: str) -> None:
    def made(evicts_oldest: bool) -> TieredCache:
        kv = demoting(LOWER[lower](), most=12, evicts_oldest=evicts_oldest)
        fill(kv, 40, settle_at=1000)
        return kv

    def settle(kv: TieredCache, last: int) -> None:
        kv.compress([kv.slots(layer).pos >= last for layer in range(L)])

    kv = made(evicts_oldest=True)
    settle(kv, 10)
    assert not kv.forgets
    settle(kv, 20)
    assert kv.forgets
    below = kv._levels[1].tier.slots(0).pos[0]
    assert sorted(below[below >= 0].tolist())[-10:] == list(range(10, 20))
    assert int((below >= 0).sum()) <= 12
    settle(kv, 39)  # more at once than there is room for
    below = kv._levels[1].tier.slots(0).pos[0]
    assert below[below >= 0].tolist() == list(range(27, 39))
    kv.crop(0)
    assert not kv.forgets
    with pytest.raises(CacheFull):
        settle(made(evicts_oldest=False), 20)


def test_a_compression_point_that_fails_at_any_allocation_loses_nothing() -> None:
    one = make.dense((L, K, D))
    fill(one, 40)

    def made() -> tuple[TieredCache, list[Tensor]]:
        kv = demoting()
        fill(kv, 40)
        kv.compress(some(kv))
        return kv, some(kv, 1)

    kv, masks = made()
    with FakeDevice() as device:
        kv.compress(masks)
    assert device.allocations > 20
    for n in range(0, device.allocations, 3):
        kv, masks = made()
        with FakeDevice(fail_at=n), pytest.raises(torch.OutOfMemoryError):
            kv.compress(masks)
        kv.crop(40)
        torch.testing.assert_close(read(kv), read(one))
        kv.compress(some(kv, 2))
        torch.testing.assert_close(read(kv), read(one))


# ---- sessions ----


@cache
def lm() -> LM:
    return exactness.lm("dense", "fp64")


def profile(**changes: Any) -> Profile:
    changes = {
        "policy": {"name": "window", "sinks": 2, "window": 11, "compression_interval": 8},
        "memory": DEMOTE,
        **changes,
    }
    return load_profile("exact").replace(exactness="approx", prefill={"chunk": 13}, **changes)


def opened(**changes: Any) -> GenerationSession:
    return assemble.session(lm(), profile(**changes))


def told(session: GenerationSession) -> list[int]:
    run_to_end(session.read(exactness.prompt()))
    list(iterate_events(session.stream(30)))
    return session.ids


@cache
def whole() -> list[int]:
    session = assemble.session(lm(), load_profile("exact").replace(prefill={"chunk": 13}))
    return told(session)


@pytest.mark.parametrize("policy", ["window", "random", "snap", "h2o", "kvzip", "fastgen"])
def test_sparse_attention_that_reads_everything_gives_the_text_of_the_full_cache(policy: str) -> None:
    settings: dict[str, Any] = {"name": policy, "compression_interval": 8}
    settings |= {"window": {"window": 11}, "random": {"budget": 17, "window": 5}}.get(
        policy, {"keep": 0.2, "recent": 5}
    )
    session = opened(policy=settings, sparse=SMALL | {"fraction": 1.0})
    assert told(session) == whole()
    assert session.cache.n_slots(1) < session.committed - 10, "a part of it lies below"


def test_sparse_attention_that_reads_little_does_not() -> None:
    assert told(opened(sparse=SMALL | {"fraction": 0.01})) != whole()


def test_what_was_lost_is_said_as_what_it_is() -> None:
    reads = opened(sparse=SMALL)
    told(reads)
    assert reads.approximations == {"unread"}
    packs = opened(kv={"k_bits": 8, "v_bits": 8})
    told(packs)
    assert packs.approximations == {"rounded"}
    full = opened(memory=DEMOTE | {"disk": "1GiB"})
    assert told(full) == whole()
    assert full.approximations == set()
    assert set(nbytes(reads.cache)) == {"cpu", "demoted", "index"}
    assert set(nbytes(full.cache)) == {"cpu", "disk"}
    note = approximation_note(profile(sparse=SMALL), {"unread"})
    assert note.startswith("approximate answer: profile exact reads 3% of the text for each token")
    assert "; in addition the first 2 tokens and the newest 11, so facts may be missing" in note
    assert "in 8 bits; in addition the first 2" in describe_losses(profile(kv={"k_bits": 8, "v_bits": 8}))["rounded"]
    assert describe_losses(profile(sparse=SMALL))["forgotten"] == "drops tokens beyond its capacity"


def test_a_full_file_forgets_and_is_said_to() -> None:
    session = opened(memory=DEMOTE | {"disk": "200KiB"})
    run_to_end(session.read(families.prompt(400)))
    assert session.approximations == {"forgotten"}
    assert session.rewind(100) == 0
    assert session.approximations == set()
    with pytest.raises(CacheFull):
        run_to_end(opened(memory=DEMOTE | {"disk": "200KiB", "on_oom": "fail"}).read(families.prompt(400)))


@pytest.mark.parametrize("cut", [20, 35, 60])
def test_an_undo_goes_back_where_nothing_was_forgotten(cut: int) -> None:
    session = opened(sparse=SMALL | {"fraction": 1.0})
    told(session)
    assert session.rewind(cut) == cut - 1
    run_to_end(session.read(families.prompt(9, seed=4)))
    list(iterate_events(session.stream(12)))
    plain = assemble.session(lm(), load_profile("exact").replace(prefill={"chunk": 13}))
    run_to_end(plain.read([*whole()[:cut], *families.prompt(9, seed=4)]))
    list(iterate_events(plain.stream(12)))
    assert session.ids == plain.ids
    dropping = opened(memory={})
    told(dropping)
    assert dropping.rewind(cut) == 0


def test_after_an_undo_what_is_left_competes_anew() -> None:
    session = opened(
        policy={"name": "keydiff", "keep": 0.3, "recent": 5, "sinks": 2, "compression_interval": 8}, sparse=SMALL
    )
    run_to_end(session.read(families.prompt(80)))
    held = session.cache.n_slots(1)
    assert session.rewind(30) == 29
    run_to_end(session.read(families.prompt(60, seed=5)))
    now = (session.cache.slots(1).pos >= 0).sum(1).double().mean()
    assert held // 2 < now <= 0.3 * 89 + 8


def test_a_fork_has_tiers_of_its_own() -> None:
    session = opened(sparse=SMALL)
    run_to_end(session.read(exactness.prompt()))
    other = session.fork()
    list(iterate_events(session.stream(30)))
    list(iterate_events(other.stream(30)))
    assert other.ids == session.ids
    assert nbytes(other.cache) == nbytes(session.cache)


# ---- profiles ----

REFUSED = [
    ({"policy": {"name": "none"}, "sparse": SMALL}, '"demote" moves nothing'),
    ({}, '"demote" has no tier to move to'),
    ({"sparse": SMALL, "memory": DEMOTE | {"device": "1GiB"}}, "share one device"),
    ({"kv": {"v_bits": 8}, "memory": DEMOTE | {"disk": "1GiB"}}, "share one device"),
    ({"sparse": SMALL, "memory": DEMOTE | {"fallbacks": ["kv.v_bits=8"]}}, '"kv.v_bits=8" cannot be taken'),
    ({"kv": {"v_bits": 8, "residual": 7}}, "7 has no effect"),
    ({"sparse": SMALL, "kv": {"sinks": 7}}, "7 has no effect"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadConfig) as caught:
        profile(**changes)
    assert says in "\n".join(caught.value.lines)


def test_a_tier_that_this_device_does_not_have_is_none() -> None:
    with pytest.raises(BadConfig) as caught:
        opened(memory=DEMOTE | {"host": "auto"})
    assert caught.value.code == "no_lower_tier"
    assert set(nbytes(opened(memory=DEMOTE | {"host": "auto"}, sparse=SMALL).cache)) >= {"cpu"}


# ---- facts ----

POLICY = {"name": "snap", "keep": 0.125}


@cache
def model() -> Model:
    return load("demo", "exact", set={"load.device": "cpu", "load.verify": False})


@cache
def texts() -> list[ProbeSample]:
    return samples(model(), 2, 1024, 5000)


def found(sample: ProbeSample, **changes: Any) -> tuple[list[bool], GenerationSession]:
    """Which of a text's numbers are found by questions asked behind it, of which nothing is stored."""
    session = model().with_profile(model().profile.replace(exactness="approx", **changes)).new_session()
    run_to_end(session.read(sample.context))
    (made,) = run([ForwardRequest(model().lm, sample.rows(), session.cache, want=[row for row, _ in sample.scored()])])
    hits = (made.logits.argmax(-1) == torch.tensor([token for _, token in sample.scored()])).tolist()
    right = []
    for one in sample.asked:
        right.append(all(hits[: len(one.value)]))
        hits = hits[len(one.value) :]
    return right, session


def test_a_fact_that_a_policy_let_go_is_found_again() -> None:
    """At an eighth of the tokens nearly all facts are lost; moved down, a row that reads another tenth finds them."""
    reads = {"method": "sketch", "floor": 96}
    ways = {
        "drop": {"policy": POLICY},
        "recalled": {"policy": POLICY, "memory": DEMOTE, "sparse": reads},
        "lowered": {"policy": POLICY, "memory": DEMOTE, "kv": {"k_bits": 4, "v_bits": 4}},
    }
    right = {name: [r for text in texts() for r in found(text, **way)[0]] for name, way in ways.items()}
    assert sum(right["drop"]) <= len(right["drop"]) // 4
    assert all(right["recalled"])
    assert all(right["lowered"])
    _, dropped = found(texts()[0], **ways["drop"])
    _, lowered = found(texts()[0], **ways["lowered"])
    _, full = found(texts()[0])
    small, four, all_ = (sum(nbytes(s.cache).values()) for s in (dropped, lowered, full))
    assert small < four < all_ / 2
