"""Finding and loading models: what loads, and what each broken or unsupported folder says."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvcli.engine.loading import weights
from kvcli.engine.loading.open_lm import install_kernels, open_lm, wrap_lm
from kvcli.engine.loading.weights import quantize_with_bitsandbytes
from kvcli.errors import BadModel, ExitStatus, KvcliError, UsageError
from kvcli.fit.weights import of_files, weigh
from kvcli.kernels.moe_linear import weights_of
from kvcli.kernels.native import levels
from kvcli.models import source
from kvcli.models import source as hub
from kvcli.models.family import read_config
from kvcli.models.shape import shape_of
from tests import make
from tests.families import build, config_of

ROOT = Path(__file__).parents[1]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build("qwen2").save_pretrained(path)
    return path


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny, tmp_path / "mine"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    build("qwen2").save_pretrained(tmp_path / "mine", max_shard_size="20KB")
    return tmp_path / "mine"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache, and an error for whoever opens a connection."""

    def refuse(*_: object) -> None:
        raise AssertionError("this test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def refused(work: Callable[[], object]) -> KvcliError:
    """The error that `work` ends in, checked to be one a user can act on."""
    with pytest.raises(KvcliError) as caught:
        work()
    assert "\n" not in caught.value.message
    assert caught.value.try_, "an error says what to do"
    return caught.value


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# ---- what loads ----


def test_a_folder_loads_with_what_the_model_says_of_itself(folder: Path):
    settings = {"eos_token_id": [5, 7, -1], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    edit_config(folder, eos_token_id=9)
    found = source.find(str(folder))
    lm = open_lm(found, device="cpu")
    assert (lm.n_layers, lm.n_heads, lm.n_kv_heads, lm.head_dim, lm.vocab) == (3, 4, 2, 12, 97)
    assert lm.stop_ids == {5, 7, 9}
    assert lm.generation == {"temperature": 0.6, "top_p": 0.9}
    assert lm.limit == 512
    assert lm.info.parameters == found.parameters
    assert 0 <= lm.info.weight_bytes - found.parameters * 4 < 100  # the rotary table comes on top
    assert (lm.info.family, lm.info.dtype, lm.info.backend.split(",")[0]) == ("qwen2", "float32", "torch")


def test_sampling_settings_do_not_count_where_the_model_is_greedy(folder: Path):
    (folder / "generation_config.json").write_text('{"do_sample": false, "repetition_penalty": 1.1}')
    assert open_lm(source.find(str(folder)), device="cpu").generation == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_the_demo_loads():
    lm = open_lm(source.find("demo"), device="cpu")
    assert lm.info.id == "demo"
    assert lm.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16", "fp32"])
def test_dtypes(folder: Path, dtype: str):
    wanted = {"auto": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert open_lm(source.find(str(folder)), device="cpu", dtype=dtype).dtype == wanted[dtype]


def test_shards_load(sharded: Path):
    found = source.find(str(sharded))
    assert len(found.files) > 2
    assert open_lm(found, device="cpu").info.parameters == found.parameters


def test_shards_may_lie_in_a_folder(sharded: Path):
    (sharded / "parts").mkdir()
    for shard in sharded.glob("*.safetensors"):
        shard.rename(sharded / "parts" / shard.name)
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {k: f"parts/{v}" for k, v in weight_map.items()}}))
    assert {f.path.parent.name for f in source.find(str(sharded)).files} == {"parts"}


@pytest.mark.parametrize("shard", [5, ["a.safetensors"], "."])
def test_an_index_that_names_no_files_is_refused(sharded: Path, shard: object):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    assert refused(lambda: source.find(str(sharded))).exit == ExitStatus.BAD_MODEL


@pytest.mark.parametrize("changes", [{"layer_types": 5}, {"architectures": [5]}, {"architectures": {"x": 1}}])
def test_settings_of_the_wrong_type_are_refused(folder: Path, changes: dict[str, Any]):
    edit_config(folder, **changes)
    assert "wrong type" in refused(lambda: source.find(str(folder))).message


def test_json_without_end_is_refused(folder: Path):
    (folder / "config.json").write_text("[" * 100_000)
    assert "is not JSON" in refused(lambda: source.find(str(folder))).message


def test_loading_prints_nothing(sharded: Path, capfd: pytest.CaptureFixture[str]):
    open_lm(source.find(str(sharded)), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_a_model_that_nobody_holds_is_freed():
    lm = make.model("llama", verify=True)
    gone = weakref.ref(lm.model)
    del lm
    gc.collect()
    assert gone() is None


def test_pickles_load_when_allowed(folder: Path):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    found = source.find(str(folder), allow_pickle=True)
    assert open_lm(found, device="cpu", allow_pickle=True).info.parameters > 0


def test_a_hub_id_is_found_in_the_cache(folder: Path, tmp_path: Path):
    repo = tmp_path / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    found = source.find("someone/tiny", offline=True)
    assert (found.id, found.revision, found.family) == ("someone/tiny", commit, "qwen2")


def test_headers_are_read_without_the_weights(folder: Path):
    found = source.find(str(folder))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert set(found.files[0].tensors) == set(weights.keys())
    assert found.nbytes == (folder / "model.safetensors").stat().st_size
    assert found.dtype == "F32"


def test_a_vision_model_loads_its_text_decoder(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = config_of("gemma3", vocab_size=300).to_dict()
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, image_token_index=299)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mine")
    lm = open_lm(source.find(str(tmp_path / "mine")), device="cpu")
    assert lm.windows == (11, None, 11)
    assert (lm.n_layers, lm.vocab) == (3, 300)


# ---- quantization on the CPU ----


def wide(tmp_path: Path, **changes: Any) -> Path:
    """A model whose layers can be packed and fill panels of 64 outputs."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32} | changes
    build("llama", **sizes).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize(("quant", "least", "most"), [("int8", 3.3, 4.0), ("int4", 4.7, 8.0)])
def test_quantized_weights_shrink_the_layers_and_nothing_else(tmp_path: Path, quant: str, least: float, most: float):
    found = source.find(str(wide(tmp_path)))
    plain, packed = open_lm(found, device="cpu"), open_lm(found, device="cpu", quant=quant)
    assert packed.info.backend.split(",")[0] in (f"native packed {quant}", f"torch packed {quant}")
    assert packed.info.parameters == plain.info.parameters
    assert packed.info.notes == ()
    of_layers = [m for n, m in plain.model.named_modules() if ".layers." in n and hasattr(m, "in_features")]
    layers = sum(m.in_features * m.out_features * 4 for m in of_layers)
    other = plain.info.weight_bytes - layers
    assert least < layers / (packed.info.weight_bytes - other) < most
    assert type(packed.model.lm_head) is type(plain.model.lm_head)


def test_layers_that_cannot_be_quantized_are_counted(tmp_path: Path):
    found = source.find(str(wide(tmp_path, intermediate_size=40)))
    notes = open_lm(found, device="cpu", quant="int4").info.notes
    assert "3 linear layers were not quantized: 40 inputs are not a multiple of 32" in notes
    assert "6 linear layers were not quantized: 40 outputs are not a multiple of 16" in notes


EXPERTS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # files with a tensor an expert; with all in one, and biases
def test_experts_are_quantized_on_their_way_into_memory(tmp_path: Path, name: str, quant: str):
    model = build(name, torch.bfloat16, **EXPERTS)
    model.save_pretrained(tmp_path / "mine")
    found = source.find(str(tmp_path / "mine"))
    config = read_config(found, False)
    read, _ = weights.load_weights(found, config, "auto", torch.device("cpu"), False, quant)
    in_full = [p for m in read.modules() for _, p, _ in weights_of(m)]
    assert len(in_full) == (6 if quant == "none" else 0)
    assert not hasattr(read.config, "quantization_config")
    lm, of = open_lm(found, device="cpu", quant=quant), wrap_lm(model, quant=quant)
    install_kernels(of)
    assert (lm.info.notes, lm.info.parameters) == ((), of.info.parameters)
    assert lm.is_row_invariant or not levels()
    assert torch.equal(*(some.model.model.layers[1].mlp.experts.down_proj.form.memory for some in (lm, of)))
    shape = shape_of(found.text_config)
    planned = weigh(of_files(found), shape, number=2, quant=quant, device="cpu", given=False)
    assert planned.memory == pytest.approx(lm.info.weight_bytes, rel=0.02)


def test_experts_that_cannot_be_quantized_are_counted():
    notes = make.model("qwen3_moe", hidden_size=64, moe_intermediate_size=24, quant="int4").info.notes
    assert "15 linear layers were not quantized: 24 inputs are not a multiple of 32" in notes


@pytest.mark.parametrize(("quant", "within"), [("int8", 0.02), ("int4", 0.15), ("nf4", 0.13)])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_layers_take_the_place_of_linear_ones(quant: str, within: float):
    """What CUDA gets, run on the CPU, where nobody would want it."""
    layers = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = layers[0](x)
        swap = quantize_with_bitsandbytes(layers, quant, torch.device("cpu"))
        off = (layers[0](x) - before).square().mean().sqrt() / before.square().mean().sqrt()
    assert (swap.packed, swap.weights) == (2, 128 * 64 + 64 * 64)
    assert swap.nbytes == swap.weights // (1 if quant == "int8" else 2)
    assert 0 < off < within


def test_nf4_on_a_cpu_says_what_to_type(folder: Path):
    error = refused(lambda: open_lm(source.find(str(folder)), device="cpu", quant="nf4"))
    assert isinstance(error, UsageError)
    assert error.code == "bad_quant"
    assert error.try_ == ("--quant int4", "kvcli fit --vram 12GiB, to ask about a GPU")


def test_a_checkpoint_quantized_already_is_not_quantized_again(folder: Path):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    error = refused(lambda: open_lm(source.find(str(folder)), device="cpu", quant="int8"))
    assert error.code == "bad_quant"
    assert "--set load.quant=none" in error.try_


@pytest.mark.parametrize("device", ["cuda:7", "sofa", "mps:3"])
def test_a_device_that_is_not_there(folder: Path, device: str):
    error = refused(lambda: open_lm(source.find(str(folder)), device=device))
    assert error.exit == ExitStatus.USAGE
    assert f"load.device = {device}" in error.message


# ---- broken folders: (what is done to a folder, what the error says, its code) ----


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json", "model_incomplete"),
    "adapter": (_adapter, "has no config.json", "model_incomplete"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{,"), "is not JSON", "model_corrupt"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "holds no JSON object", "model_corrupt"),
    "config is binary": (lambda f: (f / "config.json").write_bytes(b"\xff\x00"), "is not JSON", "model_corrupt"),
    "no model_type": (lambda f: edit_config(f, model_type=None), "names no model_type", "model_corrupt"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights", "model_incomplete"),
    "truncated": (_truncate, "model.safetensors is damaged or cut short", "model_corrupt"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or cut short", "model_corrupt"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_text("x" * 99), "damaged or cut", "model_corrupt"),
    "lfs pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "damaged or cut short",
        "model_corrupt",
    ),
    "pickle": (_pickle_only, "pickle files, which can run any code", "model_pickle"),
    "missing tensor": (_drop_tensor, "are incomplete: 1 tensors are missing", "model_incomplete"),
    "other shapes": (lambda f: edit_config(f, intermediate_size=64), "transformers could not load it", "model_corrupt"),
    "more layers": (
        lambda f: edit_config(f, num_hidden_layers=4, layer_types=None),
        "are incomplete: 12 tensors are missing",
        "model_incomplete",
    ),
    "nonsense in config": (
        lambda f: edit_config(f, num_hidden_layers="many"),
        "num_hidden_layers = many",
        "model_sizes",
    ),
    "unknown architecture": (
        lambda f: edit_config(f, model_type="qwen22"),
        "has an unknown architecture: qwen22",
        "model_unsupported",
    ),
    "remote code": (
        lambda f: edit_config(f, model_type="novel", auto_map={"AutoConfig": "configuration_novel.NovelConfig"}),
        "needs Python code from its folder, which is not allowed",
        "model_remote_code",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_by_name(folder: Path, name: str):
    damage, says, code = BROKEN[name]
    damage(folder)
    error = refused(lambda: open_lm(source.find(str(folder)), device="cpu"))
    assert isinstance(error, BadModel)
    assert error.exit == ExitStatus.BAD_MODEL
    assert says in error.message
    assert error.code == code
    assert "mine" in error.message + "".join(error.lines)


def test_a_truncated_file_says_how_much_is_missing(folder: Path):
    _truncate(folder)
    assert "100 bytes are missing" in refused(lambda: source.find(str(folder))).lines[0]


def test_a_missing_tensor_is_named(folder: Path):
    _drop_tensor(folder)
    assert refused(lambda: open_lm(source.find(str(folder)))).lines == ("model.layers.1.mlp.up_proj.weight",)


def test_a_missing_shard_is_named(sharded: Path):
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    error = refused(lambda: source.find(str(sharded)))
    assert f"1 of {len(shards)} shards are missing" in error.message
    assert error.lines == (shards[1].name,)
    assert error.exit == ExitStatus.BAD_MODEL


def test_shards_of_another_revision_are_noticed(sharded: Path):
    shards = sorted(sharded.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    error = refused(lambda: source.find(str(sharded)))
    assert "lack 6 tensors of their index" in error.message
    assert error.lines[0].endswith(f"is not in {shards[1].name}")


def test_an_index_without_tensors(sharded: Path):
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "lists no tensors" in refused(lambda: source.find(str(sharded))).message


# ---- names that lead nowhere ----


def test_a_hub_id_that_is_not_in_the_cache_while_offline():
    error = refused(lambda: source.find("someone/absent", offline=True))
    assert error.message == "someone/absent is neither a folder nor in the Hugging Face cache"
    assert error.lines == ("offline: the network was not used",)
    assert error.exit == ExitStatus.BAD_MODEL
    assert "kvcli models get someone/absent" in error.try_


def test_nothing_is_downloaded_without_telling():
    assert "nor in the Hugging Face cache" in refused(lambda: source.find("someone/absent", offline=False)).message


def test_a_download_is_told_first():
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        source.find("someone/absent", tell=tell)
    assert told == ["someone/absent is not in the cache: downloading it from huggingface.co"]


def test_a_cache_with_half_a_model_is_completed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted download leaves a snapshot without weights."""
    weights = (folder / "model.safetensors").rename(folder.parent / "later")

    def snapshot(name: str, local_files_only: bool = False, **_: object) -> str:
        if not local_files_only:
            weights.rename(folder / "model.safetensors")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent))
    (folder.parent / "models--someone--half").mkdir()
    assert hub.cached_ids() == ["someone/half"]
    assert "has no weights" in refused(lambda: source.find("someone/half", offline=True)).message
    told: list[str] = []
    assert source.find("someone/half", tell=told.append).parameters > 0
    assert told == ["someone/half is in the cache only in part: downloading it from huggingface.co"]


@pytest.mark.parametrize("name", ["dmo", "gpt2"])
def test_a_name_without_an_owner_is_never_asked_of_the_network(name: str):
    told: list[str] = []
    error = refused(lambda: source.find(name, tell=told.append))
    assert (told, error.code, error.lines) == ([], "model_not_found", ("a hub id is OWNER/NAME",))
    assert "kvcli models suggest" in error.try_


def test_a_connection_that_fails_is_no_network_and_not_a_wrong_name(monkeypatch: pytest.MonkeyPatch):
    def snapshot(*_: object, **__: object) -> str:  # as the hub's library ends when no host answers
        raise LocalEntryNotFoundError("cannot find the files") from OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    told: list[str] = []
    error = refused(lambda: source.find("someone/absent", tell=told.append))
    assert (error.code, error.exit, len(told)) == ("no_network", ExitStatus.BAD_MODEL, 1)
    assert error.message.startswith("no network: someone/absent")
    assert error.lines == ("Name or service not known",)
    assert not any("check the name" in hint for hint in error.try_)


def test_weights_of_another_format_are_named(folder: Path):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "found consolidated.safetensors" in refused(lambda: source.find(str(folder))).lines[1]


def test_a_file_is_no_model(folder: Path):
    error = refused(lambda: source.find(str(folder / "model.safetensors")))
    assert "is a file; a model is a folder" in error.message
    assert error.exit == ExitStatus.BAD_MODEL


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c", "what is this", "", "someone/absent"])
def test_a_path_that_does_not_exist(name: str):
    error = refused(lambda: source.find(name, offline=True))
    assert error.code == "model_not_found"
    assert error.exit == ExitStatus.BAD_MODEL


def test_a_demo_that_is_not_installed(tmp_path: Path):
    assert "demo model is missing" in refused(lambda: source.find("demo", demo_dir=tmp_path)).message


# ---- designs that cannot run ----

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"layer_types": None, "model_type": "mamba", "state_size": 16}, "it has recurrent layers"),
    "rwkv": ({"layer_types": None, "model_type": "rwkv"}, "it has recurrent layers"),
    "jamba": ({"layer_types": None, "model_type": "jamba", "mamba_d_state": 16}, "it has recurrent layers"),
    "chunked": ({"attention_chunk_size": 8192}, "it uses chunked attention"),
    "sparse": ({"layer_types": ["compressed_sparse_attention"] * 3}, "of kind compressed_sparse_attention"),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "it is an encoder-decoder"),
    "bloom": ({"model_type": "bloom"}, "it uses ALiBi"),
    "mpt": ({"model_type": "mpt", "attn_config": {"alibi": True}}, "it uses ALiBi"),
    "classifier": ({"architectures": ["BertForSequenceClassification"]}, "does not generate text"),
    "vision": ({"architectures": ["ViTModel"], "vision_config": {}, "vocab_size": None}, "no text decoder"),
    "nested": ({"text_config": {"model_type": "x", "attention_chunk_size": 8}}, "it uses chunked attention"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_design_is_refused_before_any_weight_is_read(folder: Path, name: str):
    changes, says = UNSUPPORTED[name]
    edit_config(folder, **changes)
    (folder / "model.safetensors").unlink()
    error = refused(lambda: source.find(str(folder)))
    assert error.exit == ExitStatus.BAD_MODEL
    assert error.code == "model_unsupported"
    assert says in error.message
    assert error.lines, "it says why"


@pytest.mark.parametrize("kind", ["full_attention", "linear_attention", "conv", "mamba", "mlp"])
def test_layers_that_keep_a_state_are_not_refused(folder: Path, kind: str):
    """What they do with it is found when the model is loaded."""
    edit_config(folder, mamba_d_state=16, layer_types=[kind, "full_attention", "full_attention"])
    source.find(str(folder))


STRANGE = {
    "falcon": ({"alibi": False, "ffn_hidden_size": 64}, "does not go through transformers' attention interface"),
    "diffllama": ({}, "its layers attend more than once"),
    "doge": ({}, "layer 0 builds its own mask"),
    "llama4_text": (
        {"num_local_experts": 2, "head_dim": 12, "intermediate_size_mlp": 32, "attention_chunk_size": 8},
        "the mask of layer 0 is not causal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", STRANGE)
def test_the_probe_refuses_what_config_did_not_tell(family: str):
    """Decided from the modules: a design nobody listed is refused too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes, says = STRANGE[family]
    base = config_of("llama").to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = AutoConfig.for_model(family, **{k: base[k] for k in keys} | {"num_hidden_layers": 2} | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    error = refused(lambda: wrap_lm(model, id="mine"))
    assert error.exit == ExitStatus.BAD_MODEL
    assert f"mine ({family}) is not supported" in error.message
    assert says in error.message
