"""A model that drafts for another one: named, found, held against its words, planned for, and shown."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from weakref import ref

import pytest

import kvcli
from kvcli.demo import weights_dir
from kvcli.errors import BadConfig, BadModel
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, plan, subject_of
from kvcli.kv.footprint import NO_SIZES
from kvcli.kv.slots import nbytes
from kvcli.kv.tiers.draft_buffers import ROOM
from kvcli.models import source
from kvcli.models.retokenizer import spelling
from kvcli.models.shape import RecurrentShapes
from kvcli.settings.config import Sources
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
        assert held is not None
        assert held.draft is model.lm  # the same files, loaded once


def test_a_profile_that_is_chosen_later_loads_its_model_then() -> None:
    with kvcli.load("demo", "exact", set={"load.verify": False, "load.device": "cpu"}) as model:
        assert model._draft() is None
        later = model.with_profile(model.profile.replace(spec={"method": "model", "model": "demo", "quant": "int8"}))
        assert (draft := later._draft()) is not None
        assert draft.draft.info.quant == "int8"
        with pytest.raises(BadModel, match="nowhere is neither a folder"):
            model.with_profile(model.profile.replace(spec={"method": "model", "model": "nowhere"}))


def test_another_one_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    copytree(weights_dir(), tmp_path / "small")
    settings = ITSELF | {"spec.model": str(tmp_path / "small"), "sample.temperature": 0.0}
    with kvcli.load("demo", "draft", set=settings) as model:
        before = model.open()
        want = before.generate(PROMPT, max_new_tokens=20)
        assert want.stats.drafts_by == str(tmp_path / "small")
        first = ref(model._draft().draft)  # type: ignore[union-attr]
        changed = before.with_profile(before.profile.replace(spec={"quant": "int8"}))
        assert changed.take_cache(before)
        before.close()
        got = changed.generate(PROMPT, max_new_tokens=20)
        assert (got.ids, got.stats.cached > 0) == (want.ids, True)
        assert changed.session.drafter._chain.draft_model.lm.info.quant == "int8"  # type: ignore[attr-defined]
        assert changed.model.drafts_by == str(tmp_path / "small")
        del model, before, want
        gc.collect()
    assert first() is None


@pytest.mark.parametrize("fault", [MemoryError("no room"), RuntimeError("broken")])
def test_one_that_cannot_be_loaded_for_want_of_memory_or_by_a_fault_is_done_without(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("kvcli.chat.model.load_draft_model", fails)
    with (
        kvcli.load("demo", "exact", set={"load.verify": False, "sample.temperature": 0.0}) as plain,
        kvcli.load("demo", "draft", set=ITSELF | {"sample.temperature": 0.0}) as model,
    ):
        assert model.profile.spec.method == "off"
        why = "out of memory" if isinstance(fault, MemoryError) else "RuntimeError: broken"
        assert f"spec.method is off: draft model demo cannot be loaded: {why}" in model.cautions
        assert model.drafts_by == ""
        assert model.generate(PROMPT, max_new_tokens=20).ids == plain.generate(PROMPT, max_new_tokens=20).ids


def test_it_must_be_named() -> None:
    with pytest.raises(BadConfig, match="needs a draft model") as found:
        kvcli.load("demo", "draft")
    assert found.value.code == "no_draft_model"
    assert "--draft MODEL" in found.value.try_


def test_of_a_family_are_those_whose_words_are_alike_but_for_a_few_and_those_that_were_added() -> None:
    words = small_tokenizers.byte_fallback()
    marked = small_tokenizers.byte_fallback.__wrapped__()
    marked.add_tokens(["<|think|>"], special_tokens=True)
    marked.add_tokens(["planet"])
    assert spelling(words, marked) is None
    assert spelling(words, small_tokenizers.metaspace()) is not None


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
    other = replace(demo, path="elsewhere")
    find = partial(lambda name: {"demo": other, "itself": demo}[name])
    profile = Profile.load("draft").replace(spec={"model": "demo", "working": 256}, load={"device": "cpu"})
    room, exact = AvailableMemory("cpu", 64 << 30), Profile.load("exact").replace(load={"device": "cpu"})

    def needed(profile: Profile, context: int) -> int:
        return plan(demo, profile, room, context, MeasuredFacts(find=find)).need.draft - 32 * context

    weights = plan(demo, exact, room, 1000, MeasuredFacts()).need.weights
    per_token = demo.shape.kv_per_token * demo.number
    beside = weights + ROOM * per_token  # of a draft tree
    assert needed(profile, 100) == beside + 100 * per_token
    assert needed(profile, 8000) == needed(profile, 4000) == beside + 768 * per_token
    packed = profile.replace(spec={"quant": "int4"})
    assert needed(packed, 100) < needed(profile, 100)
    whole = profile.replace(spec={"prefill": "full"})
    assert needed(whole, 8000) == beside + 8000 * per_token
    chosen = profile.replace(spec={"retrieval": "every:8", "recent": 64})  # and what could be chosen
    assert needed(chosen, 8000) == beside + (8000 + 768) * per_token
    card = replace(NO_SIZES, device="cuda")
    away = chosen.replace(spec={"chunk_device": "host"})
    assert [one.spec.draft_footprint(8000, card).slots for one in (chosen, away)] == [8768, 768]
    assert needed(profile.replace(spec={"model": "itself"}), 100) == (100 + ROOM) * per_token  # loaded once
    need, without = (plan(demo, p, room, 100, MeasuredFacts(find=find)).need for p in (profile, exact))
    assert need.loading == weights + without.loading - without.base + need.base
    assert need.loading - need.mapped == weights + without.loading - without.mapped - without.base + need.base
    large = replace(demo, path="large", shape=replace(demo.shape, vocab=64 * demo.shape.vocab))
    assert plan(demo, profile, room, 100, MeasuredFacts(find=lambda name: large)).need.working > 2 * need.working
    with pytest.raises(BadConfig, match="needs a draft model"):
        plan(demo, Profile.load("draft"), room, 1000, MeasuredFacts(find=find))


def test_its_states_are_planned_for() -> None:
    demo, room = subject_of(source.find("demo")), AvailableMemory("cpu", 64 << 30)
    shape = replace(demo.shape, folds=RecurrentShapes(layers=2, history=30, state=700, taped=50))
    plain, stateful = replace(demo, path="one"), replace(demo, path="other", shape=shape)
    find = {"plain": plain, "stateful": stateful}.__getitem__

    def needed(name: str, depth: int) -> int:
        profile = Profile.load("draft").replace(spec={"model": name, "depth": depth}, load={"device": "cpu"})
        return plan(demo, profile, room, 1000, MeasuredFacts(find=find)).need.draft

    one = 2 * (30 * demo.number + 700 * 4)
    assert needed("stateful", 9) - needed("stateful", 5) == 4 * one
    assert needed("stateful", 5) - needed("plain", 5) == 11 * one + 2 * 50 * 64 * demo.number


@pytest.mark.parametrize("retrieval", ["off", "every:2"])
def test_it_stores_no_more_than_was_planned_for(retrieval: str) -> None:
    settings = ITSELF | {"spec.working": 128, "spec.prefill": "window:256", "prefill.chunk": 256}
    settings |= {"spec.retrieval": retrieval, "spec.recent": 16, "spec.chunk": 16} if retrieval != "off" else {}
    with kvcli.load("demo", "draft", set=settings) as model:
        session = model.new_session()
        most = 0
        from kvcli.engine.engine import iterate_events

        for _ in iterate_events(session.read([7 + i % 900 for i in range(3000)])):
            most = max(most, sum(nbytes(session.drafter).values()))
        for _ in iterate_events(session.stream(100)):
            most = max(most, sum(nbytes(session.drafter).values()))
        token = 2 * model.lm.n_layers * model.lm.n_kv_heads * model.lm.head_dim * 2
        assert (
            128 * token
            < most
            <= model.profile.spec.draft_footprint(3000, NO_SIZES).slots * (token + 4 * model.lm.n_layers)
        )
