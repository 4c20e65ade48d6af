"""The small sibling of the demo model: found by name, and often right about what the demo model writes."""

import pytest
import torch

import kvcli
from kvcli.demo import weights_dir
from tests.bench import widened
from tests.demo_model.example import example_report

transformers = pytest.importorskip("transformers")


def test_it_stays_small():
    assert (weights_dir("demo-small") / "model.safetensors").stat().st_size < 1.5e6


def test_it_has_the_words_of_the_demo_model():
    small, large = ((weights_dir(name) / "tokenizer.json").read_bytes() for name in ("demo-small", "demo"))
    assert small == large


def test_it_drafts_most_of_a_summary_and_changes_nothing():
    question = example_report().text[:2_500] + "\n\nSummarise the main findings."
    with kvcli.load("demo", profile="exact") as model:
        want = model.generate(question, max_new_tokens=48)
    changes = {"spec.model": "demo-small", "spec.copies": False, "spec.adaptive": False, "spec.branches": 1}
    with kvcli.load("demo", profile="draft", set={**changes, "spec.depth": 3}) as model:
        got = model.generate(question, max_new_tokens=48)
    assert got.ids == want.ids
    assert got.stats.per_position[0] > 0.7


def test_the_widened_demo_is_the_demo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(widened, "LAYERS", 7)
    monkeypatch.setattr(widened, "FFN", 528)
    demo = transformers.AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.bfloat16).eval()
    wide = widened.widened(demo).float()
    ids = torch.randint(8, 1_888, (1, 61), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want, got = demo.float()(ids).logits, wide(ids).logits
    assert sum(p.numel() for p in wide.parameters()) > 5 * sum(p.numel() for p in demo.parameters())
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
