"""Which model drafts for which, and what comes with a model to draft for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcli.commands.common.flags import profile_flags
from kvcli.commands.common.run_setup import Setup
from kvcli.demo import weights_dir
from kvcli.errors import BadModel
from kvcli.models import source
from kvcli.models.draft_heads import found_in, has_mtp
from kvcli.models.tokenizer import alike, sample
from tests import small_tokenizers
from tests.fakes import Machine
from tests.families import build


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two small models beside the bundled one, of which one has its tokenizer."""
    for name in ("tiny", "other"):
        build("llama", vocab_size=1888 if name == "tiny" else 400).save_pretrained(tmp_path / name)
    for file in weights_dir().glob("tokeniz*"):
        copy(file, tmp_path / "tiny")
    small_tokenizers.byte_fallback().save_pretrained(tmp_path / "other")
    found = Machine(tmp_path, has_config=True)
    config = found.world().paths.config / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("".join(f'[models.{n}]\npath = "{tmp_path / n}"\n' for n in ("tiny", "other")))
    return found


def test_models_are_shown_with_those_that_can_draft_for_them(machine: Machine) -> None:
    (entry,) = json.loads(machine("models", "show", "demo", "--json").out)["models"]
    assert [(one["name"], one["how"], one["here"]) for one in entry["drafts"]] == [
        ("tiny", "same tokenizer", True),
        ("demo-small", "same tokenizer", True),
        ("other", "by re-encoding", True),
    ]
    assert entry["drafts"][0]["cost"] < 0.1
    assert "other: by re-encoding" in machine("models", "show", "demo").out
    listed = {one["name"]: one for one in json.loads(machine("models", "list", "--json").out)["models"]}
    assert [one["name"] for one in listed["demo"]["drafts"]] == ["tiny", "demo-small", "other"]
    assert listed["tiny"]["drafts"] == []


def test_auto_is_the_best_at_hand_or_says_what_to_get(machine: Machine) -> None:
    assert Setup(machine.world(), "demo").draft("auto").id == "tiny"
    with pytest.raises(BadModel, match="no model on this machine can draft for tiny") as found:
        Setup(machine.world(), "tiny").draft("auto")
    assert found.value.code == "no_draft_model"
    assert "--draft MODEL" in found.value.try_
    with pytest.raises(BadModel, match="nowhere is neither a folder"):
        Setup(machine.world(), "demo").draft("nowhere")


def test_words_in_the_files_tell_a_tokenizer(machine: Machine) -> None:
    demo, tiny, other = (
        sample(source.find(n)) for n in ("demo", *(str(machine.folder / n) for n in ("tiny", "other")))
    )
    assert alike(demo, tiny)
    assert not alike(demo, other)
    assert not alike((), ())


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen": ({"architectures": ["Qwen3Eagle3"], "model_type": "qwen3", "draft_vocab_size": 9}, "an EAGLE-3 head"),
    "speculators": (
        {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": "big/one"}}},
        "an EAGLE-3 head",
    ),
    "dflash": ({"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1]}}, "a DFlash head"),
    "glimmer": ({"model_type": "muse_glimmer_assistant"}, "a DFlash head"),
    "medusa": ({"medusa_num_heads": 5}, "Medusa heads"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_another_model_is_refused_by_name(kind: str, machine: Machine) -> None:
    changes, what = HEADS[kind]
    edit(machine.folder / "tiny", **changes)
    with pytest.raises(BadModel, match=what) as found:
        Setup(machine.world(), "demo").draft("tiny")
    assert found.value.code == "draft_head"
    assert found.value.lines[0] == "no drafting method of kvcli can use it"
    assert any("--draft MODEL" in one for one in found.value.try_)
    assert any("big/one" in line for line in found.value.lines) == (kind == "speculators")


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.3.eh_proj.weight"])
def test_layers_that_draft_are_named_and_by_whom_they_are_used(name: str, machine: Machine) -> None:
    folder = machine.folder / "tiny"
    assert found_in(source.find(str(folder))) == []
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(3, 3)}, file, {"format": "pt"})
    edit(folder, num_nextn_predict_layers=1)
    (said,) = found_in(source.find(str(folder)))
    assert said == f"1 MTP layer (1 tensors, {name}, ...): not used, transformers lacks them for llama"
    assert "1 MTP layer" in machine("models", "show", "tiny").out
    edit(folder, model_type="deepseek_v3")
    found = source.find(str(folder))
    assert found_in(found) == [f"1 MTP layer (1 tensors, {name}, ...): --spec mtp"]
    assert has_mtp(found)
    edit(folder, num_nextn_predict_layers=0)
    (said,) = found_in(source.find(str(folder)))
    assert said.endswith("not used, its config.json does not say how many")


def test_layers_that_were_left_out_are_missed(machine: Machine) -> None:
    edit(machine.folder / "tiny", num_nextn_predict_layers=1, model_type="glm4_moe")
    found = source.find(str(machine.folder / "tiny"))
    assert found_in(found) == [
        "1 MTP layer in its config.json: its files hold none of their tensors, as is usual for quantized copies"
    ]
    assert not has_mtp(found)


def test_auto_is_the_models_own_layer_where_there_is_one(machine: Machine) -> None:
    folder = machine.folder / "tiny"
    setup = partial(Setup, machine.world(), "tiny", profile_flags({"draft": "auto"}))
    assert setup().profile.spec.method == "model"
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(3, 3)}, file, {"format": "pt"})
    edit(folder, num_nextn_predict_layers=1, model_type="deepseek_v3")
    assert setup().profile.spec.method == "mtp"


@pytest.mark.parametrize(("stated", "is_said"), [(2, True), (1, False), (3, False), (True, False), ("2", False)])
def test_an_early_exit_is_named_where_the_files_say_so(stated: object, is_said: bool, machine: Machine) -> None:
    folder = machine.folder / "tiny"
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"assistant_early_exit": stated}))
    said = found_in(source.find(str(folder)))
    use = "--set spec.method=self --set spec.skip=early --set spec.skipped=1"
    assert said == ([f"early exit after 2 of 3 layers (generation_config.json): {use}"] if is_said else [])
    assert ("spec.skip=early" in machine("models", "show", "tiny").out) == is_said
