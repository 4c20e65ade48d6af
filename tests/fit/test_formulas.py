"""The arithmetic of docs/design/fit.md on published configs: no model is loaded, no file read."""

from __future__ import annotations

import pytest

from kvcli.errors import BadModel
from kvcli.fit.memory import GIB, kv_bytes
from kvcli.fit.speed import at, reading_flop
from kvcli.fit.weights import of_shape, weigh
from kvcli.models.machine import kept_free
from kvcli.models.shape import Shape, shape_of

KIB = 1 << 10


def config(layers, hidden, heads, kv_heads, head_dim, inner, vocab, **more):
    names = (
        "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
    )
    values = (layers, hidden, heads, kv_heads, head_dim, inner, vocab)
    return dict(zip(names.split(), values, strict=True)) | {"max_position_embeddings": 131072} | more


QWEN3_8B = config(36, 4096, 32, 8, 128, 12288, 151936, max_position_embeddings=40960, tie_word_embeddings=False)
GEMMA = {"sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True}

# config, KV of a token in KiB at bf16, int8 and int4, KV at 32k and 128k in GiB, weights nf4, int8, bf16 in GiB
TABLE = {
    "Llama-3.1-8B": (config(32, 4096, 32, 8, 128, 14336, 128256), (128, 65.0, 36.0), (4.00, 16.0), (5.31, 8.56, 14.96)),
    "Qwen2.5-7B": (config(28, 3584, 28, 4, 128, 18944, 152064), (56, 28.4, 15.8), (1.75, 7.0), (5.17, 8.20, 14.18)),
    "Qwen3-4B": (
        config(36, 2560, 32, 8, 128, 9728, 151936, tie_word_embeddings=True),
        (144, 73.1, 40.5),
        (4.50, 18.0),
        (2.47, 4.16, 7.49),
    ),
    "Qwen3-8B": (QWEN3_8B, (144, 73.1, 40.5), (4.50, 18.0), (5.66, 8.89, 15.26)),
    "Phi-4-mini": (
        config(32, 3072, 24, 8, 128, 8192, 200064, tie_word_embeddings=True),
        (128, 65.0, 36.0),
        (4.00, 16.0),
        (2.69, 4.19, 7.14),
    ),
    "Gemma-3-4B": (
        config(34, 2560, 8, 4, 256, 10240, 262208, **GEMMA),
        (20, 10.1, 5.6),
        (0.74, 2.61),
        (2.79, 4.29, 7.23),
    ),
    "Gemma-3-12B": (
        config(48, 3840, 16, 8, 256, 15360, 262208, **GEMMA),
        (64, 32.2, 18.0),
        (2.31, 8.31),
        (7.04, 12.05, 21.91),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_keys_and_values_are_those_of_the_published_table(name):
    made, per_token, whole, _ = TABLE[name]
    shape = shape_of(made)
    seen_by_all = sum(window is None for window in shape.windows)
    numbers = (2, 1 + 2 / shape.head_dim, 0.5 + 4 / 64)
    for number, kib in zip(numbers, per_token, strict=True):
        found = 2 * seen_by_all * shape.kv_heads * shape.head_dim * number / KIB
        assert found == pytest.approx(kib, abs=0.06)  # the table rounds to a tenth
    for tokens, gib in zip((32768, 131072), whole, strict=True):
        assert kv_bytes(shape, tokens, 2, windows=True) / GIB == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("quant", "column"), [("nf4", 0), ("int8", 1), ("none", 2)])
def test_weights_are_those_of_the_published_table(name, quant, column):
    made, _, _, weights = TABLE[name]
    shape = shape_of(made)
    found = weigh(of_shape(shape), shape, number=2, quant=quant, device="cuda", given=False)
    assert found.memory / GIB == pytest.approx(weights[column], rel=0.02)


def test_a_token_of_qwen3_8b_takes_144_kib_and_32k_of_them_4_and_a_half_gib():
    shape = shape_of(QWEN3_8B)
    assert shape.kv_per_token * 2 == 2 * 36 * 8 * 128 * 2 == 147_456
    assert kv_bytes(shape, 32_768, 2) == 4.5 * GIB
    mixed = ((4 + 2) / 2 + 2 * 16 / 64) / 8  # bytes of a number: keys in 4 bits, values in 2, a scale and a zero per 64
    assert kv_bytes(shape, 32_768, mixed) / GIB == pytest.approx(0.98, abs=0.005)


def test_at_most_a_gibibyte_is_kept_free_and_a_tenth_where_there_is_little():
    assert kept_free(int(11.6 * GIB)) == GIB
    assert kept_free(GIB) == GIB // 10


def test_copies_of_slots_take_as_much_in_sliding_layers_as_in_others():
    shape = shape_of(TABLE["Gemma-3-4B"][0])
    assert kv_bytes(shape, 8192, 2) == 34 * kv_bytes(
        shape_of(TABLE["Gemma-3-4B"][0] | {"num_hidden_layers": 1}), 8192, 2
    )
    assert kv_bytes(shape, 8192, 2, windows=True) < kv_bytes(shape, 8192, 2)


def test_experts_are_all_in_memory_and_few_are_read():
    shape = shape_of(config(4, 64, 4, 2, 16, 256, 100, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32))
    assert (shape.inner, shape.experts, shape.active) == (32, 8, 2)
    found = weigh(of_shape(shape), shape, number=2, quant="none", device="cpu", given=False)
    assert found.memory > 2 * shape.linear
    assert found.read < found.memory / 2


@pytest.mark.parametrize(("device", "quant", "most"), [
    ("cpu", "int4", 0.30), ("cuda", "int4", 0.30), ("cpu", "int8", 0.53), ("cuda", "int8", 0.53), ("cuda", "nf4", 1.0),
])  # fmt: skip
def test_experts_are_quantized_as_layers_are(device, quant, most):
    """Of the size of Qwen3.6-35B-A3B, embeddings and head among them."""
    shape = Shape(40, 2048, 16, 2, 256, 512, 248_320, 262_144, (None,) * 40, experts=256, active=8)
    whole, found = (
        weigh(of_shape(shape), shape, number=2, quant=kind, device=device, given=False) for kind in ("none", quant)
    )
    assert most - 0.03 < found.memory / whole.memory <= most
    assert found.packing > whole.packing > 0


def test_older_names_and_missing_sizes():
    shape = shape_of({"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
    assert (shape.kv_heads, shape.head_dim, shape.inner, shape.limit) == (12, 64, 3072, 1024)
    with pytest.raises(BadModel) as caught:
        shape_of({"model_type": "strange", "vocab_size": 9})
    assert caught.value.code == "model_sizes"
    assert "num_hidden_layers" in caught.value.lines[0]


def test_reading_is_two_flop_a_weight_and_scores_with_all_earlier_tokens():
    shape = Shape(1, 8, 2, 1, 4, 16, 10, 100, (None,))
    n = 10
    attention = 2 * 2 * 2 * 4 * n * n / 2  # scores and sums, of 2 heads of 4, half the square
    assert reading_flop(shape, n) == 2 * shape.linear * n + attention
    near = Shape(1, 8, 2, 1, 4, 16, 10, 100, (2,))
    assert reading_flop(near, n) == 2 * shape.linear * n + 2 * 2 * 2 * 4 * n * 2


def test_times_between_and_beyond_what_was_measured():
    line = [(512, 1.0), (2048, 2.0)]
    assert at(line, 1280) == 1.5
    assert at(line, 3584) == 3.0
    assert at(line, 0) == 1.0
    assert at([(512, 1.0)], 9999) == 1.0


@pytest.mark.parametrize("wrong", [-1, "x", [1, 2], {"0": 3}, float("nan")])
@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("num_kv_shared_layers", {"layer_types": ["full_attention"] * 32}),
        ("linear_key_head_dim", {"layer_types": ["linear_attention"] * 32, "linear_num_value_heads": 4}),
        ("conv_L_cache", {"layer_types": ["conv"] * 32}),
    ],
)
def test_a_size_of_layers_that_is_none_is_named(key, more, wrong):
    with pytest.raises(BadModel, match=key):
        shape_of(config(32, 4096, 32, 8, 128, 14336, 128256) | more | {key: wrong})
