"""The models that are named to somebody who named none: their sizes add up, and what is offered fits."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from datetime import date

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, listed, plan
from kvcli.models import catalog
from kvcli.models.catalog import _DATA, BY_NAME, CATALOG, MORE_ON_GPU, TOKENS, choices
from kvcli.models.machine import kept_free
from kvcli.settings.profile import Profile
from kvcli.settings.schema import Sample
from tests.fakes import Machine

GIB = 1 << 30


def planned(known, quant, available):
    """What `kvcli fit` says of it."""
    profile = Profile.load("ngram").replace(load={"quant": quant})
    room = AvailableMemory("cpu", available)
    return plan(listed(known), profile, room, min(TOKENS, known.shape.limit), MeasuredFacts())


@pytest.fixture
def all_read(monkeypatch):
    """As if the architecture of every GGUF file were read."""
    monkeypatch.setattr(catalog, "reads", lambda arch: True)


# a mixture of experts has tens of thousands of tensors
SIZED = [pytest.param(k, id=k.name, marks=[pytest.mark.slow] * (k.shape.experts > 32)) for k in CATALOG]


@pytest.mark.parametrize("known", SIZED)
def test_the_config_of_an_entry_is_a_model_of_its_number_of_parameters(known):
    config = {key: value for key, value in known.config.items() if key != "model_type"}
    pad = {"pad_token_id": 0} if known.config["model_type"] == "phi3" else {}  # its usual one is none of 128 words
    made = AutoConfig.for_model(known.config["model_type"], **config, **pad)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == known.parameters
    assert known.shape.limit == made.max_position_embeddings


def test_each_entry_says_when_and_where_it_was_read_and_what_was_not():
    """A fact that nobody read is left out, and the entry says so."""
    keys = {item.name for item in fields(Sample)}
    for entry in _DATA["model"]:
        assert entry["sources"]
        assert isinstance(entry["date"], date)
        said = " ".join(entry.get("left_out", ()))
        known = BY_NAME[entry["name"]]
        assert known.sampling.keys() <= keys
        assert known.thinking in ("", "on", "off", "switch")
        assert known.gguf or known.package or "4-bit" in said
        assert known.sampling or "sampling" in said
        assert known.thinking or "thinking" in said
    assert all(one["sampling"].keys() <= keys for one in _DATA["family"])


def test_names_of_files_select_a_quantization_whose_bytes_fit_the_parameters(all_read):
    for known in CATALOG:
        if known.file:
            assert re.fullmatch(r"[\w-]+/[\w.-]+-GGUF:(UD-)?(Q4_K_M|MXFP4)", known.source)
            assert 4.25 < 8 * known.file.bytes / known.parameters < 6
            assert known.download == known.file.bytes
            assert (known.quants(("none", "int8")) == ("none",)) == (known.quantized == known.file.bytes)
            assert known.quantized == known.file.bytes
            assert known.on("cuda").quantized == (0 if known.shape.experts else int(MORE_ON_GPU * known.file.bytes))


def test_they_come_by_size_with_a_licence_each():
    assert [k.parameters for k in CATALOG] == sorted(k.parameters for k in CATALOG)
    assert {k.licence for k in CATALOG} == {"Apache-2.0", "MIT", "Gemma", "LFM Open License"}
    assert len({k.id for k in CATALOG}) == len({k.name for k in CATALOG}) == len(CATALOG)
    assert [k.name for k in CATALOG if k.terms] == [k.name for k in CATALOG if k.licence == "Gemma"]


@pytest.mark.parametrize("gib", [1.5, 2, 3, 5, 7, 8, 11, 16, 24, 64])
def test_what_is_offered_fits_as_fit_plans_it(gib):
    available = int(gib * GIB)
    found = choices(available - kept_free(available))
    assert 1 <= len(found) <= 3
    assert [known.linear for known, _ in found] == sorted({known.linear for known, _ in found})
    for known, quant in found:
        needed = planned(known, quant, available)
        assert needed.fits
        assert 0.98 <= known.needs(quant) / needed.least < 1.25


@pytest.mark.parametrize("known", SIZED)
def test_what_a_model_takes_is_what_fit_plans(known, request):
    for quant in ("none", "int8"):
        assert 0.98 <= known.needs(quant) / planned(known, quant, 128 * GIB).least < 1.25
    if known.gguf:
        request.getfixturevalue("all_read")
        assert 0.98 <= known.needs() / planned(known, "none", 128 * GIB).least < 1.25


def test_weights_are_quantized_where_more_then_fits(monkeypatch):
    monkeypatch.setattr(catalog, "reads", lambda arch: False)  # without files that are quantized already
    assert [quant for _, quant in choices(8 * GIB)] == ["none", "none", "int8"]
    assert {quant for _, quant in choices(128 * GIB)} == {"none"}
    assert {quant for _, quant in choices(8 * GIB, ("int4",))} == {"int4"}


def test_a_gpu_multiplies_the_blocks_of_a_file_but_no_experts():
    """Weights of those count as they are loaded: in 16 bits, or quantized again."""
    dense, sparse = (next(k for k in CATALOG if k.file and bool(k.shape.experts) == is_it) for is_it in (False, True))
    assert 1.05 < dense.on("cuda").weights() / dense.on("cpu").weights() < 1.2
    assert sparse.on("cuda").needs() > sparse.on("cpu").needs() + sparse.parameters


def test_nothing_is_offered_where_nothing_fits():
    assert choices(GIB // 2) == []


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Machine(tmp_path)


def test_fit_and_check_answer_by_the_list_before_anything_is_downloaded(machine):
    for name in ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "smollm2-135m"):
        done = machine("fit", name, "--ctx", "512", "--json")
        said = json.loads(done.out)
        assert done.exit == 0
        assert any("is not on this machine; its sizes are those of kvcli's list" in note for note in said["notes"])
        check = json.loads(machine("models", "check", name, "--json").out)
        assert (check["is_decided"], check["path"], check["context"]) == (
            False,
            "",
            BY_NAME[name.split("/")[-1].lower()].shape.limit,
        )
        assert any("kvcli's list" in note for note in check["notes"])
    plan = json.loads(machine("fit", "qwen3-0.6b", "--ctx", "512", "--json").out)["plans"][0]
    assert plan["weights"] == pytest.approx(2 * BY_NAME["qwen3-0.6b"].parameters, rel=0.001)
    assert machine("fit", "nobody/else").exit == 4
    both = machine("fit", "qwen3-0.6b", "--online", "--offline")
    assert "exclude each other" in both.err


def test_a_model_that_is_offered_as_an_unread_file_is_neither_offered_nor_fetched(machine, monkeypatch):
    known = BY_NAME["gpt-oss-20b"]
    monkeypatch.setattr(catalog, "reads", lambda arch: False)
    assert not known.is_offered
    assert known.name not in machine("models", "suggest", "--plain").out
    for words in (("models", "get", known.name), ("models", "check", known.name)):
        done = machine(*words)
        assert (done.exit, "does not read GGUF files of the architecture gpt-oss" in " ".join(done.err.split())) == (
            4,
            True,
        )
    monkeypatch.setattr(catalog, "reads", lambda arch: True)
    assert known.is_offered
    assert known.source == "ggml-org/gpt-oss-20b-GGUF:MXFP4"
    assert known.name in machine("models", "suggest", "--plain").out
