"""Keys before rotary embedding: found for every family, stored without, read as if they had been stored with."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvcli.drafts.off import Off
from kvcli.engine.engine import drive, events
from kvcli.engine.lm import LM
from kvcli.engine.rope import rotaries
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.errors import BadModel
from kvcli.kernels.rotate import Rotary
from kvcli.kv.dense import Dense
from kvcli.kv.slots import alike
from tests import drafters, families
from tests.policies import Ragged, masks

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + i for i in range(6)],
    "original_max_position_embeddings": 64,
}


@cache
def lm(name: str, dtype: torch.dtype = torch.float64) -> LM:
    return LM.of(families.build(name, dtype))


def store(model: LM, rope: bool) -> Dense:
    return Dense(model.shapes, model.dtype, rope=rotaries(model) if rope else None)


def read(model: LM, rope: bool) -> Session:
    session = Session(model, store(model, rope), Off(), Sampler(), chunk=13)
    drive(session.read(families.prompt(40)))
    list(events(session.stream(12)))
    return session


@pytest.mark.parametrize("name", [f.name for f in families.FAMILIES.values() if f.has_tables])
def test_stored_before_rope_every_family_reads_the_same(name: str) -> None:
    model = lm(name)
    without, plain = read(model, rope=True), read(model, rope=False)
    assert without.ids == plain.ids
    for layer in range(model.n_layers):
        a, b, raw = without.kv.slots(layer), plain.kv.slots(layer), without.kv.slots(layer, rotated=False)
        torch.testing.assert_close(a.k, b.k, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(a.v, b.v, atol=1e-10, rtol=1e-10)
        turns = rotaries(model)[layer] is not None
        assert torch.allclose(raw.k, b.k, atol=1e-3) is not turns


def test_what_lies_in_memory_is_the_key_before_rope() -> None:
    """As the projection made it: nothing of its position is left."""
    model, made = lm("llama"), []
    hook = model.model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *a: made.append(a[2][0]))
    try:
        session = read(model, rope=True)
    finally:
        hook.remove()
    want = torch.cat(made)[-51:].unflatten(1, (model.n_kv_heads, -1)).transpose(0, 1)
    torch.testing.assert_close(session.kv.slots(1, rotated=False).k, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "glm4", "smollm3", "cohere2"])
def test_tables_are_found_in_rounded_models_too(name: str, dtype: torch.dtype) -> None:
    assert len(rotaries(lm(name))) == lm(name).n_layers
    for found, want in zip(rotaries(lm(name, dtype)), rotaries(lm(name)), strict=True):
        assert (found is None) is (want is None)
        if found is not None and want is not None:
            assert found.interleaved is want.interleaved
            torch.testing.assert_close(found.inv_freq.double(), want.inv_freq.double(), atol=1e-2, rtol=1e-2)


def test_layers_have_tables_of_their_own() -> None:
    sliding, full, again = (r for r in rotaries(lm("gemma3")) if r is not None)
    assert not torch.equal(sliding.inv_freq, full.inv_freq)
    assert torch.equal(sliding.inv_freq, again.inv_freq)
    first, none, third = rotaries(lm("smollm3"))
    assert (first is None, none is None, third is None) == (False, True, False)
    assert all(r is not None and r.interleaved for r in rotaries(lm("glm4")))
    assert all(r is not None and r.scaling > 1.01 for r in rotaries(lm("gpt_oss")))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.9, seed=3)])
def test_drafts_and_evictions_over_keys_before_rope_give_the_same_text(sampler: Sampler) -> None:
    model = lm("gemma3")

    def text(rope: bool, drafter: object) -> list[int]:
        session = Session(model, store(model, rope), drafter, sampler, policy=Ragged(), every=11, chunk=13)  # type: ignore[arg-type]
        drive(session.read(families.prompt(40)))
        list(events(session.stream(30)))
        return session.ids

    plain = text(rope=False, drafter=Off())
    for drafter in (Off(), drafters.Moody(plain, 97, -1), drafters.Bush(plain, 97, -1)):
        assert text(rope=True, drafter=drafter) == plain


def test_what_falls_out_and_what_is_taken_in_is_rotated() -> None:
    model = lm("llama")
    a, b = store(model, rope=True), store(model, rope=False)
    g = torch.Generator().manual_seed(3)
    k, v = (torch.randn(model.n_kv_heads, 20, model.head_dim, generator=g, dtype=torch.float64) for _ in "kv")
    mask = torch.rand(model.n_kv_heads, 20, generator=g) < 0.5
    for kv in (a, b):
        kv.append(0, k, v, 0)
    fell = [kv.keep(0, mask) for kv in (a, b)]
    held = fell[1].pos >= 0
    torch.testing.assert_close(fell[0].k[held], fell[1].k[held])
    for kv, slots in zip((a, b), fell, strict=True):
        kv.take(0, slots)
    torch.testing.assert_close(a.slots(0).k, b.slots(0).k)
    assert torch.equal(a.slots(0).pos, b.slots(0).pos)
    whole = b.slots(0)
    a.put(1, whole)
    torch.testing.assert_close(a.slots(1).k, whole.k)
    torch.testing.assert_close(a.newest(1, 3).k, b.newest(0, 3).k)


def test_evicting_again_and_again_rounds_a_key_once() -> None:
    rotary = Rotary(100.0 ** (-torch.arange(0, 8, 2) / 8))
    kv = Dense(alike(1, 1, 8), torch.bfloat16, rope=[rotary])
    k = torch.randn(1, 60, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kv.append(0, k, k, 0)
    once = kv.slots(0).k
    torch.testing.assert_close(once, k, atol=0.03, rtol=0.03)
    for n in range(59, 29, -1):
        kv.settle(masks(kv, lambda layer, s, n=n: s.pos < n))
    assert torch.equal(kv.slots(0).k, once[:, :30])


def test_longrope_that_stays_with_one_table_is_served() -> None:
    model = LM.of(families.build("phi3", torch.float64, sliding_window=None, rope_parameters=LONGROPE))
    assert all(r is not None for r in rotaries(model))
    without, plain = read(model, rope=True), read(model, rope=False)
    torch.testing.assert_close(without.kv.slots(2).k, plain.kv.slots(2).k, atol=1e-10, rtol=1e-10)


def test_tables_that_depend_on_length_are_refused_by_name() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LM.of(families.build("llama", rope_parameters=dynamic), id="stretchy")
    with pytest.raises(BadModel, match=r"stretchy \(llama\) .*dynamic") as refused:
        rotaries(model)
    assert refused.value.try_

    model = LM.of(families.build("phi3", sliding_window=None, rope_parameters=LONGROPE), id="two-tables")
    for part in model.model.modules():  # as transformers has it: short texts by the short table
        if hasattr(part, "original_inv_freq"):
            part.original_inv_freq = part.original_inv_freq * 3
    with pytest.raises(BadModel, match=r"two-tables \(phi3\) .*no fixed table"):
        rotaries(model)


def test_a_model_without_rotary_embedding_is_refused_by_name() -> None:
    model = LM.of(families.build("llama"), id="bare")
    model.model.model.rotary_emb._buffers.clear()
    with pytest.raises(BadModel, match=r"bare .*no rotary embedding"):
        rotaries(model)
