"""A model that drafts for another one: named, found, held against its words, planned for, and shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shutil import copytree

import pytest

import kvcli
from kvcli.chat.second import refuse_other_words
from kvcli.demo import weights_dir
from kvcli.errors import BadConfig, BadModel
from kvcli.fit.plan import Facts, plan, subject_of
from kvcli.fit.room import Room
from kvcli.kv.slots import nbytes
from kvcli.models import source
from kvcli.settings.layers import Sources
from kvcli.settings.profile import Profile
from tests import small_tokenizers

PROMPT = "Name the planets, twice."
ITSELF = {
    "spec.model": "demo",
    "spec.adaptive": False,
    "spec.copies": False,
    "load.verify": False,
    "load.device": "cpu",
}


def test_any_model_drafts_for_itself_and_the_text_stays() -> None:
    settings = {"sample.temperature": 0.0, "load.verify": False, "load.device": "cpu"}
    with (
        kvcli.load("demo", "exact", set=settings) as plain,
        kvcli.load("demo", "draft", set=ITSELF | settings) as model,
    ):
        want = plain.generate(PROMPT, max_new_tokens=40)
        turn = model.generate(PROMPT, max_new_tokens=40)
        assert turn.ids == want.ids
        spec = turn.stats
        assert spec.sources == {"model": spec.accepted_tokens}
        assert spec.per_position[0] == 1.0
        assert spec.kv["draft"] > 0
        assert spec.kv["cpu"] == want.stats.kv["cpu"]
        assert model.open("ngram").generate(PROMPT, max_new_tokens=40).ids == want.ids
        held = model._draft()
        assert held is model.with_profile(model.profile.replace(spec={"depth": 3}))._draft()
        assert held is not model.lm


def test_a_profile_that_is_chosen_later_loads_its_model_then() -> None:
    with kvcli.load("demo", "exact", set={"load.verify": False, "load.device": "cpu"}) as model:
        assert model._draft() is None
        later = model.with_profile(model.profile.replace(spec={"method": "model", "model": "demo", "quant": "int8"}))
        assert (draft := later._draft()) is not None
        assert draft.info.quant == "int8"
        with pytest.raises(BadModel, match="nowhere is neither a folder"):
            model.with_profile(model.profile.replace(spec={"method": "model", "model": "nowhere"}))


def test_it_must_be_named() -> None:
    with pytest.raises(BadConfig, match="needs a model that drafts") as found:
        kvcli.load("demo", "draft")
    assert found.value.code == "no_draft_model"
    assert "--draft MODEL" in found.value.try_


def test_words_must_be_the_same_but_for_those_that_were_added() -> None:
    words = small_tokenizers.byte_fallback()
    marked = small_tokenizers.byte_fallback.__wrapped__()
    marked.add_tokens(["<|think|>"], special_tokens=True)
    refuse_other_words(words, marked, "big", "small")
    with pytest.raises(BadModel, match="small cannot draft for big: it has another tokenizer") as found:
        refuse_other_words(words, small_tokenizers.metaspace(), "big", "small")
    assert found.value.code == "other_tokenizer"
    assert found.value.lines == ("of 360 tokens 360 are others or stand elsewhere; small has 101",)


def test_neither_its_code_nor_its_pickle_files_are_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    copytree(weights_dir(), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadModel) as found:
        kvcli.load("demo", "draft", set={"spec.model": str(folder), "load.allow_pickle": True, "load.verify": False})
    assert found.value.code == "model_pickle"


def test_a_project_file_names_no_model_outside_the_project(tmp_path: Path) -> None:
    (tmp_path / ".kvcli.toml").write_text(
        '[profiles.mine]\nextends = "draft"\n[profiles.mine.spec]\nmodel = "/tmp/x"\n'
    )
    with pytest.raises(BadConfig) as found:
        Profile.load("mine", sources=Sources(cwd=tmp_path))
    assert any("may not name a model outside the project" in line for line in found.value.lines)


def test_its_weights_and_its_store_are_planned_for() -> None:
    demo = subject_of(source.find("demo"))
    find = partial(lambda name: {"demo": demo}[name])
    profile = Profile.load("draft").replace(spec={"model": "demo", "working": 256}, load={"device": "cpu"})
    room, exact = Room("cpu", 64 << 30), Profile.load("exact").replace(load={"device": "cpu"})

    def needed(profile: Profile, context: int) -> int:
        return plan(demo, profile, room, context, Facts(find=find)).need.draft - 32 * context

    weights = plan(demo, exact, room, 1000, Facts()).need.weights
    per_token = demo.shape.kv_per_token * demo.number
    assert needed(profile, 100) == weights + 100 * per_token
    assert needed(profile, 8000) == needed(profile, 4000) == weights + 768 * per_token
    packed = profile.replace(spec={"quant": "int4"})
    assert needed(packed, 100) < needed(profile, 100)
    whole = profile.replace(spec={"prefill": "full"})
    assert needed(whole, 8000) == weights + 8000 * per_token
    with pytest.raises(BadConfig, match="needs a model that drafts"):
        plan(demo, Profile.load("draft"), room, 1000, Facts(find=find))


def test_it_stores_no_more_than_was_planned_for() -> None:
    settings = ITSELF | {"spec.working": 128, "spec.prefill": "window:256", "prefill.chunk": 256}
    with kvcli.load("demo", "draft", set=settings) as model:
        session = model.new_session()
        most = 0
        from kvcli.engine.engine import events

        for _ in events(session.read([7 + i % 900 for i in range(3000)])):
            most = max(most, nbytes(session.drafter).get("draft", 0))
        for _ in events(session.stream(100)):
            most = max(most, nbytes(session.drafter)["draft"])
        token = 2 * model.lm.n_layers * model.lm.n_kv_heads * model.lm.head_dim * 2
        assert 128 * token < most <= model.profile.spec.kept(3000) * (token + 4 * model.lm.n_layers)
