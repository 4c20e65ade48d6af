"""GGUF files as models: the numbers that the file says, nothing that matters left out, and copies that are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import kvcli
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadInput, BadModel, ExitStatus
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, plan_on, subject_of, told
from kvcli.fit.weights import weigh
from kvcli.installing import pip
from kvcli.kernels.linear_quantized import PackedLinear
from kvcli.models import source
from kvcli.models.catalog import CATALOG, CatalogModel, recommended
from kvcli.models.gguf import convert, header
from kvcli.models.gguf.convert import KEPT
from kvcli.models.gguf.header import TYPES
from kvcli.models.gguf.words import splits
from kvcli.models.sampling import stated_sampling
from kvcli.models.text import decode, render_prompt
from kvcli.models.tokenizer import load_tokenizer
from kvcli.settings.profile import Profile
from kvcli.summarize.wording import wording_of
from tests.covering import pinned
from tests.fakes import Machine
from tests.families import build, prompt
from tests.gguf_files import ARCHS, CHAT, KINDS, OF_256, VOCAB, vocabulary, write
from tests.test_model_probe import our_logits

gguf = pytest.importorskip("gguf")


def loaded(path: Path, *, packs: bool = True, dtype: str = "fp32") -> LM:
    return open_lm(
        convert.convert_if_needed(source.find(str(path)), dtype, path.parent / "cache", keeps_on="cpu" * packs),
        device="cpu",
    )


def refused(act: Any) -> BadModel:
    with pytest.raises(BadModel) as caught:
        act()
    assert caught.value.exit == ExitStatus.BAD_MODEL
    assert caught.value.try_
    return caught.value


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float(((mine - theirs).square().mean(1) / theirs.square().mean(1)).sqrt().max())


# ---- the numbers ----


BLOCKS = {"32": KINDS, "256": OF_256}  # by their numbers
FILES = product(ARCHS, BLOCKS, ("packed", "unpacked"))


@pytest.mark.parametrize(("family", "block", "how"), pinned(FILES, ("llama", "32", "packed")))
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, family: str, block: str, how: str):
    packs, model = how == "packed", write(tmp_path / "tiny.gguf", family, BLOCKS[block])
    lm, ids = loaded(tmp_path / "tiny.gguf", packs=packs), prompt(37)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    assert relative(our_logits(lm, ids, 13), theirs) < 1e-4
    held = [part for part in lm.model.modules() if isinstance(part, PackedLinear)]
    assert (len(held) > 0) == packs
    assert all(part.is_native for part in held)  # else right, and unpacked in every pass
    assert lm.info.parameters == sum(p.numel() for p in model.parameters())
    assert lm.windows == tuple(11 if kind == "sliding_attention" else None for kind in kinds_of(model))


def kinds_of(model: Any) -> list[str]:
    has = getattr(model.config, "sliding_window", None)
    return model.config.layer_types if has else ["full_attention"] * model.config.num_hidden_layers


@pytest.mark.parametrize("rope", ["llama3", "linear"])
def test_a_stretched_rope_comes_back_from_its_factors(tmp_path: Path, rope: str):
    said: dict[str, Any] = {"rope_type": rope, "factor": 32.0 if rope == "llama3" else 4.0, "rope_theta": 500000.0}
    if rope == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    from tests.recipes.gguf_export import export

    build("llama", rope_parameters=said, head_dim=64).save_pretrained(tmp_path / "model")
    file = export(source.find(str(tmp_path / "model")), "float32", tmp_path)
    factors = next(t.data for t in gguf.GGUFReader(file).tensors if t.name == "rope_freqs.weight")
    write(tmp_path / "tiny.gguf", head_dim=64, tensors={"rope_freqs.weight": factors.copy()}, rope_parameters=said)
    found = source.find(str(tmp_path / "tiny.gguf"))
    assert found.config["rope_parameters"] == pytest.approx(said)
    write(tmp_path / "odd.gguf", head_dim=64, tensors={"rope_freqs.weight": factors[::-1] * factors.cumsum()})
    assert "rope_freqs.weight" in refused(lambda: source.find(str(tmp_path / "odd.gguf"))).message


def test_the_table_of_types_is_ggmls():
    for number, (name, block, nbytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.constants.GGML_QUANT_SIZES[kind]) == (name, (block, nbytes))


# ---- nothing that matters is left out ----

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"keys": {"general.architecture": "bert"}}, "bert is none of llama, mistral3"),
    "kind": ({"keys": {"general.type": "adapter"}}, "type adapter"),
    "yarn": ({"keys": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type is yarn"),
    "experts": ({"keys": {"llama.expert_count": 8}}, "does not state its num_experts_per_tok"),
    "scale": ({"keys": {"llama.attention.scale": 0.5}}, "llama.attention.scale = 0.5"),
    "window": ({"keys": {"llama.attention.sliding_window": 16}}, "llama.attention.sliding_window = 16"),
    "encoder": ({"keys": {"llama.attention.causal": False}}, "llama.attention.causal = False"),
    "unheard of": ({"keys": {"llama.frobnicate": 1}}, "llama.frobnicate = 1"),
    "part of a head": ({"keys": {"llama.rope.dimension_count": 8}}, "rope.dimension_count differs from the head size"),
    "per layer": ({"keys": {"llama.feed_forward_length": [64, 64, 32, 64]}}, "one number for all layers"),
    "tensor": ({"tensors": {"blk.0.ffn_gate.bias": torch.zeros(64).numpy()}}, "ffn_gate.bias is unknown"),
    "splitting": ({"keys": {"tokenizer.ggml.pre": "deepseek-llm"}}, "tokenizer.ggml.pre = deepseek-llm"),
    "unknown splitting": ({"drop": ("tokenizer.ggml.pre",)}, "tokenizer.ggml.pre = None"),
    "vocabulary": ({"words": VOCAB + 1}, "its vocabulary has 321 tokens, its embedding 320 rows"),
    "a space before words": ({"keys": {"tokenizer.ggml.add_space_prefix": True}}, "add_space_prefix = True"),
    "rule of words": ({"keys": {"tokenizer.ggml.escape_whitespaces": False}}, "ggml.escape_whitespaces = False"),
    "spaces": ({"keys": {"tokenizer.ggml.remove_extra_whitespaces": True}}, "remove_extra_whitespaces = True"),
    "letters": ({"keys": {"tokenizer.ggml.precompiled_charsmap": [1, 2]}}, "tokenizer.ggml.precompiled_charsmap"),
    "no truth": ({"keys": {"tokenizer.ggml.add_eos_token": "no"}}, "tokenizer.ggml.add_eos_token = no"),
    "types": ({"keys": {"tokenizer.ggml.token_type": [1, 1]}}, "has 320 tokens, but 2 token types"),
    "sizes": ({"drop": ("llama.embedding_length",)}, "it does not state its hidden_size"),
    "layers": ({"keys": {"llama.block_count": 1 << 31}}, "2,147,483,648 layers"),
    "a number that is none": ({"keys": {"llama.rope.freq_base": math.nan}}, "rope.freq_base is nan"),
    "no base": ({"keys": {"llama.rope.freq_base": 0.0}}, "its rope frequencies"),
    "heads": ({"keys": {"llama.attention.head_count": 7}}, "not a multiple of 7 x 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(tmp_path: Path, name: str):
    changes, says = REFUSED[name]
    write(tmp_path / "tiny.gguf", **changes)
    error = refused(lambda: source.find(str(tmp_path / "tiny.gguf")))
    assert (error.code, says in error.message) == ("gguf_unsupported", True), error.message


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.vocab_size": 999},
        {"llama.rope.dimension_count": 16},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {"llama.attention.head_count_kv": [2, 2, 2, 2]},
        {"llama.expert_count": 0},
        {"tokenizer.ggml.fim_pre_token_id": 7, "tokenizer.ggml.add_sep_token": False},
        {"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.ggml.remove_extra_whitespaces": False},
    ],
    ids=lambda keys: " ".join(keys),
)
def test_what_changes_nothing_is_read_past(tmp_path: Path, keys: dict[str, Any]):
    write(tmp_path / "plain.gguf")
    write(tmp_path / "tiny.gguf", keys=keys)
    assert source.find(str(tmp_path / "tiny.gguf")).config == source.find(str(tmp_path / "plain.gguf")).config


def test_linear_stretching_is_read_from_the_metadata(tmp_path: Path):
    write(tmp_path / "tiny.gguf", keys={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    rope = source.find(str(tmp_path / "tiny.gguf")).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_a_missing_tensor_is_named(tmp_path: Path):
    write(tmp_path / "tiny.gguf", drop=("blk.2.ffn_up.weight",))
    error = refused(lambda: source.find(str(tmp_path / "tiny.gguf")))
    assert (error.code, "blk.2.ffn_up.weight" in error.message) == ("model_incomplete", True)


# ---- words ----


def test_words_come_from_the_file_alone(tmp_path: Path):
    write(tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of another model", "eos_token": "nonsense"}')
    with kvcli.load(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", set={"load.device": "cpu"}) as model:
        words = model.tokenizer
        assert words.chat_template == CHAT
        assert words.decode(words("the é\n日")["input_ids"]) == "the é\n日"
        assert words.tokenize("  12 th") == ["ĠĠ"[:1], "Ġ", "1", "2", "Ġ", "th"]  # a digit is a word of its own
        assert model.lm.stop_ids == {0, 2}  # the end it states, and the other that everybody ends at


def test_rules_of_cutting_are_transformers_own_where_it_has_them():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    assert {name: rule["cuts"] for name, rule in splits().items() if name in THEIRS} == {
        name: [cut] for name, cut in THEIRS.items() if name in splits()
    }


def test_a_word_that_no_merges_lead_to_is_taken_whole_where_llama_cpp_does(tmp_path: Path):
    file, said = tmp_path / "tiny.gguf", dict[str, list[str]]()
    for rule in ("llama-bpe", "gpt-2"):
        write(file, keys={"tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": ["Ġ a"]})  # none to "th"
        folder = convert.convert_if_needed(source.find(str(file)), "auto", tmp_path / "cache", keeps_on="cpu")
        said[rule] = load_tokenizer(folder, False).tokenize("th")
    assert said == {"llama-bpe": ["th"], "gpt-2": ["t", "h"]}


def words_of(tmp_path: Path, *given: str, type: int, **changes: Any) -> Any:
    """The tokenizer of a file whose last tokens are the words `given`, of such a type (1 = normal, 4 = user's)."""
    said = vocabulary("llama", VOCAB)
    said["tokenizer.ggml.tokens"][-len(given) :] = given
    said["tokenizer.ggml.token_type"][-len(given) :] = [type] * len(given)
    write(tmp_path / "tiny.gguf", keys=said | changes)
    return load_tokenizer(
        convert.convert_if_needed(source.find(str(tmp_path / "tiny.gguf")), "auto", tmp_path, keeps_on="cpu"), False
    )


@pytest.mark.parametrize("type", [1, 3, 4])
def test_control_words_of_a_template_are_tokens_whatever_their_type_and_of_no_text(tmp_path: Path, type: int):
    given = ("<\uff5cUser\uff5c>", "<|turn|>", "<turn_end>", "<\uff5cend\u2581of\uff5c>")
    template = (
        "{% for m in messages %}" + "".join(given[:2]) + "{{ m['content'] }}" + "".join(given[2:]) + "{% endfor %}"
    )
    more = {"tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": VOCAB - 1}
    words, notes = words_of(tmp_path, *given, type=type, **more), []
    ids = render_prompt(words, [{"role": "user", "content": "a" + "".join(given)}], note=notes.append)
    assert [i for i in ids if i >= VOCAB - 4] == [VOCAB - 4, VOCAB - 3, VOCAB - 2, VOCAB - 1]
    assert decode(words, ids) == "".join(given[:2]) + "a" + "".join(given) + "".join(given[2:])
    assert len(notes) == 1
    assert words.eos_token_id == VOCAB - 1
    assert max(words.get_vocab().values()) == VOCAB - 1


def test_runs_of_spaces_stay_words_whatever_their_type(tmp_path: Path):
    said = vocabulary("gemma2", VOCAB)
    said["tokenizer.ggml.tokens"][-1] = "  "
    said["tokenizer.ggml.token_type"][-1] = 4
    write(tmp_path / "tiny.gguf", "gemma2", keys=said)
    words = load_tokenizer(
        convert.convert_if_needed(source.find(str(tmp_path / "tiny.gguf")), "auto", tmp_path, keeps_on="cpu"), False
    )
    assert words.tokenize("a  b") == ["a", "\u2581\u2581", "b"]


def test_a_vocabulary_says_whether_a_space_leads_its_text(tmp_path: Path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abt"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 4, *[5] * (VOCAB - 263)]
    said = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": [0.0] * VOCAB}
    for leads in (True, False):
        keys = {f"tokenizer.ggml.{key}": value for key, value in (said | {"add_space_prefix": leads}).items()}
        ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("unknown", "bos", "eos"))}
        write(tmp_path / "tiny.gguf", keys=keys | ids, drop=("tokenizer.ggml.merges",))
        found = source.find(str(tmp_path / "tiny.gguf"))
        words = load_tokenizer(convert.convert_if_needed(found, "auto", tmp_path / str(leads), keeps_on="cpu"), False)
        assert words.tokenize("ab") == (["\u2581"] if leads else []) + ["a", "b"]
        read = [words.decode(words.encode(text, add_special_tokens=False)) for text in ("ab", " ab")]
        assert read == ["ab", "ab" if leads else " ab"]


def test_an_older_transformers_is_not_trusted_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "tiny.gguf")
    monkeypatch.setattr("kvcli.models.gguf.convert.find_spec", lambda _: None)
    assert refused(lambda: loaded(tmp_path / "tiny.gguf")).try_ == (pip("-U", "transformers"),)


def test_a_file_without_a_vocabulary_is_no_model_here(tmp_path: Path):
    write(tmp_path / "tiny.gguf", drop=("tokenizer.ggml.tokens",))
    assert refused(lambda: source.find(str(tmp_path / "tiny.gguf"))).code == "bad_tokenizer"


def test_a_vocabulary_that_transformers_cannot_read_is_said(tmp_path: Path):
    write(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.eos_token_id": 1 << 20})
    error = refused(lambda: loaded(tmp_path / "tiny.gguf"))
    assert (error.code, list((tmp_path / "cache" / "gguf").iterdir())) == ("bad_tokenizer", [])


@pytest.mark.parametrize("more", [0, 1, 2])
def test_words_without_a_row_in_the_embedding_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int):
    """As of a transformers that adds words of its own: whoever typed one would have numbers of nobody looked up."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    plain = theirs.add_gguf_special_tokens

    def adds(tokenizer: Any, said: Any) -> Any:
        made = plain(tokenizer, said)
        made.add_tokens([f"<their own {i}>" for i in range(more)])
        return made

    monkeypatch.setattr(theirs, "add_gguf_special_tokens", adds)
    write(tmp_path / "tiny.gguf")
    if not more:
        loaded(tmp_path / "tiny.gguf")
        return
    error = refused(lambda: loaded(tmp_path / "tiny.gguf"))
    assert error.code == "bad_tokenizer"
    assert f"its token {VOCAB + more - 1} has no embedding" in str(error)
    assert not list((tmp_path / "cache" / "gguf").iterdir())


# ---- where it is found ----


def test_a_folder_with_one_file_is_that_model(tmp_path: Path):
    write(tmp_path / "model" / "tiny.gguf")
    (tmp_path / "model" / "config.json").write_text("{}")  # hub repositories of GGUF files often have one
    found = source.find(str(tmp_path / "model"))
    assert (found.is_gguf, found.path.name, found.family) == (True, "tiny.gguf", "llama")
    (tmp_path / "model" / "tiny.gguf").rename(tmp_path / "model" / "tiny.GGUF")
    assert source.find(str(tmp_path / "model")).path.name == "tiny.GGUF"
    (tmp_path / "model" / "other.gguf").write_bytes(b"GGUF")
    error = refused(lambda: source.find(str(tmp_path / "model")))
    assert (error.code, error.lines) == ("gguf_several", ("other.gguf", "tiny.GGUF"))
    assert error.try_ == (str(tmp_path / "model" / "other.gguf"),)


# ---- split over several files ----


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """The files of one model, of three tensors and more each."""
    write(tmp_path / "tiny.gguf", split=14)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3
    return files


def test_a_split_model_is_the_model_of_one_file_by_any_of_its_names(tmp_path: Path, split: list[Path]):
    write(tmp_path / "whole" / "tiny.gguf")
    whole = header.read(tmp_path / "whole" / "tiny.gguf")
    for file in split:
        found = source.find(str(file))
        assert (found.path, [f.path for f in found.files]) == (split[0], split)
    assert source.find(str(tmp_path)).path == split[0]
    read = header.read(split[1])
    assert read.meta == whole.meta
    assert {n: (t.kind, t.shape) for n, t in read.tensors.items()} == {
        n: (t.kind, t.shape) for n, t in whole.tensors.items()
    }
    assert sorted(n for f in found.files for n in f.tensors) == sorted(
        n for f in source.find(str(whole.path)).files for n in f.tensors
    )
    one, other = (loaded(path).model.state_dict() for path in (split[2], whole.path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def _renumbered(files: list[Path]) -> None:
    files[1].write_bytes(files[2].read_bytes())


def _of_another(files: list[Path]) -> None:
    write(files[0].parent / "other" / "tiny.gguf", split=14, num_hidden_layers=5)
    other = sorted((files[0].parent / "other").glob("*.gguf"))
    files[2].write_bytes(other[2].read_bytes())


def _cut(files: list[Path]) -> None:
    files[2].write_bytes(files[2].read_bytes()[:-1])


def _alone(files: list[Path]) -> None:
    for file in files[1:]:
        file.unlink()
    files[0].rename(files[0].with_name("tiny.gguf"))


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda files: files[1].unlink(), "model_incomplete", "tiny-00002-of-00003.gguf"),
        (_renumbered, "model_corrupt", "split.no is 2, not 1"),
        (_of_another, "model_corrupt", "it is not of the other files' model"),
        (_cut, "model_corrupt", "1 bytes are missing"),
        (_alone, "model_incomplete", "its name does not say which"),
    ],
)
def test_files_that_are_no_whole_model_are_named(tmp_path: Path, split: list[Path], spoil, code: str, said: str):
    spoil(split)
    error = refused(lambda: source.find(str(next(iter(sorted(tmp_path.glob("*.gguf")))))))
    assert error.code == code
    assert said in " ".join([error.message, *error.lines])
    assert error.try_


def test_safetensors_go_before_gguf_in_one_folder(tmp_path: Path):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert not source.find(str(tmp_path)).is_gguf


def test_a_file_of_a_hub_repository_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options.get("allow_patterns")))
        write(tmp_path / "snapshots" / "abc" / "sub" / "tiny.gguf")
        return str(tmp_path / "snapshots" / "abc")

    listed = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in ("sub/tiny.gguf", "b.gguf")])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: listed)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    told: list[str] = []
    found = source.find("some-one/tiny-GGUF:sub/tiny.gguf", tell=told.append)
    assert asked == [("some-one/tiny-GGUF", ["sub/tiny.gguf"])]
    assert (found.is_gguf, found.revision, len(told)) == (True, "abc", 1)
    assert "has no file" in refused(lambda: source.find("some-one/tiny-GGUF:other.gguf", tell=told.append)).message


@pytest.mark.parametrize("name", ["some/one:../../etc/x.gguf", "some/one:tiny.bin", "one:tiny.gguf"])
def test_other_names_with_a_colon_are_none(name: str):
    assert refused(lambda: source.find(name, tell=print)).code == "model_not_found"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file has 0"),
        (b"PK\x03\x04 and so on", "it is no GGUF file: it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"GGUF\x01\0\0\0" + b"\0" * 16, "GGUF version 1"),
        (b"GGUF\0\0\0\x03" + b"\0" * 16, "in the byte order of other machines"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "it announces"),
        (b"GGUF\x03\0\0\0", "its header needs"),
    ],
)
def test_what_is_no_gguf_file_is_said(tmp_path: Path, data: bytes, says: str):
    (tmp_path / "tiny.gguf").write_bytes(data)
    error = refused(lambda: source.find(str(tmp_path / "tiny.gguf")))
    assert (error.code, says in error.lines[0]) == ("model_corrupt", True), error.lines


def test_a_file_cut_short_anywhere_is_damaged(tmp_path: Path):
    write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for n in [*range(4, 400, 7), 5000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:n])
        assert refused(lambda: source.find(str(tmp_path / "cut.gguf"))).code == "model_corrupt"


# ---- the copy ----


def test_it_is_dequantized_once_and_again_when_it_changed(tmp_path: Path):
    file, cache, told = tmp_path / "tiny.gguf", tmp_path / "cache", list[str]()
    write(file)
    ready = partial(convert.convert_if_needed, cache=cache, tell=told.append)
    first = ready(source.find(str(file)), "auto", keeps_on="cpu")
    assert (len(told), str(first.path) in told[0], first.id) == (1, True, str(file))
    assert ready(source.find(str(file)), "auto", keeps_on="cpu").path == first.path
    assert len(told) == 1
    assert {ready(source.find(str(file)), d, keeps_on=p).path.name.partition("-")[2] for d in ("auto", "fp32")
            for p in ("cpu", "")} == {"bfloat16-packed", "bfloat16", "float32-packed", "float32"}  # fmt: skip
    write(file, seed=1)
    assert ready(source.find(str(file)), "auto", keeps_on="cpu").path != first.path
    kept = [p for p in (cache / "gguf").iterdir() if p.is_dir()]
    assert len(kept) == KEPT
    assert all(p.stat().st_mode & 0o777 == 0o700 for p in kept)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "tiny.gguf")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("kvcli.models.gguf.pieces.numbers", full)
        with pytest.raises(BadInput, match=r"cannot write .*/cache/gguf/.*: No space"):
            loaded(tmp_path / "tiny.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(BadInput, match="no room on the disk"):
        loaded(tmp_path / "tiny.gguf")


def test_a_large_tensor_is_written_a_stretch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "tiny.gguf")
    whole, bit = (tmp_path / name for name in ("whole", "bit"))
    found = source.find(str(tmp_path / "tiny.gguf"))
    one = convert.convert_if_needed(found, "fp32", whole, keeps_on="cpu").path / "model.safetensors"
    monkeypatch.setattr("kvcli.models.gguf.blocks._STRETCH", 700)  # two rows and a bit
    two = convert.convert_if_needed(found, "fp32", bit, keeps_on="cpu").path / "model.safetensors"
    assert one.read_bytes() == two.read_bytes()
    with safe_open(one, "pt") as file:
        assert file.get_tensor("model.layers.0.self_attn.q_proj.weight").dtype == torch.uint8


@pytest.mark.parametrize(
    ("packs", "dtype"), [(True, "bf16"), (True, "fp32"), (False, "bf16"), (False, "fp32"), (False, "fp64")]
)
def test_fit_knows_by_the_header_what_will_be_in_memory(tmp_path: Path, packs: bool, dtype: str):
    write(tmp_path / "tiny.gguf")
    subject = subject_of(source.find(str(tmp_path / "tiny.gguf")))
    number, device = {"bf16": 2, "fp32": 4, "fp64": 8}[dtype], "cpu" if packs or dtype == "fp64" else "cuda"
    foretold = weigh(
        subject.held, subject.shape, number=number, quant="none", device=device, given=False, is_whole=packs
    )
    lm = loaded(tmp_path / "tiny.gguf", packs=packs, dtype=dtype)
    rope = sum(b.nbytes for name, b in lm.model.named_buffers() if "inv_freq" in name)
    assert foretold.memory == pytest.approx(lm.info.weight_bytes - rope, abs=64)


def test_what_stays_quantized_is_told(tmp_path: Path):
    write(tmp_path / "tiny.gguf")
    with kvcli.load(str(tmp_path / "tiny.gguf"), cache=tmp_path, set={"load.device": "cpu"}) as model:
        assert not any("GGUF" in note for note in model.info.notes)
        assert [*model.info.details] == [
            "GGUF tensors that run in the file's bits: 3 IQ4_NL, 3 MXFP4, 2 Q4_0, 3 Q4_1, 3 Q5_0, 3 Q5_1, 6 Q8_0",
            "GGUF tensors converted to bfloat16: 1 TQ1_0",
        ]
        assert model.info.backend.startswith("native blocks, as in the checkpoint")
    with kvcli.load(str(tmp_path / "tiny.gguf"), cache=tmp_path, set={"load.quant": "int8"}) as model:
        assert model.info.backend.split(" ", 1)[1].startswith("packed int8")
        assert model.info.quant == "int8"  # asked for: from the unpacked numbers
    with kvcli.load(str(tmp_path / "tiny.gguf"), cache=tmp_path, set={"load.dtype": "fp64"}) as model:
        assert not any(
            "in the file's bits" in note for note in model.info.details
        )  # no packed product is made in float64
        assert model.info.backend == "torch"


def test_a_profile_for_cpus_leaves_quantized_weights_as_they_are(tmp_path: Path):
    write(tmp_path / "tiny.gguf", kinds=("Q4_0",))
    write(tmp_path / "mixed.gguf", kinds=(*["F16"] * 7, "Q4_0"), ends="F16")
    build("llama").save_pretrained(tmp_path / "plain")
    cpu = Profile.load("cpu")
    typed = Profile.load("exact").replace(load={"quant": "int8"})
    for folder, profile, quant in (
        ("tiny.gguf", cpu, "none"),
        ("mixed.gguf", cpu, "int8"),  # most of its layers have 16 bits
        ("tiny.gguf", typed, "int8"),  # asked for
        ("plain", cpu, "int8"),
    ):
        subject = subject_of(source.find(str(tmp_path / folder)))
        found = plan_on(subject, profile, AvailableMemory("cpu", 8 << 30), None, MeasuredFacts())
        assert found.profile.load.quant == quant
        assert ("weights keep the bits of their file" in " ".join(told(found))) == (quant == "none")


@pytest.mark.parametrize("family", ARCHS)
def test_weights_are_counted_alike_in_the_file_dequantized_and_loaded(tmp_path: Path, family: str):
    write(tmp_path / "tiny.gguf", family)
    found = source.find(str(tmp_path / "tiny.gguf"))
    lm, made = (
        loaded(tmp_path / "tiny.gguf"),
        convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on="cpu"),
    )
    assert found.parameters == made.parameters == lm.info.parameters


def test_a_plan_is_worded_as_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the number of weights, whichever of its files is looked at."""
    write(tmp_path / "tiny.gguf")
    lm = loaded(tmp_path / "tiny.gguf")
    row = f'families = ["llama"]\nparameters = [{lm.info.parameters}, {lm.info.parameters + 1}]\nsentence = 9\n'
    (tmp_path / "wordings.toml").write_text(f"[[wording]]\n{row}")
    monkeypatch.setattr("kvcli.summarize.wording.TABLE", tmp_path / "wordings.toml")
    found = source.find(str(tmp_path / "tiny.gguf"))
    made = convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on="cpu")
    assert [wording_of(model).sentence for model in (found, made, lm.info)] == [9, 9, 9]


# ---- how it is sampled ----


def sampled(file: Path, **said: Any) -> tuple[dict[str, float], str]:
    """The settings of an answer, and what is told of them."""
    with kvcli.load(str(file), "exact", said, cache=file.parent / "cache") as model:
        return model.generate([5, 6, 7], 2).stats.sampling, "; ".join(model.info.details)


@pytest.mark.parametrize(
    ("family", "recommended"),
    [
        ("llama", {"temperature": 0.0}),  # of which there are too many kinds
        ("qwen2", {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
        ("qwen3", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ("gemma3", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    ],
)
def test_a_file_that_says_nothing_of_sampling_is_sampled_as_its_familys_cards_say(
    tmp_path: Path, family: str, recommended: dict[str, float]
):
    write(tmp_path / "tiny.gguf", family)
    found, told = sampled(tmp_path / "tiny.gguf")
    assert found == recommended
    origin = "default" if family == "llama" else "the model card"
    assert stated_sampling(source.find(str(tmp_path / "tiny.gguf"))) == (recommended, origin)
    assert ("the model has no sampling settings; kvcli uses" in told) == (family != "llama")
    mine, _ = sampled(tmp_path / "tiny.gguf", **{"sample.temperature": 0.0, "sample.repetition_penalty": 1.3})
    assert (mine["temperature"], mine["repetition_penalty"]) == (0.0, 1.3)


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({"temp": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"temp": 0.9, "xtc_probability": 0.5}, {"temperature": 0.9, "xtc_probability": 0.5}),
        ({"penalty_repeat": 1.15}, {"temperature": 1.0, "repetition_penalty": 1.15}),
        ({"temp": 0.0, "penalty_repeat": 1.15}, {"temperature": 0.0, "repetition_penalty": 1.15}),
    ],
)
def test_what_a_file_says_of_sampling_holds(tmp_path: Path, keys: dict[str, Any], chosen: dict[str, float]):
    write(tmp_path / "tiny.gguf", "qwen3", keys={f"general.sampling.{key}": value for key, value in keys.items()})
    found, told = sampled(tmp_path / "tiny.gguf")
    assert found == chosen
    assert stated_sampling(source.find(str(tmp_path / "tiny.gguf"))) == (chosen, "the GGUF file")
    assert "sampling" not in told


def test_sampling_settings_out_of_range_are_those_of_the_gguf_file(tmp_path: Path):
    write(tmp_path / "tiny.gguf", keys={"general.sampling.top_p": 7.0})
    for act in (
        lambda: loaded(tmp_path / "tiny.gguf"),
        lambda: stated_sampling(source.find(str(tmp_path / "tiny.gguf"))),
    ):
        error = refused(act)
        assert "general.sampling of" in error.message
        assert "generation_config" not in str(error)


@pytest.mark.parametrize("known", CATALOG, ids=lambda known: known.name)
def test_a_model_of_the_list_is_known_by_its_sizes(known: CatalogModel):
    names = {"num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
    names |= {"intermediate_size": "inner", "vocab_size": "vocab"}
    config = {theirs: getattr(known.shape, ours) for theirs, ours in names.items()} | {"model_type": "olmo2"}
    assert recommended(config, "mine") == known.sampling
    assert recommended(config | {"num_hidden_layers": 3}, "mine") == {}


# ---- the commands ----


def test_the_commands_take_a_file(tmp_path: Path):
    file = str(tmp_path / "tiny.gguf")
    write(Path(file))
    shown = json.loads(Machine(tmp_path)("models", "show", file, "--json").out)["models"][0]
    assert (shown["supported"], shown["kind"], shown["dtype"], shown["context"]) == (True, "file", "q8_0", 512)
    assert Machine(tmp_path)("fit", file, "--ctx", "100").exit == 0
    assert not (tmp_path / "home" / "cache" / "gguf").exists()  # by the header alone


def test_the_cache_counts_copies_as_one_thing_each(tmp_path: Path):
    home = tmp_path / "home" / "cache" / "gguf"
    write(tmp_path / "tiny.gguf")
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    loaded(tmp_path / "tiny.gguf")
    shutil.copytree(tmp_path / "cache" / "gguf", home)
    found = json.loads(Machine(tmp_path)("cache", "info", "--json").out)["kinds"]
    assert next(k["entries"] for k in found if k["kind"] == "gguf") == 1
    for p in home.rglob("*"):
        os.utime(p, (0, 0))
    Machine(tmp_path)("cache", "prune", "gguf")
    assert list(home.iterdir()) == []
