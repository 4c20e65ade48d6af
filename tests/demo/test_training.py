"""Training the demo model: rows and weights that fit together, circuits that copy, runs that resume."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from kvcli.demo import person, place, weights_dir
from kvcli.demo.report import write_report
from tests.demo_model.export import export
from tests.demo_model.network import Network, Shape
from tests.demo_model.packing import copy_row, encode_parts, make_batch, report_row
from tests.demo_model.tokenizer import ASSISTANT, BOS, END
from tests.demo_model.train import RECIPES, Crew, Phase, Recipe, Run, phase_at
from tests.demo_model.turns import ORDINAL, VALUE, lookup, summary

TINY = (Phase(steps=2, lengths=(211, 61), tokens=211), Phase(steps=1, lengths=(223, 61), tokens=223))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))


def _shape(tokenizer: Tokenizer) -> Shape:
    return Shape(vocabulary=tokenizer.get_vocab_size(), layers=4, ffn=64)


def _recipe(tokenizer: Tokenizer) -> Recipe:
    return replace(RECIPES["demo"], shape=_shape(tokenizer))


def test_tokens_come_back_as_the_text(tokenizer: Tokenizer):
    text = write_report(Random(3), 500, 0.5).text + "\n\nÜber 3.5 °C — naïve?  Two  spaces."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_names_are_cut_in_one_way(tokenizer: Tokenizer):
    """Swapping a place for another must keep every distance, and a copied name its tokens."""
    rng = Random(5)
    assert {len(tokenizer.encode(f" {place(rng)}").ids) for _ in range(200)} == {2}
    assert {len(tokenizer.encode(f" {person(rng)}").ids) for _ in range(200)} == {4}


def test_weights_fall_on_what_is_retrieved(tokenizer: Tokenizer):
    report = write_report(Random(2), 600, 0.6)
    fact = report.facts[0]
    ids, weights = encode_parts(tokenizer, lookup(Random(2), fact).parts)
    valued = [i for i, w in zip(ids, weights, strict=True) if w == VALUE]
    assert tokenizer.decode(valued) == f" {fact.value}"
    ids, weights = encode_parts(tokenizer, summary(Random(2), report).parts)
    ordinals = [i for i, w in zip(ids, weights, strict=True) if w == ORDINAL]
    assert tokenizer.decode(ordinals) == "".join(f" {f.section}" for f in report.findings)


def test_rows_are_full_and_learn_from_answers_only(tokenizer: Tokenizer):
    ids, weights = report_row(tokenizer, Random(7), 401, near=0.2)
    assert len(ids) == len(weights) == 401
    assert ids[0] == BOS
    last_question = max(i for i, token in enumerate(ids) if token == ASSISTANT)
    assert weights[last_question] == 0
    assert all(w > 0 for w in weights[last_question + 1 :])
    assert weights[ids.index(END)] == 0


def test_short_rows_are_talk_without_a_report(tokenizer: Tokenizer):
    batch = make_batch(tokenizer, Random(19), 3, 97)
    assert batch.ids.shape == (3, 97)
    assert all("Field report of" not in tokenizer.decode(row.tolist()) for row in batch.ids)


def test_copying_practice_is_predictable_where_it_counts(tokenizer: Tokenizer):
    ids, weights = copy_row(Random(11), 97, tokenizer.get_vocab_size())
    seen = {tuple(ids[i - 1 : i + 1]) for i in range(1, 29)}
    learned = [i for i, w in enumerate(weights) if w]
    assert learned
    assert all((ids[i - 1], ids[i]) in {*seen, *((ids[j - 1], ids[j]) for j in range(1, i))} for i in learned)


def test_batches_repeat(tokenizer: Tokenizer):
    first, again = (make_batch(tokenizer, Random("5 3 0"), 3, 211) for _ in range(2))
    assert (first.ids == again.ids).all()
    assert (first.weights == again.weights).all()


@pytest.mark.parametrize("name", RECIPES)
def test_seeded_network_copies_before_any_training(tokenizer: Tokenizer, name: str):
    torch.manual_seed(0)
    recipe = RECIPES[name]
    plain, seeded = Network(recipe.shape), Network(recipe.shape)
    recipe.seed(seeded, tokenizer)
    batch = make_batch(tokenizer, Random(5), 6, 211)
    shares = []
    with torch.no_grad():
        for model in (plain, seeded):
            score = model.score(torch.from_numpy(batch.ids), torch.from_numpy(batch.weights))
            shares.append(score.hits[score.weights == VALUE].float().mean().item())
    assert shares[0] < 0.1
    assert shares[1] > 0.7


def test_phases_follow_each_other():
    at = [phase_at(TINY, step) for step in range(4)]
    assert [None if a is None else (a[0], a[2]) for a in at] == [(0, 0), (0, 1), (1, 0), None]


def test_interrupted_training_goes_on_as_if_it_had_not_been(tokenizer: Tokenizer, tmp_path: Path):
    torch.set_num_threads(1)

    def trained(folder: Path) -> dict[str, torch.Tensor]:
        run = Run(folder, _recipe(tokenizer), tokenizer, Crew())
        run.train(TINY, lambda line: None, save_every=1)
        return run.network.state_dict()

    whole = trained(tmp_path / "whole")
    broken = Run(tmp_path / "broken", _recipe(tokenizer), tokenizer, Crew())
    broken.train(TINY[:1], lambda line: None)
    resumed = trained(tmp_path / "broken")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_export_is_the_same_model_in_transformers(tokenizer: Tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = Network(_shape(tokenizer)).eval()
    export(network, tokenizer, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[BOS, 17, 29, 31, 37, 41, 43]])
    with torch.no_grad():
        ours, theirs = network.logits(network.hidden(ids)), model(ids).logits
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
