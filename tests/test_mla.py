"""Latent attention: one key a token in place of keys and values of all heads, which changes no text and a tenth of the
bytes."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import generate_together, iterate_events, run_to_end
from kvcli.engine.hf.cache_shim import CacheShim
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.mla import LatentProjection
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadModel
from kvcli.kernels.native import native
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.slots import KVCache, LayerShape, Slots, nbytes, run_of
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.policies.expected_attention import Expected
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.keydiff import KeyDiff
from kvcli.methods.policies.snapkv import Snap
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.methods.policies.vatp import Vatp
from kvcli.models.shape import shape_of
from kvcli.prefix_cache.block_tree import LENGTH, Block, read
from kvcli.prefix_cache.codec import Uncompressed
from tests import drafters, make
from tests.families import LATENT, build, config_of, prompt

NEW, STOP = 40, 96
R, T = 24, 8  # numbers of a latent, and of the part behind it that is turned


@cache
def lm(name: str, dtype: torch.dtype = torch.float32) -> LM:
    return make.model(name, dtype, verify=True)


@cache
def theirs(name: str) -> list[int]:
    """What the model's own `generate` writes behind the prompt, which is in it."""
    model, ids = build(name), text()
    model.generation_config.eos_token_id = None
    found: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    assert len(set(found[len(ids) :])) > 2  # not one token over and over
    return found


def text() -> list[int]:
    phrase = prompt(9)
    return prompt(17, seed=2) + phrase + prompt(5, seed=3) + phrase[:6]


def packed(model: LM, k_bits: int = 8, v_bits: int = 8, **how: Any) -> KVCache:
    below = make.quantized(model, (k_bits, v_bits), group=4, **how)
    return make.tiered(model, TierLevel(below), holds=7, group=4, sinks=2)


def opened(
    model: LM, drafter: Drafter | None = None, kv: KVCache | None = None, chunk: int = 13, **more: Any
) -> GenerationSession:
    store = kv or make.dense(model)
    return make.session(model, store, drafter, chunk=chunk, **more)


def answered(session: GenerationSession, ids: list[int] | None = None, n: int = NEW) -> list[int]:
    run_to_end(session.read((ids or text())[len(session.ids) :]))
    for _ in iterate_events(session.stream(n)):
        pass
    return session.ids


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_the_text_is_that_of_generate_in_any_chunks(name: str, chunk: int) -> None:
    model = lm(name)
    assert all(of.rank == R for of in model.shapes)
    assert answered(opened(model, chunk=chunk)) == theirs(name)


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("kind", drafters.ADVERSARIES)
def test_drafts_and_trees_that_are_taken_in_part_change_nothing(name: str, kind: Any) -> None:
    truth = theirs(name)
    assert answered(opened(lm(name), kind(truth, 97, STOP))) == truth


@pytest.mark.parametrize("name", LATENT)
def test_double_precision_writes_the_same(name: str) -> None:
    assert answered(opened(lm(name, torch.float64))) == theirs(name)


@pytest.mark.parametrize("name", LATENT)
def test_a_text_that_was_rewound_or_forked_goes_on_as_if_it_had_not(name: str) -> None:
    truth, session = theirs(name), opened(lm(name))
    answered(session)
    for at in (70, 50, 38, 20, 1):
        fork = copy.deepcopy(session)
        session.rewind(at)
        answered(session, truth[: max(at, len(text()))], len(truth) - max(at, len(text())))
        assert session.ids == truth
        assert fork.ids == truth
        fork.rewind(60)
        assert answered(fork, truth[:60], len(truth) - 60) == truth


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("store", ["window", "int8", "int4", "disk"])
def test_drafts_over_less_of_the_kv_cache_write_what_plain_decoding_does(name: str, store: str) -> None:
    model = lm(name)

    def of(drafter: Drafter | None = None) -> list[int]:
        if store == "window":
            return answered(opened(model, drafter, policy=StreamingLLM(sinks=2, window=13), every=11))
        bits = {"int8": (8, 8), "int4": (4, 4)}.get(store)
        below = make.disk(model)
        disk = make.tiered(model, TierLevel(below), holds=7, group=5, sinks=2)
        return answered(opened(model, drafter, disk if bits is None else packed(model, *bits), every=16))

    plain = of()
    if store == "disk":
        assert plain == theirs(name)
    for kind in (drafters.Moody, drafters.Bush):
        assert of(kind(plain, 97, STOP)) == plain


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.skipif(native() is None, reason="no native kernels")
def test_a_row_has_the_same_bits_alone_in_a_draft_and_beside_others(name: str) -> None:
    model = make.model(name, torch.bfloat16)
    install_kernels(model)
    assert model.is_row_invariant
    assert all(latent.panels is not None for latent in model.latents.values())
    plain = answered(opened(model))
    assert answered(opened(model, drafters.Bush(plain, 97, STOP), chunk=7)) == plain

    def work(session: GenerationSession) -> Any:
        yield from session.read(text())
        yield from session.stream(NEW)
        return session.ids

    for ticket in generate_together(*(work(opened(model, chunk=chunk)) for chunk in (5, 11, 64))):
        assert ticket.result() == plain


def test_a_latent_without_its_turn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As would be one whose turned part came before it was turned."""
    update = CacheShim.update

    def unturned(self: CacheShim, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return update(self, k, v[:, :, :1].expand_as(v), layer_idx)

    model = lm("youtu")
    monkeypatch.setattr(CacheShim, "update", unturned)
    assert answered(opened(model)) != theirs("youtu")
    with pytest.raises(BadModel, match="gives other logits"):
        make.model("youtu", verify=True)


@pytest.mark.parametrize("part", ["key", "value", "turned"])
def test_what_is_not_made_of_latents_as_known_is_stored_as_it_is_and_said(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("youtu")
    attention = type(model.model.layers[0].self_attn)
    expand = attention.expand_kv

    def other(self: nn.Module, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k, v = expand(self, c, 2 * r if part == "turned" else r)
        k[..., :16] *= 2 if part == "key" else 1
        return k, 2 * v if part == "value" else v

    monkeypatch.setattr(attention, "expand_kv", other)
    model.generation_config.eos_token_id = None
    want = model.generate(torch.tensor([text()]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    found = wrap_lm(model, verify=True)
    assert {(of.n_kv_heads, of.k_dim, of.v_dim, of.rank) for of in found.shapes} == {(4, 24, 12, 0)}
    (note,) = found.info.notes
    assert note.startswith("3 layers store keys and values instead of latents: ")
    assert answered(opened(found)) == want


def test_what_expands_latents_stays_in_plain_numbers_where_others_are_quantized() -> None:
    model = make.model("youtu", hidden_size=64, intermediate_size=64, q_lora_rank=32, quant="int8")
    attention = model.model.model.layers[0].self_attn
    assert type(attention.kv_b_proj) is LatentProjection
    assert type(attention.o_proj) is not nn.Linear
    plain = answered(opened(model))
    assert answered(opened(model, drafters.Moody(plain, 97, STOP))) == plain


def test_layers_that_attend_twice_are_not_quantized_and_say_so() -> None:
    with pytest.raises(BadModel) as caught:
        make.model("longcat_flash", quant="int8")
    assert caught.value.try_ == ("--quant none",)


@pytest.mark.parametrize("name", LATENT)
def test_bytes_are_those_of_one_key_and_what_the_config_says(name: str) -> None:
    model, n = lm(name), 200  # of which 256 have room
    kv = make.dense(model)
    run_to_end(opened(model, kv=kv).read(prompt(n + 1)))
    assert sum(nbytes(kv).values()) == len(model.shapes) * 256 * ((R + T) * 4 + 4)
    for layer in range(len(model.shapes)):
        s = kv.slots(layer)
        assert s.v is s.k
    said = shape_of(config_of(name).to_dict(), name)
    stored = [(of.kv_heads, of.key, of.value, of.shares, of.rank, of.numbers) for of in said.stores]
    assert stored == [(s.n_kv_heads, s.k_dim, s.v_dim, s.shared_from, s.rank, s.numbers) for s in model.shapes]


def test_a_token_of_glm_4_7_flash_takes_54_kilobytes() -> None:
    """By its published config: 962 with the keys and values of all heads."""
    config = {
        "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
        "num_key_value_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "vocab_size": 154880, "max_position_embeddings": 202752,
    }  # fmt: skip
    assert shape_of(config).kv_per_token * 2 == 47 * 576 * 2 < 60_000


def test_a_block_on_disk_holds_one_tensor(tmp_path: Path) -> None:
    k = noise(LENGTH).k
    small = Block(range(LENGTH), {0: (k, k)}).write(tmp_path / "one", Uncompressed())
    assert k.nbytes < small < 1.2 * k.nbytes
    got_k, got_v = read(tmp_path / "one", [LAYER], torch.float32).kv[0]
    assert torch.equal(got_k, k)
    assert got_v is got_k


LAYER = LayerShape(1, R + T, R + T, rank=R)


def noise(n: int, seed: int = 0) -> Slots:
    k = torch.randn(1, n, R + T, generator=torch.Generator().manual_seed(seed))
    k[..., R:] *= 50  # which one scale for all would drown the others in
    return Slots(k, k, run_of(0, n, 1, k.device))


def test_in_few_bits_what_is_turned_has_scales_of_its_own() -> None:
    tier, s = make.quantized([LAYER], dtype=torch.float32, group=8), noise(40)
    tier.take(0, s)
    got = tier.slots(0)
    assert got.v is got.k
    for part in (slice(R), slice(R, None)):
        want = s.k[..., part]
        assert float((got.k[..., part] - want).abs().max() / want.abs().max()) < 0.01


@pytest.mark.parametrize("bits", [(8, 8), (4, 2), (16, 8)])
def test_a_quantized_latent_is_read_as_it_dequantizes(bits: tuple[int, int]) -> None:
    from kvcli.kernels.attend import attend
    from kvcli.kv.slots import AttentionParams

    tier = make.quantized([LAYER], bits, torch.float32, group=8)
    tier.take(0, noise(43))
    tier.evict_except(0, torch.arange(43).view(1, -1) % 5 > 0)
    q, s = torch.randn(4, 3, R + T), tier.slots(0)
    (part,) = tier.attend(0, q, AttentionParams(0.1), [50, 51, 52])
    want = attend(q, s.k, s.v, 0.1, mask=(s.pos >= 0).unsqueeze(1).expand(-1, 3, -1))
    torch.testing.assert_close(part.out.float(), want.out.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "ragged", "packed", "disk"])
def test_a_kv_cache_of_latents_is_made_again_from_what_it_gave(kind: str) -> None:
    def empty() -> Any:
        if kind == "packed":
            return make.quantized([LAYER], dtype=torch.float32, group=8)
        return make.disk([LAYER], torch.float32) if kind == "disk" else Dense([LAYER], torch.float32)

    tier, again, s = empty(), empty(), noise(43)
    if kind == "ragged":
        s = Slots(s.k, s.v, s.pos.masked_fill(torch.arange(43).view(1, -1) % 5 == 0, -1))
    tier.take(0, s)
    again.restore(SnapshotReader(tier.snapshot(), 43))
    a, b = tier.slots(0), again.slots(0)
    assert torch.equal(a.k, b.k)
    assert torch.equal(a.pos, b.pos)
    assert a.v is a.k
    assert b.v is b.k
    assert sum(nbytes(again).values()) <= sum(nbytes(tier).values())


@pytest.mark.parametrize("policy", [FastGen(), Snap(alloc="headmap", headmap="map.tsv"), Expected()])
def test_what_tells_heads_apart_or_turns_keys_is_refused_by_name(policy: Any) -> None:
    with pytest.raises(BadModel, match=r"share latents|rotary") as caught:
        policy.requirements(lm("youtu"))
    assert caught.value.try_


@pytest.mark.parametrize(
    "policy",
    [Snap(budget=20, sinks=2, recent=6), KeyDiff(budget=20, sinks=2, recent=6), Vatp(budget=20, sinks=2, recent=6)],
)
def test_scores_see_one_head_and_values_without_the_turned_part(policy: Any) -> None:
    model = lm("youtu")
    session = opened(model, policy=policy, every=16)
    plain = answered(session)
    assert max(session.cache.n_slots(layer) for layer in range(3)) < len(plain) - 16
    assert answered(opened(model, drafters.Moody(plain, 97, STOP), policy=policy, every=16)) == plain


@pytest.mark.parametrize("name", LATENT)
def test_long_chunks_of_a_prompt_read_each_other_expanded_where_that_is_less_work(name: str) -> None:
    """Over what is stored already, and where nothing is; those that are short enough, and all others, do not."""
    model, ids = lm(name), prompt(161)
    latent, made = model.latents[0], list[int]()
    assert latent.expand_threshold == 2 * R * 28 / (2 * R + T - 28) == 48

    class Counting(LatentProjection):
        def values(self, out: Tensor) -> Tensor:
            made.append(out.shape[1])
            return super().values(out)

    latent.__class__ = Counting
    try:
        kv, short = (make.dense(model) for _ in range(2))
        run_to_end(opened(model, kv=short, chunk=32).read(ids))
        assert made == [32] * 5
        made.clear()
        session = opened(model, kv=kv, chunk=64)
        run_to_end(session.read(ids))
        assert made == [64, 32]  # of the KV cache of the second; the first has none
    finally:
        latent.__class__ = LatentProjection
    for layer in range(len(model.shapes)):
        torch.testing.assert_close(kv.slots(layer).k, short.slots(layer).k, rtol=1e-3, atol=1e-3)
