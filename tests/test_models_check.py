"""`kvcli models check`: what it says of a model by headers alone is what loading it and `kvcli fit` say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvcli.demo import weights_dir
from kvcli.engine.hf.meta_check import check_on_meta_device
from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadModel, ExitStatus
from kvcli.models import checkpoint, source
from tests.all_families import build as built
from tests.all_families import config_of as tiny
from tests.fakes import Machine
from tests.families import FAMILIES, build
from tests.packed_checkpoints import edit_config, written
from tests.small_hub import Hub, serving

ROOT = Path(__file__).parents[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def with_words(folder: Path) -> Path:
    for file in weights_dir().glob("tokeniz*"):
        copy(file, folder)
    return folder


def hollow(folder: Path, **sizes: Any) -> Path:
    """A model of any size whose file takes no room: its header is whole, and behind it is a hole."""
    config = AutoConfig.for_model("llama", dtype="bfloat16", **sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    header, at = {}, 0
    for name, t in tensors.items():
        end = at + 2 * math.prod(t.shape)
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    said = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(8 + len(said) + at)
    return with_words(folder)


def test_a_model_that_runs(machine: Machine) -> None:
    document = json.loads(machine("models", "check", "demo", "--json").out)
    fit = json.loads(machine("fit", "demo", "--ctx", "8192", "--json").out)
    assert document["schema"] == "kvcli.check/1"
    assert (document["numbers"], document["packed"], document["notes"]) == ("bfloat16", None, fit["notes"])
    assert document["is_decided"]
    assert [(one["ctx"], one["bytes"]) for one in document["memory"]] == [(8192, fit["plans"][0]["needed"])]
    assert document["weight_bytes"] == fit["plans"][0]["weights"]
    assert [one["name"] for one in document["drafts"]] == ["demo-small"]
    shown = machine("models", "check", "demo").out
    assert "runs" in shown
    assert "demo-small: same tokenizer" in shown


def test_no_weight_is_read_of_a_model_that_has_no_room(machine: Machine, tmp_path: Path) -> None:
    large = hollow(tmp_path, hidden_size=16384, intermediate_size=65536, num_hidden_layers=90, num_attention_heads=128)
    ended = machine("models", "check", str(large), "--json")
    document = json.loads(ended.out)
    assert ended.exit == ExitStatus.DOES_NOT_FIT
    assert document["file_bytes"] > 500 << 30
    assert not any(one["fits"] for one in document["memory"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_outline_of_each_family_says_all_that_loading_does(tmp_path: Path, name: str) -> None:
    build(name).save_pretrained(tmp_path)
    assert check_on_meta_device(source.find(str(tmp_path)), "cpu", trust_remote_code=False) == ""


@pytest.mark.parametrize("kind", ["falcon", "gemma4_text", "gptj", "nanochat", "persimmon"])
def test_a_refusal_is_that_of_loading(tmp_path: Path, kind: str) -> None:
    built(tiny(kind)).save_pretrained(tmp_path)

    def said(act: Any) -> Any:
        try:
            act(source.find(str(tmp_path)))
        except BadModel as error:
            return error.message, error.lines, error.code
        return "runs"

    by_outline = said(lambda found: check_on_meta_device(found, "cpu", trust_remote_code=False))
    assert by_outline == said(lambda found: open_lm(found, device="cpu"))


def test_what_asks_for_numbers_on_its_way_is_left_to_the_load(tmp_path: Path) -> None:
    """Doge makes its masks of keys."""
    built(tiny("doge")).save_pretrained(tmp_path)
    said = check_on_meta_device(source.find(str(tmp_path)), "cpu", trust_remote_code=False)
    assert "is checked when it is loaded" in said


def test_a_quantized_model_says_what_it_needs_and_what_it_dequantizes_to(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_words(written(tmp_path, "fp8"))
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    ended = machine("models", "check", str(folder))
    assert ended.exit == ExitStatus.BAD_MODEL
    assert "needs the package accelerate" in ended.err
    assert "pip install accelerate" in ended.err
    (listed,) = json.loads(machine("models", "show", str(folder), "--json").out)["models"]
    assert (listed["supported"], listed["reason"].endswith("which needs accelerate")) == (False, True)
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: name)
    document = json.loads(machine("models", "check", str(folder), "--json").out)
    assert (document["packed"], document["unpacks"], document["numbers"]) == ("fp8", True, "bfloat16")
    assert "dequantized" in " ".join(json.loads(machine("fit", str(folder), "--ctx", "64", "--json").out)["notes"])


def test_the_hub_is_asked_for_headers_alone(tmp_path: Path) -> None:
    """And only if it is asked at all."""
    with serving(Hub(weights_dir())) as hub:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "KVCLI_HOME": str(tmp_path / "home")}

        def check(*more: str, name: str = "someone/tiny") -> Any:
            words = [sys.executable, "-m", "kvcli", "models", "check", name, "--json", *more]
            done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
            return done.returncode, json.loads(done.stdout)

        code, said = check()
        assert (code, said["code"]) == (ExitStatus.BAD_MODEL, "model_not_found")
        assert "--online" in said["try"][0]
        code, said = check("--online")
        for name, why in (("someone/tiny:x.gguf", "model_not_found"), ("someone/..", "model_name")):
            assert check("--online", name=name)[1]["code"] == why
    assert (code, said["is_decided"], said["weight_bytes"] > 9 << 20) == (0, True, True)
    fetched = {path.name for path in (tmp_path / "hf").rglob("*")}
    assert "tokenizer.json" in fetched
    assert "model.safetensors" not in fetched


def test_a_hub_that_hangs_up_is_no_fault_of_kvclis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    def hang_up(*_: Any, **__: Any) -> Any:
        raise HfHubHTTPError.__mro__[1]("")  # of its client

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", hang_up)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(BadModel) as caught:
        source.look_up("someone/tiny")
    assert (caught.value.code, bool(caught.value.try_)) == ("no_network", True)


def test_a_folder_without_words_is_refused(machine: Machine, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    ended = machine("models", "check", str(tmp_path))
    assert ended.exit == ExitStatus.BAD_MODEL
    assert "its folder holds no vocabulary" in ended.err


def test_an_unknown_design_is_refused(machine: Machine, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    edit_config(with_words(tmp_path), model_type="lama")
    ended = machine("models", "check", str(tmp_path), "--json")
    assert ended.exit == ExitStatus.BAD_MODEL
    assert json.loads(ended.out)["code"] == "model_unsupported"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_gguf_file_is_outlined_by_the_config_that_its_metadata_stands_for(
    machine: Machine, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gguf_files import write

    write(tmp_path / "tiny.gguf", family)
    found = source.find(str(tmp_path / "tiny.gguf"))
    assert check_on_meta_device(found, "cpu", False) == ""

    def refused(*_: Any) -> Any:
        raise BadModel("its attention is not served", code="model_unsupported")

    shown = machine("models", "check", str(tmp_path / "tiny.gguf")).out
    assert "GGUF blocks, as in the file, and " in shown
    document = json.loads(machine("models", "check", str(tmp_path / "tiny.gguf"), "--quant", "int8", "--json").out)
    assert (document["packed"], document["unpacks"]) == ("GGUF blocks", True)
    monkeypatch.setattr("kvcli.engine.hf.meta_check.probed", refused)
    assert "its attention is not served" in machine("models", "check", str(tmp_path / "tiny.gguf")).err
