"""The head map, the choice of policies, and the files other tools read."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch

from kvcli import load
from kvcli.chat.model import Model
from kvcli.chat.transcript import kinds_by_id
from kvcli.engine.engine import run_to_end
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadInput, BadModel
from kvcli.heads import run as heads_run
from kvcli.heads.ablate import Loss
from kvcli.heads.choose import choose
from kvcli.heads.headmap import (
    CARRY,
    FULL,
    arrays,
    duo_config,
    duo_tsv,
    full_heads,
    headmap,
    read_map,
    retrieval_line,
    spearman,
)
from kvcli.heads.query_probe import whole
from kvcli.heads.report import document, strip
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import probe
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.schemas.heads import HeadsDocument
from kvcli.settings.profile import Profile
from tests import make


@pytest.fixture(scope="module")
def model():
    return load("demo", "exact", {"load.verify": False})


@pytest.fixture(scope="module")
def run(model):
    settings = FastGen(recent=32, probe_rows=24)
    ask = ProbeRequest(
        probes=("prompt", "ablate", "needle", "repeat"), context=400, settings=settings, others=(4000,), texts=2
    )
    found = probe(model, ask)
    return ask, found, document(model, ask, found)


@pytest.mark.parametrize("seed", range(20))
def test_heads_from_a_half_on_carry_most_and_no_fewer_would(seed):
    noise = torch.Generator().manual_seed(seed)
    score = torch.randn(5, 3, generator=noise).exp() ** 4
    heads = headmap(score)
    full = full_heads(heads)
    carried = sum(float(score[at]) for at in full)
    assert carried >= CARRY * float(score.sum()) * (1 - 1e-6)
    assert carried - min(float(score[at]) for at in full) < CARRY * float(score.sum())
    assert torch.equal(heads.flatten().argsort(), score.flatten().argsort())  # in the same order
    assert bool(((heads >= 0) & (heads <= 1)).all())
    assert [float(heads[at]) for at in full] == sorted((float(heads[at]) for at in full), reverse=True)


def test_more_heads_on_request():
    score = torch.tensor([[8.0, 0.1], [0.2, 0.0]])
    assert full_heads(headmap(score)) == [(0, 0)]
    assert full_heads(headmap(score, least=2)) == [(0, 0), (1, 0)]
    assert full_heads(headmap(score, least=9)) == [(0, 0), (1, 0), (0, 1)]  # nothing speaks for the last


def test_without_any_score_no_head_is_full():
    assert full_heads(headmap(torch.zeros(2, 3))) == []


def test_ranks_with_ties():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 2], [5, 5, 7, 7]) == pytest.approx(1)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486833)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def said_and_done(model: Model, settings: FastGen) -> tuple[HeadsDocument, GenerationSession]:
    """What the probe says of a prompt under these settings, and a session that has read it under them."""
    ask = ProbeRequest(probes=("prompt",), context=400, settings=settings)
    found = probe(model, ask)
    made = document(model, ask, found)
    plain = whole(model)
    kinds = torch.frombuffer(bytearray(kinds_by_id(model.tokenizer, model.lm.vocab)), dtype=torch.int8)
    session = make.session(plain.lm, plain.cache, plain.drafter, plain.sampler, policy=settings, kinds=kinds)
    run_to_end(session.read(found.reading.ids))
    return made, session


@pytest.mark.parametrize(
    "changes", [{}, {"recovery": 0.95}, {"recovery": 1.0}, {"keep": 0.4}, {"criterion": "mean"}, {"probe_rows": "auto"}]
)
def test_choices_are_those_of_the_policy_itself(model, changes):
    """FastGen on the same prompt, as a session runs it, picks the same candidate for each head."""
    settings = FastGen(**{"recent": 32, "probe_rows": 24, **changes})
    made, session = said_and_done(model, settings)
    names = [[made.policy.candidates[c] for c in row] for row in made.policy.chosen]
    assert names == [session.policy_record.state.chosen()[layer] for layer in range(model.lm.n_layers)]


def test_what_it_says_is_kept_is_what_is_kept(model):
    settings = FastGen(recent=32, probe_rows=24)
    made, session = said_and_done(model, settings)
    held = [[int(n) for n in (session.cache.slots(layer).pos >= 0).sum(1)] for layer in range(model.lm.n_layers)]
    said = [
        [made.policy.cost[c][layer][head] for head, c in enumerate(row)] for layer, row in enumerate(made.policy.chosen)
    ]
    assert held == said


def test_forced_heads_keep_everything(model):
    mass, cost = (
        torch.tensor([0.9, 1.0]).view(2, 1, 1).repeat(1, 2, 2),
        torch.tensor([1.0, 9.0]).view(2, 1, 1).repeat(1, 2, 2),
    )
    full = torch.tensor([[True, False], [False, False]])
    for settings in (FastGen(recovery=0.5), FastGen(keep=0.4)):
        assert choose(mass, cost, settings, full).tolist() == [[1, 0], [0, 0]]


def test_a_run_on_the_demo_names_the_heads_that_retrieve(run):
    _, _, made = run
    assert {tuple(head) for head in made.suggest.full} == {(2, 0), (2, 1)}
    assert made.check.whole == made.check.of == 8
    assert made.check.restricted >= 7
    assert made.check.without <= 2
    assert made.ranked_by == "ablate"
    assert [[made.policy.candidates[c] for c in row] for row in made.policy.chosen][2] == ["full", "full"]


@pytest.mark.parametrize(("enough", "named", "checks"), [(2, 2, 2), (3, 4, 3), (5, 4, 3)])
def test_the_map_grows_while_answers_are_missing(model, monkeypatch, enough, named, checks):
    """Up to half of the heads; here more would be 8 of 12."""
    asked = []

    def check(model, texts, blind, reach, tell):
        asked.append(int((~blind).sum()))
        return Loss(0.0, 4 if asked[-1] >= enough else 0, 4)

    monkeypatch.setattr(heads_run, "check", check)
    ask = ProbeRequest(probes=("ablate",), context=300, settings=FastGen(), texts=1)
    found = probe(model, ask)
    assert len(full_heads(found.heads)) == named
    assert len(asked) == checks  # the last one restricts the named heads themselves
    assert found.done == found.total


def test_memory_grows_as_its_sets_do(run):
    _, _, made = run
    now, later = made.kv
    assert (now.context, later.context) == (400, 4000)
    token = 2 * 64 * 2  # keys and values of a head in bf16
    assert now.whole == 400 * 12 * token
    assert now.headmap == (2 * 400 + 10 * (4 + made.suggest.window)) * token
    assert later.headmap == (2 * 4000 + 10 * (4 + made.suggest.window)) * token
    kept = sum(made.policy.cost[c][layer][h] for layer, row in enumerate(made.policy.chosen) for h, c in enumerate(row))
    assert now.policy == pytest.approx(kept * token, rel=0.01)  # the text has a token more than is stored
    assert now.policy < later.policy < 10.2 * now.policy


def test_duo_attention_reads_the_table(run, tmp_path):
    _, _, made = run
    (tmp_path / "full_attention_heads.tsv").write_text(duo_tsv(made.heads))
    table = np.loadtxt(tmp_path / "full_attention_heads.tsv", dtype=float, delimiter="\t")  # as its utils do
    np.testing.assert_allclose(table, made.heads, atol=1e-6)
    config = json.loads(duo_config(made))
    assert (config["sink_size"], config["recent_size"]) == (made.suggest.sinks, made.suggest.window)
    assert read_map(tmp_path, "x") == [pytest.approx(row, abs=1e-6) for row in made.heads]


def test_retrieval_head_reads_the_line(run):
    _, _, made = run
    scores = json.loads(retrieval_line(made))
    assert len(scores) == made.layers * made.query_heads
    assert scores["2-0"] == [made.query["needle"][2][0]]
    assert max(scores, key=lambda name: scores[name][0]).startswith("2-")


def test_arrays_need_no_pickle(run):
    _, _, made = run
    held = np.load(io.BytesIO(arrays(made)), allow_pickle=False)
    np.testing.assert_allclose(held["heads"], made.heads, atol=1e-6)
    assert held["mass_cvar10"].shape == (len(made.policy.candidates), 6, 2)
    assert held["query_needle"].shape == (6, 4)
    assert held["distances"].ndim == 3


@pytest.mark.parametrize("text", ["", "1 2\n3\n", '{"layers": 2}', "what", "\x00"])
def test_what_is_no_head_map_is_refused(tmp_path, text):
    (tmp_path / "map.tsv").write_text(text)
    with pytest.raises(BadInput):
        read_map(tmp_path / "map.tsv", "map.tsv")
    with pytest.raises(BadInput):
        read_map(tmp_path, "a folder without one")


def test_the_strip_is_the_prompt(model, run):
    _, found, made = run
    tokens = strip(model, found.reading)
    assert "".join(tokens.texts) == model.tokenizer.decode(found.reading.ids)
    assert tokens.width == 1
    for layer, rows in tokens.frequent.items():
        for head, row in enumerate(rows):
            many = made.policy.cost[3][layer][head] - made.policy.cost[1][layer][head]  # punct+frequent over punct
            assert sum(byte == 255 for byte in row) >= many
            assert set(row) <= {0, 255}


def test_layers_that_were_not_looked_at_keep_everything(model):
    ask = ProbeRequest(probes=("prompt", "ablate"), context=300, settings=FastGen(recent=32), layers=(1, 2), texts=1)
    made = document(model, ask, probe(model, ask))
    assert made.probed == [1, 2]
    assert [made.heads[layer] for layer in (0, 3, 4, 5)] == [[1.0, 1.0]] * 4
    assert {layer for layer, _ in made.suggest.full} == {2}
    assert [made.policy.chosen[layer] for layer in (0, 5)] == [[-1, -1]] * 2
    token = 2 * 64 * 2
    assert made.kv[0].headmap == (10 * 300 + 2 * (4 + made.suggest.window)) * token
    assert made.kv[0].policy > 8 * 300 * token


def test_stability_asks_again_while_writing(model):
    ask = ProbeRequest(probes=("prompt",), context=300, settings=FastGen(recent=32), stability=8)
    made = document(model, ask, probe(model, ask))
    assert made.stability.every == 8
    assert 3 <= len(made.stability.tokens) <= 4
    assert all(0 <= n <= 12 for n in made.stability.changed)
    assert any(made.stability.drift)


def other(name):
    """A tiny random model that sees through windows, with the demo's words."""
    profile = Profile.load("exact")
    words = load("demo", "exact", {"load.verify": False}).tokenizer
    return Model(make.model(name, vocab_size=1888, max_position_embeddings=2048), words, profile)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_sliding_layers_are_left_whole(name):
    model = other(name)
    ask = ProbeRequest(
        probes=("prompt", "ablate", "needle", "repeat"), context=300, settings=FastGen(recent=32), texts=1
    )
    made = document(model, ask, probe(model, ask))
    assert made.windows == [11, None, 11]
    assert [made.policy.chosen[layer] for layer in (0, 2)] == [[-1, -1]] * 2
    assert all(c >= 0 for c in made.policy.chosen[1])
    assert {layer for layer, _ in made.suggest.full} <= {1}
    token = 2 * model.lm.head_dim * 4
    assert made.kv[0].whole == (4 * 11 + 2 * 300) * token
    assert any("sliding" in note for note in made.notes)
    assert any("unreliable" in note for note in made.notes)  # random weights answer nothing


def test_a_model_of_windows_only_is_refused():
    ask = ProbeRequest(probes=("prompt",), context=300, settings=FastGen())
    with pytest.raises(BadModel) as found:
        probe(other("mistral"), ask)
    assert found.value.code == "no_full_attention"


def test_a_model_of_uneven_layers_is_refused():
    with pytest.raises(BadModel) as found:
        probe(other("gemma4_shared"), ProbeRequest(probes=("prompt",), context=300, settings=FastGen()))
    assert found.value.code == "uneven_layers"


def test_half_is_where_profiles_draw_the_line():
    assert FastGen().headmap_from == FULL
