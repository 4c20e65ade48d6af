"""Layers of several sizes, keys that layers share, keys and values of several sizes: the text is `generate`'s, whatever
cuts, drafts, undoes or stores it; memory is what is reported, and what a plan foretells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf import model_probe
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadModel
from kvcli.fit import weights
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.memory import GIB, cache_footprint, kv_bytes, stored
from kvcli.fit.plan import MeasuredFacts, PlannedModel, plan
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.slots import nbytes
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.shape import shape_of
from kvcli.settings.profile import Profile
from tests import all_families, drafters, families, make

NAMES = ("stablelm", "nemotron", "gemma4", "gemma4_shared", "gemma3n", "mimo", "deepseek_v3", "glm4_moe_lite")
SEVERAL = NAMES[2:]
N, NEW = 44, 24
VOCAB, NO_STOP = 97, -1


@cache
def lm(name: str, dtype: torch.dtype = torch.float32) -> LM:
    return make.model(name, dtype)


def ids() -> list[int]:
    phrase = families.prompt(9)
    return [*families.prompt(N - 15, seed=2), *phrase, *phrase[:6]]


@cache
def theirs(name: str, dtype: torch.dtype = torch.float32) -> list[int]:
    """What `generate` writes, prompt included."""
    model = families.build(name, dtype)
    model.generation_config.eos_token_id = None
    return model.generate(torch.tensor([ids()]), max_new_tokens=NEW, do_sample=False)[0].tolist()


def dense(model: LM) -> Dense:
    return make.dense(model, windows=make.windows(model))


STORES: dict[str, Any] = {
    "dense": dense,
    "int8": lambda lm: make.tiered(lm, TierLevel(make.quantized(lm, group=4)), step=8, holds=7, group=4, sinks=2),
    "disk": lambda lm: make.tiered(lm, TierLevel(make.disk(lm)), step=8, holds=7, group=4, sinks=2),
}


def opened(name: str, kv: str = "dense", drafter: Drafter | None = None, **how: Any) -> GenerationSession:
    model = lm(name, how.pop("dtype", torch.float32))
    every = how.pop("every", 16 if kv != "dense" else None)
    return make.session(model, STORES[kv](model), drafter, **{"chunk": 13, "every": every, **how})


def written(session: GenerationSession, new: int = NEW) -> list[int]:
    run_to_end(session.read(ids()[len(session.ids) :]))
    list(iterate_events(session.stream(new)))
    return session.ids


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", NAMES)
def test_in_any_chunks_the_text_is_that_of_generate(name: str, chunk: int) -> None:
    assert written(opened(name, chunk=chunk)) == theirs(name)
    assert len(set(theirs(name)[N:])) > 2, "not one token over and over"


@pytest.mark.parametrize("guesses", [drafters.Moody, drafters.Bush], ids=["chains", "trees"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_are_partly_right_change_nothing(name: str, guesses: Any) -> None:
    drafter = guesses(theirs(name), VOCAB, NO_STOP)
    assert written(opened(name, drafter=drafter)) == theirs(name)
    taken = [(step.n_drafted, len(step.new) - 1) for step in drafter.steps]
    assert any(0 < right < tried for tried, right in taken), "some of a draft, and not all"


@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_on_from_where_it_went_back_to(name: str) -> None:
    for n in (1, N - 7, N, N + 5, N + NEW - 1):
        session = opened(name)
        written(session)
        kept = session.rewind(n)
        assert kept <= n
        run_to_end(session.read(theirs(name)[len(session.ids) : max(n, N)]))
        list(iterate_events(session.stream(N + NEW - len(session.ids))))
        assert session.ids == theirs(name), n


POLICIES: dict[str, Policy | None] = {"all": None, "window": StreamingLLM(sinks=2, window=13)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", STORES)
@pytest.mark.parametrize("name", SEVERAL)
def test_whatever_stores_it_drafts_change_nothing(name: str, kv: str, policy: str) -> None:
    how: dict[str, Any] = {"policy": POLICIES[policy], "every": 11} if policy != "all" else {}
    want = written(opened(name, kv, **how))
    drafter = drafters.Moody(want, VOCAB, NO_STOP)
    assert written(opened(name, kv, drafter, **how)) == want
    if kv != "int8" and policy == "all":
        assert want == theirs(name)


@pytest.mark.parametrize("name", SEVERAL)
def test_in_float64_too(name: str) -> None:
    want = written(opened(name, dtype=torch.float64))
    for kv in STORES:
        if kv != "int8":
            drafter = drafters.Bush(want, VOCAB, NO_STOP)
            assert written(opened(name, kv, drafter, dtype=torch.float64)) == want


@pytest.mark.parametrize("name", SEVERAL)
def test_a_text_that_is_kept_in_layers_of_several_sizes_comes_back(name: str) -> None:
    from kvcli.kv.snapshot import SnapshotReader

    for kv in STORES:
        one, other = opened(name, kv), opened(name, kv)
        run_to_end(one.read(ids()))
        other.cache.restore(SnapshotReader(one.cache.snapshot(), 4096))
        for layer, of in enumerate(one.lm.shapes):
            if of.shared_from is None:
                a, b = one.cache.slots(layer), other.cache.slots(layer)
                assert torch.equal(a.k, b.k)
                assert torch.equal(a.v, b.v)


# ---- who owns what ----


def test_layers_that_share_keys_store_none() -> None:
    for name in ("gemma4_shared", "gemma3n"):
        session = opened(name)
        written(session)
        assert [of.shared_from for of in session.lm.shapes] == [None, None, 0, 1]
        assert {use.layer for use in session.cache.usage()} == {0, 1}


def test_reading_ends_where_the_last_keys_are_made() -> None:
    """Half of the layers of such a model read what others stored, and give a prompt nothing."""
    session, ran = opened("gemma4_shared"), list[int]()
    layers = session.lm.model.model.layers
    hooks = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    try:
        run_to_end(session.read(ids()))
    finally:
        for hook in hooks:
            hook.remove()
    assert set(ran) == {0}, "the second is left before it is over"
    list(iterate_events(session.stream(NEW)))
    assert session.ids == theirs("gemma4_shared")


def test_keys_of_a_wrong_owner_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        return families.build("gemma4_shared", num_hidden_layers=6, layer_types=families.PAIRS * 3)

    own = model_probe._owner
    assert [of.shared_from for of in wrap_lm(build(), verify=True).shapes] == [None, None, None, None, 2, 3]

    def wrong(at: model_probe.ProbedLayer, layers: Sequence[model_probe.ProbedLayer]) -> int | None:
        found = own(at, layers)
        return None if found is None else found - 2

    monkeypatch.setattr(model_probe, "_owner", wrong)
    with pytest.raises(BadModel, match="gives other logits"):
        wrap_lm(build(), verify=True)


# ---- what it takes ----


def held_bytes(kv: Dense) -> int:
    return sum(t.untyped_storage().nbytes() for held in kv._slabs.values() for t in held.tensors)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_reported_is_held_and_foretold(name: str) -> None:
    session = opened(name)
    session.stored_kv.replace(kv := make.dense(session.lm))  # windows that nobody gives back
    run_to_end(session.read(ids()))
    exact = Profile.load("exact")
    foretold = cache_footprint(exact, shape_of(families.config_of(name).to_dict(), name), kv.dtype.itemsize, "cpu")
    assert list(foretold.shapes) == list(session.lm.shapes)
    fit = sum(foretold.layer_bytes(of, kv.n_slots(0), 0) for of in foretold.shapes)
    assert nbytes(kv)["cpu"] == held_bytes(kv) == fit


# of all that `all_families` builds, also those whose configs say sizes in words of their own
WORDS = (
    "cohere2", "dbrx", "deepseek_v2", "exaone4", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode",
    "gpt_neox", "minicpm3", "mimo_v2_flash", "opt", "olmo3", "phi3", "youtu",
)  # fmt: skip


@pytest.mark.parametrize("kind", WORDS)
def test_a_config_says_what_a_loaded_model_does(kind: str) -> None:
    config = all_families.config_of(kind)
    model = wrap_lm(all_families.build(config))
    shape = shape_of(config.get_text_config().to_dict(), kind)
    assert [of for of, _ in stored(shape)] == list(model.shapes)
    assert shape.windows == model.windows


@pytest.mark.parametrize("name", ["gemma4", "gemma4_shared", "gemma3n", "deepseek_v3"])
def test_a_config_as_people_write_it_says_the_same(name: str) -> None:
    """`global_head_dim` and its like, of which transformers writes other words."""
    family = families.FAMILIES[name]
    written = {**families.COMMON, **family.config, "model_type": family.model_type or name}
    assert [of for of, _ in stored(shape_of(written))] == list(lm(name).shapes)


def gemma_4b() -> PlannedModel:
    """Gemma 3 4B by its sizes."""
    shape = shape_of(
        {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208,
            "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
        }
    )  # fmt: skip
    held = weights.of_shape(shape, 2)
    return PlannedModel("gemma", shape, held, "bfloat16", CheckpointFormat(), True, False, sum(h.nbytes for h in held))


def test_gemma_3_4b_at_32k_takes_little_more_than_its_full_layers_and_windows() -> None:
    subject = gemma_4b()
    need = plan(subject, Profile.load("exact"), AvailableMemory("cpu", 64 * GIB), 32_768, MeasuredFacts()).need
    # an answer of 1,024 tokens among it, and what may be undone
    assert need.kv <= 1.2 * kv_bytes(subject.shape, 32_768, 2, windows=True)
