"""Rotary embedding: its tables are found for every family, and keys turn back to what they were before it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadModel
from kvcli.kernels.rope import rotate, unrotate
from kvcli.kv.slots import storing_layer_of
from tests import families, make

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + i for i in range(6)],
    "original_max_position_embeddings": 64,
}


@cache
def lm(name: str, dtype: torch.dtype = torch.float64) -> LM:
    return make.model(name, dtype)


def read(model: LM) -> GenerationSession:
    """A text in which each token stands twice."""
    session = make.session(model, chunk=13)
    run_to_end(session.read([*families.prompt(20), *families.prompt(20)]))
    list(iterate_events(session.stream(12)))
    return session


def bare(session: GenerationSession, layer: int) -> torch.Tensor:
    """Keys of a layer as they were before the rotary embedding."""
    s, rotary = session.cache.slots(layer), rotaries(session.lm)[storing_layer_of(session.lm.shapes)[layer]]
    return s.k if rotary is None else unrotate(s.k, s.pos, rotary)


@pytest.mark.parametrize("name", [f.name for f in families.FAMILIES.values() if f.has_tables])
def test_keys_of_every_family_turn_back_and_forth(name: str) -> None:
    session = read(lm(name))
    turns = rotaries(session.lm)
    for layer, holder in enumerate(storing_layer_of(session.lm.shapes)):
        s, raw, rotary = session.cache.slots(layer), bare(session, layer), turns[holder]
        assert torch.allclose(raw, s.k, atol=1e-3) is (rotary is None)
        if rotary is not None:
            torch.testing.assert_close(rotate(raw, s.pos, rotary), s.k, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "glm4", "smollm3", "cohere2"])
def test_a_token_has_one_key_before_rope_wherever_it_stands(name: str) -> None:
    first = bare(read(lm(name)), 0)
    torch.testing.assert_close(first[:, :20], first[:, 20:40], atol=1e-10, rtol=1e-10)


def test_what_is_turned_back_is_the_key_before_rope() -> None:
    """As the projection made it: nothing of its position is left."""
    model, made = lm("llama"), []
    hook = model.model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *a: made.append(a[2][0]))
    try:
        session = read(model)
    finally:
        hook.remove()
    want = torch.cat(made)[-51:].unflatten(1, (model.n_kv_heads, -1)).transpose(0, 1)
    torch.testing.assert_close(bare(session, 1), want, atol=1e-10, rtol=1e-10)


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


def test_longrope_that_stays_with_one_table_is_served() -> None:
    model = make.model("phi3", torch.float64, sliding_window=None, rope_parameters=LONGROPE)
    assert all(r is not None for r in rotaries(model))
    first = bare(read(model), 0)
    torch.testing.assert_close(first[:, :20], first[:, 20:40], atol=1e-10, rtol=1e-10)


def test_tables_that_depend_on_length_are_refused_by_name() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make.model("llama", rope_parameters=dynamic, id="stretchy")
    with pytest.raises(BadModel, match=r"stretchy \(llama\) .*dynamic") as refused:
        rotaries(model)
    assert refused.value.try_

    model = make.model("phi3", sliding_window=None, rope_parameters=LONGROPE, id="two-tables")
    for part in model.model.modules():  # as transformers has it: short texts by the short table
        if hasattr(part, "original_inv_freq"):
            part.original_inv_freq = part.original_inv_freq * 3
    with pytest.raises(BadModel, match=r"two-tables \(phi3\) .*no fixed table"):
        rotaries(model)


def test_a_model_without_rotary_embedding_is_refused_by_name() -> None:
    model = make.model("llama", id="bare")
    model.model.model.rotary_emb._buffers.clear()
    with pytest.raises(BadModel, match=r"bare .*no rotary embedding"):
        rotaries(model)
