"""Assistants of Gemma 4 draft: they say what transformers has them say, and the text is the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from kvcli import assemble
from kvcli.commands.common import run_setup as setup_file
from kvcli.commands.common.flags import profile_flags
from kvcli.commands.common.run_setup import Setup
from kvcli.demo import weights_dir
from kvcli.drafts.draft_models.assistant_head import AssistantHead
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.drafting.gemma4_assistant import Output, load_assistant, wrap_layers
from kvcli.engine.engine import generate_together, iterate_events, run_to_end
from kvcli.engine.forward_request import Passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.errors import BadModel, UsageError
from kvcli.methods.drafts.off import Off
from kvcli.models import source
from kvcli.settings.profile import Profile, load_profile
from tests import drafters, families, make
from tests.covering import pinned
from tests.fakes import Machine

DEPTH, STEPS = 4, 5
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5}


def loaded(family: str = "gemma4_shared", **changes: Any) -> LM:
    return make.model(family, **changes, kernels=True)


def theirs(lm: LM, assistant: Any, text: Sequence[int], start: int) -> list[list[int]]:
    """What transformers' generator drafts after each of some steps that accept one draft: no row that was rejected is
    left where it looks, as there is in the passes of its own loop."""
    stock = families.build(*lm.remembers["built"][0], **lm.remembers["built"][1])
    assistant.generation_config.num_assistant_tokens = DEPTH
    table = stock.get_input_embeddings()
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, table, GenerationConfig(max_length=500))
    found = []
    for step in range(STEPS):
        n = start + 2 * step
        ids = torch.tensor([text[:n]])
        with torch.inference_mode():
            out = stock(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
            generator.is_main_model_prefill = True
            said, _ = generator.get_candidates(ids, {}, out, is_first_iteration=False, n_last_matches=0)
        found.append(said[0, n:].tolist())
    return found


def guessed(head: AssistantHead) -> Passes[list[int]]:
    """A chain of its first choices."""
    (hook_output,) = yield from head.catch_up()
    found = [int(hook_output[0])]
    for at in range(DEPTH - 1):
        (hook_output,) = yield from head.continue_from(found[-1:], [at - 1])
        found.append(int(hook_output[0]))
    return found


class Follower:
    """Drafts what is right, two tokens a pass, and has the head say what it would."""

    view = logits_hook = None

    def __init__(self, text: Sequence[int], head: AssistantHead) -> None:
        self.text, self.head, self.said = text, head, list[list[int]]()

    def expect(self, costs: Any) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Any = None) -> None:
        self.head.start(ids)

    def propose(self, ids: Sequence[int], room: int, context: Any) -> Passes[Any]:
        from kvcli.engine.forward_request import LAST_STATE, Draft, NeededTensors

        self.head.bind(context)
        self.said.append((yield from guessed(self.head)))
        return Draft([self.text[len(ids)]], [-1], needs=NeededTensors(LAST_STATE))

    def observe(self, step: Any) -> None:
        self.head.observe(step)
        self.head.extend(step.new)

    def usage(self) -> list[Any]:
        return []

    def report(self) -> None:
        return None


EMBEDDINGS = {"plain": {}, "ordered": ORDERED}
STARTS = 8, 50, 120  # within the window of 11 tokens, and beyond
KINDS = product(("gemma4_shared", "gemma4", "unified"), EMBEDDINGS, STARTS)


@pytest.mark.parametrize(("family", "embedding", "start"), pinned(KINDS, ("gemma4_shared", "plain", 8)))
def test_drafts_are_those_of_transformers(
    family: str, embedding: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = EMBEDDINGS[embedding]
    unified = replace(families.FAMILIES["gemma4"], model_type="gemma4_unified_text")
    monkeypatch.setitem(families.FAMILIES, "unified", unified)
    changes = {"vocab_size": 96, "vocab_size_per_layer_input": 96}
    lm = loaded(family, **changes)
    lm.remembers["built"] = (family,), changes
    text = written(lm, Off(), start)
    assistant = drafters.assistant_of(lm, **ordered)
    if ordered:
        order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
        assistant.masked_embedding.token_ordering.copy_(order)
    want = theirs(lm, assistant, text, start)
    assert len({tuple(one) for one in want}) > 2, "they say something about the text"
    follower = Follower(text, AssistantHead(lm, wrap_layers(lm, assistant)))
    assert written(lm, follower, start) == text  # type: ignore[arg-type]
    assert follower.said[:STEPS] == want


def written(lm: LM, drafter: Drafter, n: int = 50, sampler: Sampler | None = None) -> list[int]:
    session = make.session(lm, drafter=drafter, sampler=sampler, chunk=13)
    run_to_end(session.read(families.prompt(n, 96)))
    list(iterate_events(session.stream(40)))
    return session.ids


@pytest.mark.parametrize("fault", ["layer", "position", "state", "window"])
def test_drafts_are_others_where_one_of_it_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison with transformers would find."""
    lm = loaded(num_hidden_layers=8, layer_types=families.PAIRS * 4)
    text = written(lm, Off())

    def said() -> list[list[int]]:
        follower = Follower(text, AssistantHead(lm, wrap_layers(lm, drafters.assistant_of(lm))))
        written(lm, follower)  # type: ignore[arg-type]
        return follower.said

    want = said()
    assert said() == want
    if fault == "layer":
        monkeypatch.setattr("kvcli.drafts.draft_models.assistant_head.kv_source_layers", lambda lm, head: [0, 1] * 2)
    elif fault == "position":
        monkeypatch.setattr(AssistantHead, "length", property(lambda self: len(self._text) + 1))
    elif fault == "window":
        monkeypatch.setattr("kvcli.drafts.draft_models.assistant_head._WIDER", 0)
    else:
        monkeypatch.setattr(Output, "forward", lambda self, shown, x: self.table(x + 0 * shown.mul_(0).sum()))
    assert said() != want


def test_another_model_and_another_shape_are_refused_by_what_differs() -> None:
    lm = loaded()
    for changes, said in (
        ({"backbone_hidden_size": 64}, "backbone_hidden_size: 64 here, 48 there"),
        ({"text_config": {"vocab_size": 98}}, "vocab_size: 98 here, 97 there"),
        ({"text_config": {"sliding_window": 12}}, "sliding_window: 12 here, 11 there"),
        ({"text_config": {"global_head_dim": 64}}, "KV heads of full_attention, and head size"),
    ):
        with pytest.raises(BadModel) as found:
            wrap_layers(lm, drafters.assistant_of(lm, **changes))
        assert found.value.code == "draft_head"
        assert said in " ".join(found.value.lines)
        assert any("--draft MODEL" in one for one in found.value.try_)
    llama = loaded("llama")
    with pytest.raises(BadModel, match="not for model") as found:
        wrap_layers(llama, drafters.assistant_of(llama))
    assert any("gemma4_text here, llama there" in line for line in found.value.lines)


def test_one_whose_layers_are_on_two_devices_is_told_so() -> None:
    lm = loaded()
    lm.is_split = True
    with pytest.raises(BadModel, match="its layers are on two devices") as found:
        wrap_layers(lm, drafters.assistant_of(lm))
    assert "--quant int4" in found.value.try_


def test_it_is_where_the_model_that_writes_is_before_it_is_asked_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its first trial would find the embeddings on another device."""
    lm, seen = loaded(), list[torch.device]()
    drafters.assistant_of(lm).save_pretrained(tmp_path)
    lm.device = torch.device("meta")
    monkeypatch.setattr(
        "kvcli.engine.drafting.gemma4_assistant.wrap_layers", lambda lm, model, **_: seen.append(model.device)
    )
    load_assistant(lm, source.find(str(tmp_path), may_assist=True), Profile.load("exact").load)
    assert seen == [lm.device]


def test_a_precision_that_its_device_has_not_is_refused(tmp_path: Path) -> None:
    lm = loaded()
    drafters.assistant_of(lm).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="nf4"):
        load_assistant(
            lm, source.find(str(tmp_path), may_assist=True), replace(Profile.load("exact").load, quant="nf4")
        )


INT8 = ["kv.k_bits=8", "kv.v_bits=8", "kv.group=16", "kv.residual=20"]
SNAP = ["policy.name=snap", "policy.keep=0.3"]
STREAM = ["policy.name=window", "policy.sinks=2", "policy.window=40", "policy.compression_interval=16"]


@pytest.mark.parametrize("kept", [[], INT8, SNAP, STREAM, INT8 + SNAP], ids=["whole", "int8", "snap", "window", "both"])
def test_over_what_a_profile_keeps_the_text_is_the_same(kept: list[str]) -> None:
    """Beside another text, too."""
    lm = loaded()
    plain = load_profile("exact", sets=["exactness=approx", "spec.method=off", "prefill.chunk=37", *kept])
    drafting = plain.replace(spec={"method": "assistant", "model": "there", "adaptive": False, "copies": False})
    pair = ModelPair(lm, wrap_layers(lm, drafters.assistant_of(lm)))

    def text(profile: Profile, n: int) -> Any:
        session = assemble.session(lm, profile, pair=pair)
        yield from session.read(families.prompt(n))
        yield from session.stream(30)
        return session.ids

    want = [run_to_end(text(plain, n)) for n in (90, 131)]
    assert [run_to_end(text(drafting, n)) for n in (90, 131)] == want
    assert [task.result() for task in generate_together(text(drafting, 90), text(drafting, 131))] == want


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A tiny Gemma 4 with the bundled model's tokens, its assistant, and that of another one."""
    changes = {"vocab_size": 1888, "vocab_size_per_layer_input": 1888}
    families.build("gemma4_shared", **changes).save_pretrained(tmp_path / "gemma")
    for file in weights_dir().glob("tokeniz*"):
        copy(file, tmp_path / "gemma")
    lm = loaded(**changes)
    drafters.assistant_of(lm).save_pretrained(tmp_path / "helper")
    drafters.assistant_of(lm, backbone_hidden_size=64).save_pretrained(tmp_path / "stranger")
    found = Machine(tmp_path, has_config=True)
    config = found.world().paths.config / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    names = ("gemma", "helper", "stranger")
    config.write_text("".join(f'[models.{n}]\npath = "{tmp_path / n}"\n' for n in names))
    return found


def test_it_is_found_by_its_files_and_fit_counts_them(machine: Machine) -> None:
    for name in ("helper", "auto"):
        setup = Setup(machine.world(), "gemma", flags=profile_flags({"draft": name}))
        profile = setup.profile
        assert (profile.spec.method, profile.spec.model) == ("assistant", "helper")
    assert setup.sizes()("helper").shape.layers == 4
    by = ("--set", "spec.method=assistant", "--set", "spec.model=helper")
    runs = [machine("fit", "gemma", *more, "--json") for more in (("--set", "spec.method=off"), by)]
    assert not any(run.exit for run in runs), [(run.out, run.err) for run in runs]
    off, drafting = (json.loads(run.out)["plans"][0] for run in runs)
    held = sum(t.nbytes for t in load_file(machine.folder / "helper" / "model.safetensors").values())
    assert held <= drafting["draft"] - off["draft"] < held + 200_000, "its weights, and tables of what copies know"
    asked = ("-p", "How deep?", "-n", "12", "--greedy", "--json")
    runs = [machine("chat", "-m", "gemma", *by, *asked) for by in (("--draft", "helper"), ("--spec", "off"))]
    said, plain = (json.loads(run.out) for run in runs)
    assert said["text"] == plain["text"]
    assert (said["spec"]["method"], "assistant" in said["spec"]["sources"]) == ("assistant", True)


def test_one_that_is_not_here_yet_is_known_once_it_was_fetched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, find = set[str](), setup_file.find

    def fetching(world: Any, name: Any, allow_pickle: bool, tell: Any = None, **more: Any) -> Any:
        if name == "helper" and tell is not None:
            here.add(name)
        if name == "helper" and name not in here:
            raise BadModel("helper is not on this machine", code="model_not_cached")
        return find(world, name, allow_pickle, tell, **more)

    monkeypatch.setattr(setup_file, "find", fetching)
    setup = Setup(machine.world(), "gemma", flags=profile_flags({"draft": "helper"}))
    profile = setup.profile
    assert profile.spec.method == "model"
    model = setup.load(profile, tell=lambda line: None)
    assert (model.profile.spec.method, model.drafts_by) == ("assistant", "helper")


def test_who_says_more_of_it_than_its_name_is_told_what_to_type(machine: Machine) -> None:
    asked = ("chat", "-m", "gemma", "-p", "How deep?", "-n", "3", "--draft", "helper")
    for more, says in (
        (("--set", "spec.depth=2"), "--set spec.method=assistant --set spec.model=helper, instead of --draft"),
        (("--set", "spec.method=assistant"), "--set spec.model=helper instead of --draft"),
    ):
        done = machine(*asked, *more)
        assert done.exit
        assert says in done.err
    told = ("--set", "spec.method=assistant", "--set", "spec.model=helper", "--set", "spec.depth=2")
    assert machine(*asked[:-2], *told).exit == 0


def test_it_is_refused_alone_and_where_it_does_not_belong(machine: Machine) -> None:
    with pytest.raises(BadModel, match="reads the KV cache of its target model") as found:
        Setup(machine.world(), "helper").fetch(Setup(machine.world(), "gemma").profile)
    assert any("-m MODEL --draft" in one for one in found.value.try_)
    setup = Setup(machine.world(), "gemma", flags=profile_flags({"draft": "stranger"}))
    with pytest.raises(BadModel, match="stranger drafts only for the Gemma 4") as found:
        setup.load(setup.profile).drafts_by  # noqa: B018
    for method, name, says in (
        ("model", "helper", "is an assistant"),
        ("assistant", "demo", "is a complete model"),
        ("assistant", "gemma", "is a complete model"),
    ):
        setup = Setup(machine.world(), "gemma", flags={})
        profile = setup.profile.replace(spec={"method": method, "model": name})
        with pytest.raises(BadModel, match=says) as found:
            setup.load(profile).drafts_by  # noqa: B018
        assert any("--set spec.method=" in one for one in found.value.try_)
