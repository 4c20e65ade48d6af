"""Architectures of llama.cpp: a file as its converter writes it is the model that was converted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM

import kvcli
from kvcli.engine.drafting.mtp import mtp_of
from kvcli.engine.loading.open_lm import open_lm
from kvcli.fit.plan import subject_of
from kvcli.fit.weights import weigh
from kvcli.kernels.linear_quantized import PackedLinear, codes_of
from kvcli.models import source
from kvcli.models.draft_heads import has_mtp
from kvcli.models.gguf import convert
from tests.families import prompt
from tests.gguf_archs import KINDS, mtp, write
from tests.test_model_probe import our_logits

gguf = pytest.importorskip("gguf")
DTYPE = {"load.dtype": "fp32", "load.device": "cpu", "sample.temperature": 0.0}


def folder_of(tmp_path: Path, name: str) -> tuple[Path, torch.nn.Module]:
    model = write(tmp_path / "tiny.gguf", name)
    found = source.find(str(tmp_path / "tiny.gguf"))
    return convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on="").path, model


# each change of numbers or of settings is in one of these
SHORT = {
    "llama_biased",
    "qwen35moe",
    "qwen3next",
    "gemma4_shared",
    "gemma4_moe",
    "gpt_oss",
    "phi3_long",
    "granite_hybrid",
}
SHORT |= {"deepseek_v3", "lfm2moe", "stablelm_parallel", "ministral3"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in KINDS])
def test_a_converted_file_is_the_model_again(tmp_path: Path, name: str):
    folder, theirs = folder_of(tmp_path, name)
    ours, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(said[key] for key in ("missing_keys", "mismatched_keys")), said
    assert all(key.startswith("mtp.") for key in said["unexpected_keys"]), said
    state = ours.state_dict()
    for key, weight in theirs.state_dict().items():
        assert torch.equal(state[key], weight) or torch.allclose(state[key], weight, rtol=1e-6, atol=1e-7), key
    ids = torch.tensor([prompt(37)])
    with torch.inference_mode():
        mine, right = ours.eval()(ids).logits, theirs(ids).logits
    assert torch.allclose(mine, right, rtol=1e-4, atol=1e-4), (mine - right).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_engine_writes_the_text_of_the_model(tmp_path: Path, name: str):
    theirs, ids = write(tmp_path / "tiny.gguf", name), prompt(80)
    with kvcli.load(str(tmp_path / "tiny.gguf"), "exact", DTYPE, cache=tmp_path / "cache") as model:
        mine = list(model.generate(ids, 24).ids)
    theirs.generation_config.eos_token_id = None
    right = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, use_cache=False)[0, 80:].tolist()
    assert mine == right[: len(mine)]
    assert len(mine) > 3


@pytest.mark.parametrize("name", ["qwen35moe", "qwen35_mtp", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_blocks_are_joined_and_reordered_as_their_numbers_are(tmp_path: Path, name: str):
    made = []
    for unpacked in (False, True):
        write(tmp_path / "tiny.gguf", name, ("Q8_0", "Q4_0", "Q5_1"), unpacked=unpacked)
        found = source.find(str(tmp_path / "tiny.gguf"))
        folder = convert.convert_if_needed(
            found, "fp32", tmp_path / str(unpacked), keeps_on="" if unpacked else "cpu"
        ).path
        made.append(load_file(folder / "model.safetensors"))
    blocks, right = made
    packed = {key for key, weight in blocks.items() if weight.dtype == torch.uint8}
    assert len(packed) >= (1 if name == "qwen35moe" else 0)
    assert not any("linear_attn.out_proj" in key for key in packed)  # its columns are reordered
    assert any(key.startswith("mtp.") for key in packed) == (name == "qwen35_mtp")
    assert blocks.keys() == right.keys()
    assert all(torch.equal(blocks[key], right[key]) for key in right.keys() - packed)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt_oss"])  # in gpt_oss, matrices are turned and rows interleaved
def test_experts_stay_in_blocks_and_fit_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    monkeypatch.setitem(KINDS, name, replace(KINDS[name], config={**KINDS[name].config, **sizes}))
    theirs = write(tmp_path / "tiny.gguf", name, ("Q8_0",))
    found, logits = source.find(str(tmp_path / "tiny.gguf")), []
    for packs in (True, False):
        lm = open_lm(convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on="cpu" * packs), device="cpu")
        held = [codes for module in lm.model.modules() for _, _, codes in codes_of(module)]
        assert lm.info.parameters == theirs.num_parameters()
        assert len(held) == 2 * lm.model.config.num_hidden_layers * packs
        logits.append(our_logits(lm, prompt(37), 13))
        subject = subject_of(found)
        foretold = weigh(
            subject.held,
            subject.shape,
            number=4,
            quant="none",
            device="cpu" if packs else "cuda",
            given=False,
            is_whole=packs,
        )
        rope = sum(b.nbytes for key, b in lm.model.named_buffers() if "inv_freq" in key)
        assert foretold.memory == pytest.approx(lm.info.weight_bytes - rope, abs=64)
    assert torch.allclose(*logits, rtol=1e-3, atol=1e-3), (logits[0] - logits[1]).abs().max()


def test_a_file_of_gemma_4_that_states_no_cap_has_llama_cpps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = {**KINDS["gemma4_moe"].config, "final_logit_softcapping": None}
    monkeypatch.setitem(KINDS, "gemma4_moe", replace(KINDS["gemma4_moe"], config=said))
    write(tmp_path / "tiny.gguf", "gemma4_moe")
    assert source.find(str(tmp_path / "tiny.gguf")).config["final_logit_softcapping"] == 30.0


def test_an_mtp_layer_of_the_file_is_found(tmp_path: Path):
    folder, theirs = folder_of(tmp_path, "qwen35_mtp")
    assert has_mtp(source.find(str(folder)))
    tensors, right = load_file(folder / "model.safetensors"), KINDS["qwen35_mtp"].mtp(theirs)
    assert {key for key in tensors if key.startswith("mtp.")} == right.keys()
    assert all(torch.allclose(tensors[key], weight, atol=1e-6) for key, weight in right.items())


SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
BLOCKS = ("Q8_0", "Q4_0", "Q5_1")


@pytest.mark.parametrize("name", ["qwen35_mtp", "glm4moe"])  # named apart, or as layers behind the last
def test_an_mtp_layer_runs_in_the_blocks_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    if name == "glm4moe":
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], config=KINDS[name].config | SIZES, mtp=mtp))
        # the numbers of such layers in the released checkpoints, by which transformers knows them
        monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\."])
    write(tmp_path / "tiny.gguf", name, BLOCKS)
    found, heads = source.find(str(tmp_path / "tiny.gguf")), []
    for keeps_on in ("cpu", ""):
        lm = open_lm(convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on=keeps_on), device="cpu")
        heads.append(mtp_of(lm).model.mtp.layers[0])
    blocks, right = heads
    packed = {key: part for key, part in blocks.named_modules() if isinstance(part, PackedLinear)}
    assert {"eh_proj", "mtp_block.self_attn.q_proj", "mtp_block.self_attn.o_proj"} <= packed.keys()
    assert all(torch.equal(part.weights.plain(), right.get_submodule(key).weight) for key, part in packed.items())
    experts = [codes for part in blocks.modules() for _, _, codes in codes_of(part)]
    assert bool(experts) == (name == "glm4moe")
    plain = dict(right.named_parameters())
    assert all(torch.equal(p, plain[key]) for key, p in blocks.named_parameters() if type(p.data) is torch.Tensor)


def test_an_mtp_layer_of_the_file_leaves_the_text_as_it_is(tmp_path: Path):
    write(tmp_path / "tiny.gguf", "qwen35_mtp", BLOCKS)
    texts, drafted = [], []
    for spec in ({"spec.method": "off"}, {"spec.method": "mtp", "spec.adaptive": False}):  # no pause by time
        with kvcli.load(str(tmp_path / "tiny.gguf"), "exact", DTYPE | spec, cache=tmp_path / "cache") as model:
            answer = model.generate(prompt(37), 12)
            texts.append(list(answer.ids))
            drafted.append(answer.stats.draft_tokens)
    assert texts[0] == texts[1]
    assert drafted[1] > drafted[0] == 0
