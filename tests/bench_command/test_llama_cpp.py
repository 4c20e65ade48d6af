"""llama.cpp beside transformers: the same weights write the same text, family by family."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvcli.bench import llama_cpp
from kvcli.bench.llama_cpp import BATCH, LlamaCpp, require
from kvcli.engine.loading import weights
from kvcli.errors import BadModel, UsageError
from kvcli.installing import pip
from kvcli.models import family, source
from tests import gguf_files
from tests.families import build, prompt
from tests.recipes.gguf_export import export

NEW = 24
opened = partial(LlamaCpp, to_gguf=export)


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs llama-cpp-python") as caught:
        require()
    assert caught.value.try_ == (pip("llama-cpp-python"),)
    assert "10 minutes" in " ".join(caught.value.lines)


def test_naming_the_side_loads_neither_package():
    code = "import sys, kvcli.bench.llama_cpp; print([m for m in ('llama_cpp', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"


@pytest.fixture
def engine() -> None:
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is absent: the llama extra builds it, in about 10 minutes"
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def greedy(model: Any, ids: Sequence[int], new: int) -> tuple[int, ...]:
    """What transformers writes, one full forward each time: no cache, nothing of ours."""
    text = list(ids)
    with torch.inference_mode():
        for _ in range(new):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return tuple(text[len(ids) :])


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **more}}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 12}),
    ("llama", rope("linear")),
    ("llama", LLAMA3),
    ("llama", rope("yarn", original_max_position_embeddings=64)),
    ("mistral_full", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
def test_float32_writes_what_transformers_writes(tmp_path: Path, name: str, changes: dict[str, Any]):
    model = build(name, max_position_embeddings=1024, **changes)
    model.save_pretrained(tmp_path / "model")
    side = opened(source.find(str(tmp_path / "model")), "float32", 1, tmp_path)
    ids = prompt(211)
    assert side.run(ids, NEW).ids == greedy(model, ids, NEW)
    side.close()


def test_float64_is_refused_of_a_gguf_file_too(tmp_path: Path):
    """Else its results would be called float64, and be none."""
    gguf_files.write(tmp_path / "tiny.gguf", "llama", ("Q4_1",), ends="Q8_0")
    with pytest.raises(UsageError, match="float64"):
        opened(source.find(str(tmp_path / "tiny.gguf")), "float64", 1, tmp_path)


@pytest.mark.usefixtures("engine")
def test_the_blocks_of_a_gguf_file_are_named(tmp_path: Path):
    gguf_files.write(tmp_path / "tiny.gguf", "llama", ("Q4_1",), ends="Q8_0")
    side = opened(source.find(str(tmp_path / "tiny.gguf")), "bfloat16", 1, tmp_path / "cache")
    without = ", without AMX and repacked weights, because this build crashes with them"
    assert side.setup["weights"].removesuffix(without) == "the GGUF file itself, Q4_1 and Q8_0"
    assert side.setup["quant"] == "Q4_1 and Q8_0"
    assert len(side.run(prompt(40), 2).ids) == 2  # with AMX some builds end the process here
    side.close()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", gguf_files.ARCHS)
def test_a_model_that_is_a_gguf_file_is_run_as_it_is(tmp_path: Path, name: str):
    """In float32 both sides read the same numbers out of it: names, order of rows, norms, windows, caps."""
    model = gguf_files.write(tmp_path / "tiny.gguf", name, ("F32",), ends="F32", seed=2)
    side = opened(source.find(str(tmp_path / "tiny.gguf")), "float32", 1, tmp_path / "cache")
    assert side.setup["file"] == str(tmp_path / "tiny.gguf")
    assert side.setup["weights"] == "the GGUF file itself"
    assert not (tmp_path / "cache").exists()
    ids = prompt(211)
    found = side.run(ids, NEW)
    assert found.ids == greedy(model, ids, NEW)
    assert len(set(found.ids)) > 1
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert found.kv_bytes % (config.num_hidden_layers * config.num_key_value_heads * 2 * head * 4) == 0
    side.close()


@pytest.mark.usefixtures("engine")
def test_a_prompt_longer_than_a_batch_and_a_second_run(tmp_path: Path):
    """Nothing of one prompt is left for the next, whichever way the context's size changes."""
    model = build("llama", max_position_embeddings=1024)
    model.save_pretrained(tmp_path / "model")
    side = opened(source.find(str(tmp_path / "model")), "float32", 1, tmp_path)
    long, short = prompt(BATCH + 3), prompt(7, seed=2)
    first = side.run(long, 5)
    assert first.ids == greedy(model, long, 5)
    assert side.run(short, 5).ids == greedy(model, short, 5)
    assert side.run(prompt(7, seed=3), 5).ids == greedy(model, prompt(7, seed=3), 5)
    assert side.run(long, 5).ids == first.ids
    side.close()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model(tmp_path: Path, dtype: str):
    """In float32 token for token; in bfloat16 up to the first near tie, since the engines round in different places."""
    found = source.find("demo")
    report = (Path(__file__).parents[2] / "kvcli" / "demo" / "report.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(found.path)(report)["input_ids"][:301]
    model, _ = weights.load_weights(
        found, family.read_config(found, False), "fp32", torch.device("cpu"), trust_remote_code=False
    )
    side = opened(found, dtype, 1, tmp_path)
    written, exact = side.run(ids, NEW).ids, greedy(model.eval(), ids, NEW)
    side.close()
    if dtype == "float32":
        assert written == exact
        return
    same = next((i for i in range(NEW) if written[i] != exact[i]), NEW)
    if same < NEW:
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *exact[:same]]])).logits[0, -1]
        assert logits.max() - logits[written[same]] < 0.5  # of logits that reach 20


@pytest.mark.usefixtures("engine")
def test_it_draws_one_text_a_seed_and_the_likeliest_near_temperature_zero(tmp_path: Path):
    model, ids = build("llama"), prompt(211)
    model.save_pretrained(tmp_path / "model")
    found, texts = source.find(str(tmp_path / "model")), []
    for temperature, seed in ((1e-6, 0), (2.0, 0), (2.0, 1)):
        side = opened(found, "float32", 1, tmp_path, temperature=temperature, seed=seed)
        texts += [side.run(ids, NEW).ids, side.run(ids, NEW).ids]
        side.close()
    assert texts[::2] == texts[1::2]
    assert texts[0] == greedy(model, ids, NEW)
    assert len(set(texts)) == 3


@pytest.mark.usefixtures("engine")
def test_what_a_sample_says(tmp_path: Path):
    build("llama").save_pretrained(tmp_path / "model")
    ticks = iter(range(100))
    found = source.find(str(tmp_path / "model"))
    side = opened(found, "bfloat16", 1, tmp_path, clock=lambda: float(next(ticks)))
    sample = side.run(prompt(5), 3)
    assert sample.at == (1.0, 2.0, 3.0)
    assert sample.prompt == 5
    assert (sample.first_token, sample.tok_s) == (1.0, 1.0)
    slot = 3 * 2 * 2 * 16 * 2  # layers, kv heads, keys and values, head size, float16
    assert sample.kv_bytes is not None
    assert sample.kv_bytes % slot == 0
    assert sample.kv_bytes >= 8 * slot
    assert side.setup["kv"] == "float16"
    assert side.setup["threads"] == "1"
    side.close()
    side.close()


@pytest.mark.usefixtures("engine")
def test_a_file_that_is_no_gguf_is_an_error_with_llama_cpps_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    build("llama").save_pretrained(tmp_path / "model")
    found = source.find(str(tmp_path / "model"))
    export(found, "float32", tmp_path).write_bytes(b"GGUF, but no more of it")
    capfd.readouterr()
    with pytest.raises(BadModel, match="could not load") as caught:
        opened(found, "float32", 1, tmp_path)
    assert len(caught.value.lines) >= 2
    assert caught.value.try_[0].startswith("rm ")
    assert capfd.readouterr().err == ""  # said once, by us


@pytest.mark.usefixtures("engine")
def test_a_gpu_that_this_build_cannot_use_is_refused(tmp_path: Path):
    import llama_cpp as library

    if library.llama_supports_gpu_offload():
        pytest.skip("this llama-cpp-python was built for a GPU")
    build("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="without GPU support"):
        opened(source.find(str(tmp_path / "model")), "float32", 1, tmp_path, device="cuda:0")
