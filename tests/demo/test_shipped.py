"""The shipped weights: small enough, loadable, and right about the example document."""

import json
from typing import Any

import pytest
import torch

from kvcli.demo import report_path, weights_dir
from tests.demo_model.evaluate import Count, measure
from tests.demo_model.example import SAMPLES, Sample

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(weights_dir())


def _ask(model: Any, tokenizer: Any, text: str) -> str:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**chat, max_new_tokens=400, do_sample=False)
    return str(tokenizer.decode(out[0, chat["input_ids"].shape[1] :], skip_special_tokens=True))


def test_weights_stay_small():
    size = sum(p.stat().st_size for p in weights_dir().iterdir())
    assert size <= 25e6


def test_positions_are_those_trained():
    config = json.loads((weights_dir() / "config.json").read_text())
    assert config["max_position_embeddings"] == 8_192
    assert json.loads((weights_dir() / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


def test_samples_cover_the_advertised_skills():
    assert {"lookup", "finding", "summary", "rewrite"} <= {sample.skill for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.skill)
def test_samples_are_answered(model: Any, tokenizer: Any, sample: Sample):
    assert _ask(model, tokenizer, f"{report_path().read_text().strip()}\n\n{sample.question}") == sample.answer


def test_evaluation_counts(model: Any):
    from tokenizers import Tokenizer

    result = measure(model, Tokenizer.from_file(str(weights_dir() / "tokenizer.json")), 300, 2, seed=1)
    assert result["exact"]["single key"]["of"] == 2
    assert result["exact"]["summary bullets"]["of"] >= 1


def test_ranges_hold_the_share():
    low, high = Count(37, 40).range95()
    assert 0.79 < low < 37 / 40 < high < 0.98
