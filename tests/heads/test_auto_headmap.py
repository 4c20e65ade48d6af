"""The model's own head map is made once, kept for this user alone, and the same as the one that the command makes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcli.bench.text_agreement import tie_at
from kvcli.chat.model import Model, load
from kvcli.errors import BadConfig
from kvcli.heads.auto_headmap import auto_headmap, place
from kvcli.heads.headmap import full_heads
from kvcli.heads.report import document
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import probe
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.shipped_map import FOLDER, shipped_map
from kvcli.models.catalog import CATALOG, Stamped
from kvcli.policies.scoring.headmap import read_headmap
from kvcli.settings.profile import Profile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load("demo", Profile.load("exact"), cache=tmp_path_factory.mktemp("cache"))


def test_the_map_is_that_of_the_command_and_is_made_once(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    shipped = auto_headmap(model, tmp_path / "heads", said.append)
    assert (shipped.parent, said) == (FOLDER, []), "a map that ships is not measured again"
    monkeypatch.setattr("kvcli.methods.policies.fastgen.shipped_map.FOLDER", tmp_path)
    path = auto_headmap(model, tmp_path / "heads", said.append)
    written = path.stat().st_mtime_ns
    ask = ProbeRequest(probes=("ablate",), context=1024, settings=FastGen())
    by_hand = probe(model, ask)
    assert json.loads(path.read_text())["heads"] == by_hand.heads.tolist()
    assert full_heads(torch.tensor(read_headmap(shipped))) == full_heads(by_hand.heads), "the shipped map is an old one"
    assert json.loads(shipped.read_text())["weights"] == document(model, ask, by_hand).weights
    assert path.stat().st_mode & 0o777 == 0o600
    assert auto_headmap(model, tmp_path / "heads", said.append) == path
    assert path.stat().st_mtime_ns == written
    assert len(said) == 1
    assert str(path) in said[0]
    for policy in ({"name": "fastgen"}, {"name": "snap", "alloc": "headmap"}):
        auto = model.under(model.profile.replace(exactness="approx", policy={**policy, "headmap": "auto"}))
        with pytest.raises(BadConfig) as found:
            auto.new_session()
        assert found.value.code == "no_headmap"
        auto.map_heads = partial(auto_headmap, folder=tmp_path / "heads")
        assert auto.new_session().policy.headmap == str(path)  # type: ignore[union-attr]
        assert tie_at(auto, auto.tokenizer.encode("The depot"), 5, 5).margin >= 0


def test_a_shipped_map_is_for_the_weights_that_it_names_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, files = model.lm, dict(model.lm.files)
    assert shipped_map(lm) == FOLDER / "demo.json"
    policy = FastGen(keep=0.25, headmap="shipped")
    assert policy.requirements(lm).policy_state().full[2] == [True, True]
    (weights,) = files["weights"]
    data = bytearray(weights.path.read_bytes())
    data[-1] ^= 1
    (tmp_path / weights.path.name).write_bytes(data)
    for other in ({"weights": [Stamped.of(tmp_path / weights.path.name)]}, {**files, "adapters": []}, {}):
        monkeypatch.setattr(lm, "files", other)
        assert shipped_map(lm) is None
        assert policy.requirements(lm).policy_state().full == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_map_is_of_a_bundled_or_listed_model(path: Path) -> None:
    made = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem == made["model"]
    assert made["model"] in {"demo", *(entry.name for entry in CATALOG)}
    assert made["ranked_by"] == "ablate"
    rows = read_headmap(path)
    assert (len(rows), len(rows[0])) == (made["layers"], made["kv_heads"])
    # of few answers one may be lost: SmolLM2's map has 10 of its 11
    assert made["check"]["restricted"] >= 0.9 * made["check"]["whole"] > made["check"]["without"]


def test_weights_without_files_have_no_place(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.methods.policies.fastgen.shipped_map.FOLDER", tmp_path)
    monkeypatch.setattr("kvcli.heads.auto_headmap.cache_key", lambda lm: {})
    assert place(model.lm, tmp_path) is None
    with pytest.raises(BadConfig) as found:
        auto_headmap(model, tmp_path)
    assert found.value.code == "no_headmap"
