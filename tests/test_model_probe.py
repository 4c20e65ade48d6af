"""Logits of kvcli's pass against those of transformers, family by family, on tiny random weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.session import commit
from kvcli.errors import BadModel, ExitStatus
from tests import make
from tests.families import FAMILIES, WINDOW, build, prompt

PROMPT = 37  # tokens: more than three windows, a prime
NEW = 64  # tokens
# neither softcap nor sinks have a stock forward in float64, nor have routers that score in float32
NARROW = ("gemma2", "gpt_oss", "mimo", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash")


@cache
def stock_logits(name: str, dtype: torch.dtype) -> Tensor:
    """[N, V] of the family's own forward."""
    model = build(name, dtype)
    if model._supports_sdpa and dtype == torch.float64 and name != "gemma2":  # eager takes its softmax in float32
        model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return model(torch.tensor([prompt(PROMPT)])).logits[0]


def our_logits(lm: LM, ids: list[int], chunk: int) -> Tensor:
    """[N, V] of passes of at most `chunk` rows, each committed before the next."""
    kv = make.dense(lm)
    logits = []
    for a in range(0, len(ids), chunk):
        rows = Rows.chain(ids[a : a + chunk], a)
        (made,) = run([ForwardRequest(lm, rows, kv, want=range(rows.n_rows))])
        logits.append(made.logits)
        commit(kv, rows, made, range(rows.n_rows))
    return torch.cat(logits)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_logits_equal_the_stock_forward(name: str, dtype: torch.dtype):
    lm, stock = make.model(name, dtype), stock_logits(name, dtype)
    is_wide = dtype == torch.float64 and name not in NARROW
    within = 1e-10 if is_wide else 2e-5
    for chunk in (PROMPT, 13, 1):  # one pass; chunks across and inside the window; plain decoding
        off = float((our_logits(lm, prompt(PROMPT), chunk) - stock).abs().max() / stock.abs().max())
        assert off < within, f"chunks of {chunk}"


@pytest.mark.parametrize(
    ("name", "change"), [(f.name, change) for f in FAMILIES.values() for change in f.matters], ids=str
)
def test_what_a_family_adds_is_visible(name: str, change: dict[str, Any]):
    """Else the test above would pass with a forgotten softcap, window or multiplier."""
    with torch.inference_mode():
        without = build(name, **change)(torch.tensor([prompt(PROMPT)])).logits[0]
    assert (without - stock_logits(name, torch.float32)).abs().max() > 0.1


@pytest.mark.parametrize(("name", "end"), [(f.name, end) for f in FAMILIES.values() for end in f.zeroed])
def test_biases_norms_and_sinks_are_visible(name: str, end: str):
    model = build(name)
    for key, weight in model.named_parameters():
        if key.endswith(end):
            weight.zero_()
    with torch.inference_mode():
        without = model(torch.tensor([prompt(PROMPT)])).logits[0]
    assert (without - stock_logits(name, torch.float32)).abs().max() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_generate(name: str):
    model, ids = build(name), prompt(PROMPT, seed=2)
    model.generation_config.eos_token_id = None  # some families bring stop tokens of their own
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist()
    lm = wrap_lm(model)
    for chunk in (64, 7):
        session = make.session(lm, chunk=chunk)
        run_to_end(session.read(ids))
        for _ in iterate_events(session.stream(NEW)):
            pass
        assert session.ids[PROMPT:] == theirs, f"chunks of {chunk}"
    assert len(set(theirs)) > 2  # not one token over and over


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_windows_are_read_off_the_model(family: Any):
    assert make.model(family.name).windows == family.windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_self_check_accepts(name: str, dtype: torch.dtype):
    make.model(name, dtype, verify=True)


def test_longrope_uses_one_table_for_the_whole_text():
    """transformers chooses between two by the longest position of each call; a text read in chunks would mix them."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=20)
    with torch.inference_mode():
        stock = model(torch.tensor([prompt(PROMPT)])).logits[0]
        short = model(torch.tensor([prompt(20)])).logits[0]
    assert (stock[:20] - short).abs().max() > 0.1  # the tables differ
    lm = wrap_lm(model)
    for chunk in (PROMPT, 7):
        torch.testing.assert_close(our_logits(lm, prompt(PROMPT), chunk), stock, rtol=1e-4, atol=1e-4)
    assert lm.info.notes == ("rope: the table for texts beyond 20 tokens is used for shorter texts too",)


def test_dynamic_rope_ends_where_it_would_change_stored_keys():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    lm = make.model("llama", rope_parameters=rope)
    assert lm.limit == 128
    assert "context ends at 128 tokens" in lm.info.notes[0]


# ---- what the self-check must notice ----

_FORGOTTEN = {"softcap": "gemma2", "s_aux": "gpt_oss", "sliding_window": "gemma3", "scaling": "granite"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", _FORGOTTEN)
def test_the_self_check_notices_what_is_forgotten(key: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    from transformers import AttentionInterface

    from kvcli.engine import forward

    def careless(*args: Any, **asked: Any) -> Any:
        asked.pop(key)
        return forward.attention(*args, **asked)

    make.model()  # so that ours is registered, and only then replaced
    monkeypatch.setitem(AttentionInterface._global_mapping, "kvcli", careless)
    with pytest.raises(BadModel, match=_FORGOTTEN[key]) as caught:
        make.model(_FORGOTTEN[key], dtype, id="mine", verify=True)
    assert caught.value.exit == ExitStatus.BAD_MODEL
    assert "gives other logits than transformers'" in caught.value.message
    assert any("expect wrong text" in line for line in caught.value.try_)


def test_sliding_layers_are_tested_beyond_their_window():
    assert PROMPT > 3 * WINDOW
