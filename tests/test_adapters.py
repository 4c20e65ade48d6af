"""LoRA adapters: merged into plain weights, beside quantized ones, and refused if kvcli would compute other numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kvcli.engine.loading.adapters import AdaptedLinear, apply_adapters
from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadModel
from kvcli.fit.weights import Weights
from kvcli.kernels.linear import use_native_linear_
from kvcli.kernels.linear_quantized import PackedLinear
from kvcli.models import source
from kvcli.models.adapters import find_adapter, lasting, located
from kvcli.prefix_cache.prefix_cache import cache_key
from tests.families import build

PREFIX = "base_model.model."
Q = "model.layers.1.self_attn.q_proj"
EMBEDDING = "model.embed_tokens"


def matrices(layer: str, n: int, k: int, rank: int = 3, *, of: str = "") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(len(layer) + rank)
    a, b = torch.randn(rank, k, generator=draw), torch.randn(n, rank, generator=draw)
    names = ("lora_embedding_A", "lora_embedding_B") if of else ("lora_A.weight", "lora_B.weight")
    return {f"{PREFIX}{layer}.{name}": t for name, t in zip(names, (a, b), strict=True)}


def adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "init_lora_weights": True, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return str(folder)


def product(tensors: dict[str, Tensor]) -> Tensor:
    a, b = tensors.values()
    return b @ a


CASES = {  # settings -> factor of B A
    "plain": ({}, 2.0),
    "rslora": ({"use_rslora": True}, 6 / 3**0.5),
    "patterns": (
        {"r": 8, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"^model.layers.1.self_attn.q_proj$": 12}},
        4.0,
    ),
    "other layer": ({"alpha_pattern": {"layers.0.self_attn.q_proj": 12}}, 2.0),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_added_by_its_scale(tmp_path: Path, case: str):
    config, scale = CASES[case]
    model, pair = build("llama"), matrices(Q, 64, 48)
    before = {name: p.clone() for name, p in model.named_parameters()}
    apply_adapters(model, [find_adapter(adapter(tmp_path / "a", pair, **config))], lambda _: None)
    for name, after in model.named_parameters():
        change = scale * product(pair) if name == f"{Q}.weight" else 0
        torch.testing.assert_close(after, before[name] + change)


def test_several_adapters_are_added_by_weight_and_rounded_once(tmp_path: Path):
    model, one, two = build("llama").to(torch.bfloat16), matrices(Q, 64, 48), matrices(Q, 64, 48, 5)
    texts = [adapter(tmp_path / "a", one) + ":0.5", adapter(tmp_path / "b", two, r=5, lora_alpha=5) + ":-2"]
    wanted = model.get_submodule(Q).weight.float() + product(one) - 2 * product(two)
    apply_adapters(model, [*map(find_adapter, texts)], lambda _: None)
    changed = model.get_submodule(Q).weight
    assert (changed != wanted.to(torch.bfloat16)).float().mean() < 0.01


def test_an_embedding_is_changed_apart_from_a_head_that_shares_it_and_modules_are_replaced(tmp_path: Path):
    model, pair = build("llama", tie_word_embeddings=True), matrices(EMBEDDING, 48, 97, of="embedding")
    before = model.lm_head.weight.clone()
    norm = {f"{PREFIX}model.norm.weight": torch.full((48,), 3.0)}
    found = find_adapter(adapter(tmp_path / "a", pair | norm, modules_to_save=["norm"]))
    apply_adapters(model, [found], lambda _: None)
    torch.testing.assert_close(model.get_input_embeddings().weight, before + 2 * product(pair).T)
    torch.testing.assert_close(model.lm_head.weight, before)
    assert model.model.norm.weight.unique().tolist() == [3.0]


def test_beside_quantized_weights_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path):
    torch.manual_seed(5)
    model = nn.Module()
    plain = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    model.q, model.dtype = PackedLinear.of(plain, 4), torch.bfloat16  # type: ignore[assignment]
    base, pair = model.q, matrices("q", 96, 64)
    apply_adapters(model, [find_adapter(adapter(tmp_path / "a", pair))], lambda _: None)
    layer: Any = model.q
    assert isinstance(layer, AdaptedLinear)
    use_native_linear_(model)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    y = layer(x)
    torch.testing.assert_close(y, base(x) + (2 * x.float() @ product(pair).T).to(y.dtype), rtol=0.05, atol=0.3)
    assert (y - base(x)).abs().max() > 1
    assert all(torch.equal(layer(x[i : i + 1]), y[i : i + 1]) for i in range(7))


REFUSED = {  # settings or tensors -> words of the error
    "DoRA": ({"use_dora": True}, {}, "use_dora = True"),
    "bias": ({"bias": "lora_only"}, {}, "bias = lora_only"),
    "replication": ({"layer_replication": [[0, 2]]}, {}, "layer_replication"),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = pissa"),
    "a later setting": ({"use_later": {"x": 1}}, {}, "use_later"),
    "another kind": ({"peft_type": "IA3"}, {}, "IA3"),
    "pattern": ({"rank_pattern": {"(a+)+": 3}}, {}, "regular expression"),
    "rank": ({"r": 4}, {}, "rank 4"),
    "half a pair": ({}, {f"{PREFIX}x.lora_A.weight": torch.ones(3, 48)}, "layer x"),
    "unknown tensor": ({}, {f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(48)}, "1 of 3 tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(tmp_path: Path, case: str):
    config, tensors, words = REFUSED[case]
    with pytest.raises(BadModel) as caught:
        find_adapter(adapter(tmp_path / "a", matrices(Q, 64, 48) | tensors, **config))
    assert words in caught.value.message
    assert (caught.value.code, len(caught.value.try_)) == ("adapter_unsupported", 1)


MISMATCHES = {
    "names": (matrices("model.layers.9.self_attn.q_proj", 64, 48) | matrices(Q, 64, 48), "1 of 2 layers"),
    "sizes": (matrices(Q, 64, 40), "64 x 40 weights, and the model has 64 x 48"),
    "no linear layer": (matrices("model.norm", 48, 48), "is for no linear layer"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, case: str):
    tensors, words = MISMATCHES[case]
    with pytest.raises(BadModel) as caught:
        apply_adapters(build("llama"), [find_adapter(adapter(tmp_path / "a", tensors))], lambda _: None)
    assert words in caught.value.message
    assert caught.value.code == "adapter_mismatch"


def test_pickled_and_missing_adapters_are_refused(tmp_path: Path):
    folder = Path(adapter(tmp_path / "a", matrices(Q, 64, 48)))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    missing = [(name, "", "adapter_missing") for name in ("/none", "", ":0.5")]
    for name, words, code in ((str(folder), "pickle", "adapter_unsupported"), *missing):
        with pytest.raises(BadModel) as caught:
            find_adapter(name)
        assert words in "".join(caught.value.lines)
        assert caught.value.code == code


def test_a_model_is_loaded_with_its_adapters_and_known_by_them(tmp_path: Path):
    build("llama").save_pretrained(tmp_path / "m")
    text = adapter(tmp_path / "a", matrices(Q, 64, 48))
    keys = []
    for adapters in ((), (text,), (f"{text}:0.5",)):
        lm = open_lm(source.find(str(tmp_path / "m")), device="cpu", adapters=adapters)
        keys.append(json.dumps(cache_key(lm)))
    assert len({*keys}) == 3
    assert located(text) == (text, 1.0)
    assert located(f"{text}:0.5") == (text, 0.5)
    assert lasting(f"{text}:0.5") == f"{text}:0.5"


def test_the_memory_estimate_counts_adapters():
    found = Weights(memory=100, files=100, loaded=0, read=100, largest=20)
    assert found.with_adapters(0, 2) == found
    more = found.with_adapters(7, 2)
    assert (more.memory, more.packing) == (107, 120)
