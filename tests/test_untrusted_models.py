"""Models of whoever wrote them: what they may not do, and how each trick ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kvcli
from kvcli.engine.loading.open_lm import open_lm
from kvcli.engine.loading.weights import limit_to_files
from kvcli.errors import BadModel, ExitStatus, KvcliError
from kvcli.fit.plan import subject_of
from kvcli.models import source
from kvcli.models.checkpoint import read_header
from kvcli.models.refusals import blame_files
from kvcli.models.text import decode, render_prompt
from kvcli.models.tokenizer import load_tokenizer
from kvcli.settings.small_file import Scan, read_document
from tests.bench.stress_models import storm
from tests.fakes import Machine
from tests.families import build, config_of
from tests.model_mutations import FORMS
from tests.small_tokenizers import byte_fallback, chatml

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    """What waits for ever (a pipe nobody writes to) fails."""

    def late(*_: object) -> None:
        raise TimeoutError("waited for more than two minutes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strangers") / "whole"
    build("llama", vocab_size=400, hidden_size=32, intermediate_size=40, num_hidden_layers=2).save_pretrained(path)
    byte_fallback().save_pretrained(path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "mine"))


@pytest.fixture
def sharded(whole: Path, tmp_path: Path) -> Path:
    open_lm(source.find(str(whole)), device="cpu").model.save_pretrained(tmp_path / "mine", max_shard_size="30KB")
    return tmp_path / "mine"


def said(folder: Path, **options: Any) -> KvcliError:
    """The error in which loading a model and asking it ends, which is the model's."""
    with pytest.raises(KvcliError) as caught, kvcli.load(str(folder), "exact", **options) as model:
        model.generate("Hello", max_new_tokens=1)
    assert isinstance(caught.value, BadModel), caught.value
    assert "\n" not in caught.value.message
    assert caught.value.try_
    return caught.value


def edit(file: Path, **changes: str) -> None:
    """Set keys of a JSON file to values given as JSON, or as something that is none."""
    marks = {key: f"\ufdd0{key}" for key in changes}
    text = json.dumps(json.loads(file.read_text()) | marks, ensure_ascii=False)
    for key, mark in marks.items():
        text = text.replace(json.dumps(mark, ensure_ascii=False), changes[key])
    file.write_text(text)


def test_the_model_that_the_tests_break_answers(folder: Path):
    with kvcli.load(str(folder), "exact") as model:
        assert len(model.generate("Hello", max_new_tokens=1).ids) == 1


# ---- config.json against the weights, before anything is made ----

CONFIGS = {
    "as many layers as there are numbers": (
        "num_hidden_layers",
        str(2**31),
        "its weights: num_hidden_layers = 2,147,483,648",
    ),
    "more layers than tensors": ("num_hidden_layers", "60", "does not belong to its weights: num_hidden_layers = 60"),
    "layers by another name": ("n_layer", "60000", "does not belong to its weights: n_layer = 60,000"),
    "layers inside": ("encoder", '{"num_hidden_layers": 60000}', "num_hidden_layers = 60,000"),
    "no heads": ("num_attention_heads", "0", "num_attention_heads = 0"),
    "fewer than no layers": ("num_hidden_layers", "-1", "num_hidden_layers = -1"),
    "half a layer": ("num_hidden_layers", "1.5", "num_hidden_layers = 1.5"),
    "a number that is none": ("hidden_size", "NaN", "hidden_size = nan"),
    "a number beyond all": ("hidden_size", "1e999", "is not JSON"),
    "a wide model": ("hidden_size", str(2**40), "does not belong to its weights: vocab_size * hidden_size"),
    "many words": ("vocab_size", str(2**40), "does not belong to its weights: vocab_size * hidden_size"),
    "wide heads": ("head_dim", str(2**30), "num_attention_heads * head_dim * hidden_size"),
    "a list for a number": ("max_position_embeddings", "[1]", "max_position_embeddings = [1]"),
    "text for a number": ("max_position_embeddings", '"long"', "max_position_embeddings = long"),
    "true for a number": ("num_hidden_layers", "true", "num_hidden_layers = True"),
    "brackets without end": ("x", "[" * 900 + "]" * 900, "is not JSON"),
    "a number of pages": ("x", "9" * 5000, "is not JSON"),
}


@pytest.mark.parametrize("trick", CONFIGS)
def test_a_config_is_refused_before_anything_is_made(folder: Path, trick: str, monkeypatch: pytest.MonkeyPatch):
    key, value, says = CONFIGS[trick]
    edit(folder / "config.json", **{key: value})
    with pytest.raises(BadModel) as caught:  # by what `models list` and `fit` call, too
        source.find(str(folder))
    assert says in caught.value.message
    assert caught.value.exit == ExitStatus.BAD_MODEL


def test_a_window_of_one_token_loads(folder: Path):
    edit(folder / "config.json", max_position_embeddings="1")
    assert open_lm(source.find(str(folder)), device="cpu").limit == 1


LATER = {
    "no dtype": ("config.json", "dtype", '""'),
    "a wrong eos": ("config.json", "eos_token_id", '"end"'),
    "an eos beyond all": ("generation_config.json", "eos_token_id", "1" + "0" * 400),
    "heat in words": ("generation_config.json", "repetition_penalty", '"hot"'),
    "less than no chance": ("generation_config.json", "repetition_penalty", "-1"),
    "a rope of pages": ("config.json", "rope_parameters", '{"rope_type": "dynamic", "factor": [1], "rope_theta": "x"}'),
    "a text part that is none": ("config.json", "text_config", '"x"'),
    "an activation of the user": ("config.json", "hidden_act", '"os.system"'),
    "no template language": ("tokenizer_config.json", "tokenizer_class", "[[]]"),
    "a model of words": ("tokenizer.json", "model", '{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}'),
    "a tokenizer of nothing": ("tokenizer.json", "model", "{}"),
    "a tokenizer too deep": ("tokenizer.json", "normalizer", "[" * 5000 + "]" * 5000),
    "settings that are none": ("generation_config.json", "x", "{,"),
}


@pytest.mark.parametrize("trick", LATER)
def test_what_a_library_stumbles_over_is_the_models_fault(folder: Path, trick: str):
    file, key, value = LATER[trick]
    edit(folder / file, **{key: value})
    assert said(folder).exit == ExitStatus.BAD_MODEL


@pytest.mark.parametrize("key", ["intermediate_size", "num_key_value_heads"])
def test_a_model_larger_than_its_files_is_not_built(folder: Path, key: str):
    """By any key: what is registered is counted while it is built, on the meta device."""
    edit(folder / "config.json", **{key: str(1 << 20)})
    assert "describes a larger model" in said(folder).message


def test_building_ends_after_as_many_layers_as_there_are_tensors(folder: Path):
    from transformers import AutoModelForCausalLM

    layers = 0

    def count(module: Any, name: str, part: Any) -> None:
        nonlocal layers
        layers += type(part).__name__ == "LlamaDecoderLayer"

    found = source.find(str(folder))
    hook = torch.nn.modules.module.register_module_module_registration_hook(count)
    try:
        with pytest.raises(BadModel, match="describes a larger model"), limit_to_files(found), torch.device("meta"):
            AutoModelForCausalLM.from_config(config_of("llama", num_hidden_layers=20_000))
    finally:
        hook.remove()
    assert layers < 2_000


def test_what_takes_the_place_of_another_part_counts_once(folder: Path):
    found = source.find(str(folder))
    with limit_to_files(found):
        part = torch.nn.Module()
        for _ in range(5):
            part.weight = torch.nn.Parameter(torch.empty(6 << 20, device="meta"))


# ---- headers ----

HEADERS: dict[str, tuple[str, str]] = {
    "a shape beyond all": ('{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', "too large"),
    "a shape in words": ('{"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}', "is not a size"),
    "less than nothing": ('{"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', "-1 is not a size"),
    "a hole": ('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "begins at byte 4"),
    "shared bytes": (
        '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        ' "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        "begins at byte 4",
    ),
    "beyond the end": ('{"x": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}', "are missing"),
    "too many dimensions": (
        '{"x": {"dtype": "F32", "shape": [' + "1," * 10_000 + '1], "data_offsets": [0, 4]}}',
        "dimensions",
    ),
    "brackets without end": ("[" * 100_000, "nested deeper"),
    "levels": ('{"x": ' + "[" * 100 + "]" * 100 + "}", "nested deeper"),
    "no dtype": ('{"x": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}', "is not a dtype"),
}


@pytest.mark.parametrize("trick", HEADERS)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, trick: str):
    header, says = HEADERS[trick]
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    with pytest.raises(BadModel) as caught:
        read_header(file)
    assert says in caught.value.lines[0]


def test_a_header_longer_than_any_is_not_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:  # a hole: no byte of it is on the disk
        out.write(struct.pack("<Q", 1 << 40))
        out.truncate(1 << 41)
    with pytest.raises(BadModel, match="damaged"):
        read_header(file)


# ---- what stands in the place of a file ----

READ = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"nothing"}))
@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_none_is_said_and_not_waited_for(folder: Path, name: str, form: str):
    (folder / name).unlink()
    FORMS[form](folder / name)
    assert said(folder).exit == ExitStatus.BAD_MODEL


@pytest.mark.parametrize("shard", ["../mine/model.safetensors", "/etc/passwd", "a/../../x.safetensors"])
def test_an_index_may_not_lead_out_of_its_folder(sharded: Path, shard: str):
    index = sharded / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"] = dict.fromkeys(held["weight_map"], shard)
    index.write_text(json.dumps(held))
    with pytest.raises(BadModel, match="outside the model's folder"):
        source.find(str(sharded))


@pytest.mark.parametrize("shard", ["x" * 300, "\\u0000", "x/" * 3000])
def test_a_shard_that_cannot_be_is_missing(sharded: Path, shard: str):
    (sharded / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{shard}"}}}}')
    with pytest.raises(BadModel, match="1 of 1 shards are missing"):
        source.find(str(sharded))


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + "/y", "./" + "x/" * 3000, "a\0b", "~nobody/\0"])
def test_a_path_that_no_file_has_does_not_exist(name: str):
    with pytest.raises(BadModel):
        source.find(name, offline=True)


def test_settings_that_are_a_pipe_or_without_end_are_a_problem_and_no_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("a = " + "[" * 400 + "]" * 400)
    (tmp_path / "dots").write_text("a" + ".a" * 3000 + " = 1")
    for name, says in (("pipe", "is a pipe, not a file"), ("deep", "nested"), ("dots", "nested")):
        (problem,) = read_document(tmp_path / name, name).problems
        assert says in problem.message


DEEP = {
    "tables": "x = " + "{a=" * 1500 + "1" + "}" * 1500,
    "dots": "a" + ".a" * 3000 + " = 1",
    "quoted dots": '"a"' + '."a"' * 3000 + " = 1",
    "lists": "x = " + "[" * 5000 + "]" * 5000,
    "tables in lists": "x = " + "[{a=" * 700 + "1" + "}]" * 700,
}


@pytest.mark.parametrize("deep", DEEP)
def test_a_key_that_stands_twice_is_found_however_deep_others_stand(tmp_path: Path, deep: str):
    (tmp_path / "a").write_text(f"[t]\nk = 1\nk = 2\n{DEEP[deep]}\n")
    (problem,) = read_document(tmp_path / "a", "a").problems
    assert (problem.place.line, problem.place.text) == (3, "k = 2")
    (tmp_path / "a").write_text(f"{DEEP[deep]}\n[t]\nk = 1\nk = 2\n")
    assert len(read_document(tmp_path / "a", "a").problems) == 1


def test_as_many_tables_as_a_file_can_hold_are_looked_through():
    many = "".join(f"[[a{i}]]\nb = 1\nc.d = 2\n" for i in range(20_000))
    found = Scan(f"{many}[[a7]]\nb = 1\nc.d = 2\n[[a7.e]]\nf = 1\n[[a7.e]]\nf = 1\nf = 2\n")
    assert [keys for keys, _, _ in found.twice] == [("a7", "e", "f")]


# ---- code of strangers ----


@pytest.fixture
def marker(folder: Path, tmp_path: Path) -> Path:
    """A file that exists once code of the model ran; the family is one that transformers knows."""
    marker = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    for name, module, what in (
        ("Config", "configuration_x", "LlamaConfig"),
        ("ModelForCausalLM", "modeling_x", "LlamaForCausalLM"),
        ("Tokenizer", "tokenization_x", "PreTrainedTokenizerFast"),
    ):
        (folder / f"{module}.py").write_text(f"{code}from transformers import {what}\nclass X{name}({what}): pass\n")
    auto = '{"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModelForCausalLM"}'
    edit(folder / "config.json", auto_map=auto)
    edit(folder / "tokenizer_config.json", auto_map='{"AutoTokenizer": [null, "tokenization_x.XTokenizer"]}')
    return marker


def test_code_of_a_known_family_does_not_run_unasked(folder: Path, marker: Path):
    found = source.find(str(folder))
    subject_of(found)
    open_lm(found, device="cpu")
    kvcli.load(str(folder), "exact")
    assert not marker.exists()


def test_code_of_a_known_family_runs_when_it_is_trusted(folder: Path, marker: Path):
    """Else the test above could not fail."""
    with suppress(BadModel):
        open_lm(source.find(str(folder)), device="cpu", trust_remote_code=True)
    assert marker.exists()


def test_shards_that_are_pickles_are_not_opened_unasked(folder: Path):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "shard-1.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "shard-1.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match="pickle files, which can run any code"):
        source.find(str(folder))
    with kvcli.load(str(folder), "exact", set={"load.allow_pickle": True}) as model:
        assert model.info.parameters


def test_a_pickle_that_holds_more_than_weights_is_the_models_fault(folder: Path, tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
            return Path.touch, (str(tmp_path / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    assert said(folder, set={"load.allow_pickle": True}).exit == ExitStatus.BAD_MODEL
    assert not (tmp_path / "ran").exists()


# ---- whose fault ----


def test_a_fault_of_ours_is_not_said_to_be_the_models(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "kvcli.engine.hf.model_probe._SERVED", None
    )  # a line of ours fails, inside a call into transformers
    with pytest.raises(TypeError):
        open_lm(source.find(str(folder)), device="cpu")


def test_a_fault_of_a_library_is_the_models_and_names_its_class(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadModel) as caught, blame_files(lambda said: BadModel(said)):
        json.loads("{,")
    assert caught.value.message.startswith("JSONDecodeError: Expecting property name")
    with pytest.raises(MemoryError), blame_files(lambda said: BadModel(said)):
        json.loads("1", parse_int=_full)
    with pytest.raises(KeyboardInterrupt), blame_files(lambda said: BadModel(said)):
        json.loads("1", parse_int=_stopped)


def _full(text: str) -> int:
    raise MemoryError


def _stopped(text: str) -> int:
    raise KeyboardInterrupt


# ---- what the commands say ----


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, environ={"HF_HUB_CACHE": str(tmp_path / "hub")})


def test_one_bad_model_does_not_break_the_list(machine: Machine, folder: Path, tmp_path: Path):
    names = {"good": "mine"}
    for name, (key, value, _) in zip("abc", list(CONFIGS.values())[:3], strict=False):
        edit(Path(shutil.copytree(folder, tmp_path / name)) / "config.json", **{key: value})
        names[name] = name
    os.mkfifo(Path(shutil.copytree(folder, tmp_path / "pipe", ignore=lambda *_: {"config.json"})) / "config.json")
    names |= {"pipe": "pipe", "long": "x/" * 3000, "looped": "looped"}
    (tmp_path / "looped").symlink_to("looped")
    text = "".join(f'[models.{name}]\npath = "{tmp_path / path}"\n' for name, path in names.items())
    (tmp_path / "home" / "config").mkdir(parents=True, exist_ok=True)
    (tmp_path / "home" / "config" / "config.toml").write_text(text)
    listed = {m["name"]: m for m in json.loads(machine("models", "list", "--json").out)["models"]}
    assert [name for name in names if not listed[name]["supported"]] == [name for name in names if name != "good"]
    assert all(listed[name]["reason"] for name in names if name != "good")
    assert listed["good"]["context"] == 512


def test_a_folder_without_words_is_said_to_have_no_tokenizer(machine: Machine, folder: Path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    error = said(folder)
    assert (error.code, error.lines) == ("bad_tokenizer", ("its folder holds no vocabulary",))
    assert "has no readable tokenizer" in machine("models", "show", str(folder)).out
    asked = machine("chat", str(folder), "-p", "Hello")
    assert asked.exit == ExitStatus.BAD_MODEL
    assert "[bad_tokenizer]" in asked.err


MODELS = {
    "sentencepiece": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
    "tiktoken": b"IQ== 0\nIg== 1\n",
}


@pytest.mark.parametrize("package", MODELS)
def test_the_package_that_would_read_a_vocabulary_is_named(machine: Machine, folder: Path, package: str, monkeypatch):
    for name in ("sentencepiece", "tiktoken"):
        monkeypatch.setattr(f"transformers.utils.import_utils.is_{name}_available", lambda: False)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    (folder / "tokenizer.model").write_bytes(MODELS[package])
    asked = machine("chat", str(folder), "-p", "Hello")
    assert asked.exit == ExitStatus.BAD_MODEL
    assert f"pip install {package}" in asked.err
    assert [name for name in MODELS if name in asked.err] == [package]


def test_control_words_that_nobody_added_to_a_vocabulary_are_tokens_all_the_same(folder: Path):
    words = ("<|turn|>", "<turn_end>", "<string>")
    template = "{% for m in messages %}<|{{ 'turn' }}|>{{ m.content }}<turn_end>{% endfor %}"
    chatml(words=words, template=template).save_pretrained(folder)
    tokenizer, notes = load_tokenizer(source.find(str(folder)), False), list[str]()
    ids = render_prompt(tokenizer, [{"role": "user", "content": "".join(words)}], note=notes.append)
    assert [w for w in tokenizer.convert_ids_to_tokens(ids) if w in words] == ["<|turn|>", "<turn_end>"]
    assert decode(tokenizer, ids) == "<|turn|>" + "".join(words) + "<turn_end>"
    assert len(notes) == 1


def test_the_context_shown_is_the_one_a_chat_has(machine: Machine, tmp_path: Path):
    """GPT-2 calls it n_positions, and a config may leave it to its family."""
    from transformers import GPT2Config, GPT2LMHeadModel

    other, silent = tmp_path / "gpt2", tmp_path / "mistral"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=400, n_positions=77)).save_pretrained(other)
    build("mistral", vocab_size=400).save_pretrained(silent)
    config = json.loads((silent / "config.json").read_text())
    del config["max_position_embeddings"]
    (silent / "config.json").write_text(json.dumps(config))
    for path, context in ((other, 77), (silent, 131_072)):
        byte_fallback().save_pretrained(path)
        shown = json.loads(machine("models", "show", str(path), "--json").out)["models"][0]["context"]
        assert shown == open_lm(source.find(str(path)), device="cpu").limit == context


# ---- mutations ----


def test_mutated_models_answer_or_end_in_an_error_of_the_model():
    """The short form; `python tests/bench/stress_models.py --count 50000` is the long one."""
    tally = storm(120, tell=False)
    assert tally.bad == []
    assert tally.tried == 120
    assert tally.ends["answered"] >= 5, "a storm that breaks everything at once shows little"
    assert len(tally.ends) >= 5
