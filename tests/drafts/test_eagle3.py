"""EAGLE-3 heads draft: they say what a plain forward pass says, and the text is the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvcli
from kvcli import assemble
from kvcli.commands.common.flags import profile_flags
from kvcli.commands.common.run_setup import Setup
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import generate_together, iterate_events, run, run_to_end
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.stats import Step
from kvcli.errors import BadModel
from kvcli.kv.footprint import ModelSizes
from kvcli.kv.slots import nbytes
from kvcli.methods.drafts.eagle3_head import DirectEagle, Eagle3Head, wrap_head
from kvcli.methods.drafts.off import Off
from kvcli.settings.profile import Profile, load_profile
from tests import drafters, families, make
from tests.bench import eagle3
from tests.fakes import Machine

LAYERS = 2, 1, 0  # of three: 2, n // 2, n - 3


def plain_of(lm: LM, tensors: dict[str, Tensor], **changes: Any) -> tuple[Any, Tensor]:
    """The head in plain torch, and its words."""
    words = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    config = {**eagle3.config_of(lm, len(words)), "intermediate_size": 64, **changes}
    head = eagle3.Plain(config)
    head.load_state_dict({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")})
    return head.requires_grad_(False), words


def theirs(head: Any, table: Tensor, states: Tensor, ids: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
    """Logits after the last of `ids` and after each draft token, by one row at a time. `states` [N - 1, 3 E]: of all
    tokens but the last."""
    keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
    hidden = None
    for at, token in enumerate([*ids[1:], *drafts], 1):
        given = head.fc(states[at - 1 : at]) if at < len(ids) else hidden
        q, k, v = head.qkv(table[[token]], given, torch.tensor([float(at)]))
        keys.append(k)
        values.append(v)
        weights = (q @ torch.cat(keys, 1).transpose(1, 2) * head.d**-0.5).softmax(-1)
        hidden = head.after(given, weights @ torch.cat(values, 1))
        if at >= len(ids) - 1:
            found.append(head.lm_head(head.norm(hidden))[0])
    return found


def alike(hook_output: Sequence[float], logits: Tensor, words: Tensor) -> None:
    wide, best = len(hook_output) // 2, logits.topk(5)
    assert [int(i) for i in hook_output[:5]] == words[best.indices].tolist()
    torch.testing.assert_close(torch.tensor(hook_output[wide : wide + 5]), best.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_drafts_are_those_of_a_plain_forward_pass(family: str) -> None:
    """As the text is accepted, some tokens at a time, and behind its end as a chain."""
    lm = make.model(family, kernels=True)
    config, tensors = drafters.eagle3_of(lm)
    plain, words = plain_of(lm, tensors)
    ids, table = families.prompt(24), lm.model.get_input_embeddings()(torch.arange(lm.vocab)).float()
    request = ForwardRequest(lm, Rows.chain(ids, 0), make.dense(lm), want=range(24), record_hidden_states=layers_of(lm))
    states = run([request])[0].hidden
    assert states is not None
    assert states.shape[1] == 3 * table.shape[1]
    head = Eagle3Head(lm, wrap_head(lm, config, tensors, id="head"))
    head.start(ids[:1])
    for at in (2, 5, 6, 13, 24):
        had = head.length
        new, rows = ids[had:at], Rows.chain(ids[had - 1 : at - 1], had - 1)
        head.observe(Step(rows, torch.empty(0), list(range(len(new))), list(new), 0.0, hidden=states[had - 1 : at - 1]))
        head.extend(list(new))
        assert head.newest(8) == list(ids[max(had, at - 8) : at])
        rows = run_to_end(head.catch_up(min(3, len(new))))
        for end, found in zip(range(at - len(rows), at), rows, strict=True):
            alike(found, theirs(plain, table, states, ids[: end + 1], [])[0], words)
    assert head.newest(8) == [ids[-1]]
    drafts = [5, 8]
    want = theirs(plain, table, states, ids, drafts)
    alike(found, want[0], words)
    for i, token in enumerate(drafts):
        (found,) = run_to_end(head.continue_from([token], [i - 1]))
        alike(found, want[1 + i], words)
    assert head.usage()[0].slots == 23, "drafts are not stored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_direct_pass_is_that_of_the_modules_to_the_bit(dtype: torch.dtype) -> None:
    lm = make.model("llama", dtype, kernels=True)
    head = wrap_head(lm, *drafters.eagle3_of(lm), id="head")
    assert type(head.direct_forward) is DirectEagle
    ids, hidden = families.prompt(7), torch.randn(7, lm.model.config.hidden_size).to(dtype)
    for want in (None, [2, 6]):
        both = list[tuple[Tensor, Tensor | None]]()
        for direct in (head.direct_forward, None):
            head.direct_forward = direct
            rows, cache = Rows.chain(ids, 3), make.dense(head)
            asked = range(7) if want is None else want
            request = ForwardRequest(head, rows, cache, want=asked, hidden=hidden, record_hidden_states=LAST_STATE)
            (result,) = run([request])
            both.append((result.logits, result.hidden))
            head.direct_forward = direct or DirectEagle(head)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def layers_of(lm: LM) -> tuple[int, ...]:
    assert lm.layers is not None
    n = len(lm.layers)
    return 2, n // 2, n - 3


def test_training_unrolls_what_drafting_does() -> None:
    """Each pass of training gives for a row what a chain of as many draft tokens gives there."""
    lm = make.model("llama", kernels=True)
    plain, _ = plain_of(lm, drafters.eagle3_of(lm)[1])
    ids, table = families.prompt(12), torch.randn(97, 48, generator=torch.Generator().manual_seed(1))
    states = torch.randn(12, 144, generator=torch.Generator().manual_seed(2))
    states[0] = 0.0
    first = plain.fc(torch.cat([torch.zeros(1, 144), states[:-1]]))
    passes = [plain.lm_head(plain.norm(x))[0] for x in plain.unrolled(table[ids][None], first[None], 3)]
    for end in (5, 9):
        shown = torch.cat([torch.zeros(1, 144), states])  # a row without a token before it has no state
        want = theirs(plain, table, shown, [0, *ids[: end + 1]], ids[end + 1 : end + 3])
        for step in range(3):
            torch.testing.assert_close(passes[step][end + step], want[step], rtol=1e-4, atol=1e-4)


def test_training_learns_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained head loses less on its texts than one that was only begun, is the same if training was interrupted, and
    opens as a published one does."""
    for name, value in {"WINDOW": 24, "ASKED": 24, "UNROLLED": 2, "HELD": 4}.items():
        monkeypatch.setattr(eagle3, name, value)

    def training(folder: Path) -> eagle3.Training:
        torch.manual_seed(0)
        return eagle3.Training(model, folder, 256, Random(0))

    def lost() -> float:
        with torch.no_grad():
            return float(eagle3.losses(whole.head, batches[0], whole.of, 2)[0])

    with kvcli.load("demo", profile="exact") as model:
        texts = next(eagle3.texts_of(model, 1, Random(0)))
        for folder in (tmp_path / "whole", tmp_path / "stopped"):
            (folder / "texts").mkdir(parents=True)
            torch.save(texts, folder / "texts/0-000.pt")
        whole, stopped = training(tmp_path / "whole"), training(tmp_path / "stopped")
        feed = whole.batches()
        batches = [next(feed)] * 9
        begun = lost()
        with torch.enable_grad():
            for i, batch in enumerate(batches):
                whole.learn(batch, i / 9)
                if i == 5:
                    stopped.keep(0.0)
                    stopped = training(tmp_path / "stopped")
                stopped.learn(batch, i / 9)
        assert lost() < 0.9 * begun
        assert stopped.step == whole.step
        for a, b in zip(whole.head.parameters(), stopped.head.parameters(), strict=True):
            assert torch.equal(a, b)
        whole.keep(whole.right()[0])
        spec = {"method": "eagle3", "model": str(tmp_path / "whole")}
        with kvcli.load("demo", profile="exact", set={f"spec.{key}": value for key, value in spec.items()}) as drafted:
            found = drafted.generate("Write about the harbour.", 24)
        assert found.text == model.generate("Write about the harbour.", 24).text


SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.9, top_k=40, seed=3)}


def written(lm: LM, drafter: Any, sampler: Sampler) -> tuple[list[int], list[Step]]:
    session = make.session(lm, drafter=drafter, sampler=sampler, chunk=13)
    run_to_end(session.read(families.prompt(40)))
    steps = list(iterate_events(session.stream(40)))
    return session.ids, steps


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5_text"])
def test_the_text_is_that_of_plain_decoding(family: str, sampler: str) -> None:
    lm, chain = make.model(family, kernels=True), {"branches": 1}  # recurrent states follow no tree
    want, _ = written(lm, Off(), SAMPLERS[sampler])
    for more in ({"truth": want, "depth": 5}, {}, {"adaptive": True}):
        drafter = drafters.Eagled(**more, **chain)
        ids, _ = written(lm, drafter, SAMPLERS[sampler])
        assert ids == want
        assert drafter.report() is not None
        assert not drafter.report().fault
    _, steps = written(lm, drafters.Eagled(want, depth=5, **chain), SAMPLERS[sampler])
    assert sum(step.n_accepted for step in steps) > 10, "what a good head says is used"


STREAM = ["policy.name=window", "policy.sinks=2", "policy.window=40", "policy.compression_interval=16"]
INT8 = ["kv.k_bits=8", "kv.v_bits=8", "kv.group=16", "kv.residual=20"]


@pytest.mark.parametrize("kept", [[], INT8, STREAM], ids=["whole", "int8", "window"])
def test_over_what_a_profile_keeps_the_text_is_the_same_beside_another(kept: list[str]) -> None:
    lm = make.model("llama", kernels=True)
    plain = load_profile("exact", sets=["exactness=approx", "spec.method=off", "prefill.chunk=37", *kept])
    drafting = plain.replace(spec={"method": "eagle3", "model": "there", "adaptive": False, "copies": False})
    pair = ModelPair(lm, wrap_head(lm, *drafters.eagle3_of(lm), id="head"))

    def text(profile: Profile, n: int) -> Any:
        session = assemble.session(lm, profile, pair=pair)
        yield from session.read(families.prompt(n))
        yield from session.stream(30)
        return session.ids

    want = [run_to_end(text(plain, n)) for n in (90, 131)]
    assert [run_to_end(text(drafting, n)) for n in (90, 131)] == want
    assert [task.result() for task in generate_together(text(drafting, 90), text(drafting, 131))] == want


def test_a_head_that_does_not_fit_is_refused_by_what_differs() -> None:
    lm = make.model("llama", kernels=True)
    config, tensors = drafters.eagle3_of(lm)

    def refused(of: LM, changes: dict[str, Any], **stated: Any) -> str:
        config.update({"vocab_size": 97, **stated})
        given = {name: t for name, t in (tensors | changes).items() if t is not None}
        with pytest.raises(BadModel, match="head is an EAGLE-3 head that does not fit") as found:
            wrap_head(of, config, dict(given), id="head")
        assert found.value.code == "draft_head"
        assert "--spec ngram" in found.value.try_
        return " ".join(found.value.lines)

    assert "fc.weight: [48, 144] in its files, [48, 96]" in refused(make.model("llama", hidden_size=32), {})
    assert "its vocabulary has 131 tokens, that of the model 97" in refused(lm, {}, vocab_size=131)
    assert "its vocabulary has 97 tokens" in refused(lm, {"t2d": torch.ones(98, dtype=torch.bool)})
    assert "norm.weight: missing" in refused(lm, {"norm.weight": None})
    assert "midlayer.self_attn.q_norm.weight" in refused(lm, {"midlayer.self_attn.q_norm.weight": torch.ones(8)})
    assert "d2t does not name rising" in refused(lm, {"d2t": tensors["d2t"].flip(0)})
    assert "d2t does not name rising" in refused(lm, {"d2t": tensors["d2t"] + 20})
    assert "d2t does not name rising" in refused(lm, {"d2t": tensors["d2t"][:5]})
    assert "says.lm_head.weight: missing" in refused(lm, {"lm_head.weight": None})
    few = {"eagle_aux_hidden_state_layer_ids": [0, "1"]}
    assert "it reads the layers (1,), and the model has 3" in refused(lm, {}, eagle_config=few)
    stated = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert "it reads the layers (1, 2, 3), and the model has 3" in refused(lm, {}, eagle_config=stated)
    config.eagle_config = None
    narrow = drafters.eagle3_of(lm, hidden_size=32)
    with pytest.raises(BadModel, match="does not fit") as found:
        wrap_head(lm, *narrow, id="head")
    assert found.value.lines == ("it has hidden size 32 and no embedding of its own; that of the model has 48",)
    lm.is_split = True
    assert "on two devices" in refused(lm, {})


def test_stated_layers_tables_of_its_own_and_other_names_are_read() -> None:
    lm = make.model("llama", kernels=True)
    config, tensors = drafters.eagle3_of(lm)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}
    own = {"embed_tokens.weight": torch.zeros(97, 48)}
    head = wrap_head(lm, config, {f"model.{name}": t for name, t in (tensors | own).items()}, id="head").model
    assert head.layers_read == (1, 2, 1), "they are stated by the layer before"
    assert not head.embeds.weight.any()
    without = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    without["lm_head.weight"] = torch.zeros(97, 48)
    assert wrap_head(lm, config, without, id="head").model.words == list(range(97))


def test_its_memory_is_that_of_its_own_kv() -> None:
    lm = make.model("llama", kernels=True)
    pair = ModelPair(lm, wrap_head(lm, *drafters.eagle3_of(lm), id="head"))
    spec = load_profile(
        "exact", sets=["spec.method=eagle3", "spec.model=there", "spec.copies=false", "spec.adaptive=false"]
    ).spec
    session = make.session(lm, drafter=spec.drafter(pair=pair))
    run_to_end(session.read(families.prompt(40)))
    list(iterate_events(session.stream(300)))
    held = nbytes(session.drafter).values()
    slot = sum(of.slot_bytes(4) for of in pair.draft.shapes)
    sizes = ModelSizes((4,), 48, 4, slot, slot, 0, "cpu")
    assert 0 < sum(held) <= spec.draft_footprint(len(session.ids), sizes).beside


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A head for the bundled model, and one for another, by names of the config file."""
    import kvcli

    lm = kvcli.load("demo", profile="exact").lm
    for name, changes in (("head", {}), ("stranger", {"target_hidden_size": 64})):
        _, tensors = drafters.eagle3_of(lm, **changes)
        (tmp_path / name).mkdir()
        halves = {k: t.bfloat16() if t.is_floating_point() else t for k, t in tensors.items()}
        save_file(halves, tmp_path / name / "model.safetensors")
        config = {**eagle3.config_of(lm, len(tensors["d2t"])), "intermediate_size": 64, **changes}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    found = Machine(tmp_path, has_config=True)
    file = found.world().paths.config / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f'[models.{n}]\npath = "{tmp_path / n}"\n' for n in ("head", "stranger")))
    return found


def test_it_is_found_by_its_files_and_fit_counts_them(machine: Machine) -> None:
    setup = Setup(machine.world(), "demo", flags=profile_flags({"draft": "head"}))
    assert (setup.profile.spec.method, setup.profile.spec.model) == ("eagle3", "head")
    by = ("--set", "spec.method=eagle3", "--set", "spec.model=head")
    runs = [machine("fit", "demo", *more, "--json") for more in (("--set", "spec.method=off"), by)]
    assert not any(run.exit for run in runs), [(run.out, run.err) for run in runs]
    off, drafting = (json.loads(run.out)["plans"][0] for run in runs)
    file = machine.folder / "head" / "model.safetensors"
    held = sum(t.nbytes for t in load_file(file).values() if t.is_floating_point())
    assert held <= drafting["draft"] - off["draft"] < held * 1.2 + 10_000_000
    asked = ("-p", "How deep?", "-n", "12", "--greedy", "--json")
    runs = [machine("chat", "-m", "demo", *by, *asked) for by in (("--draft", "head"), ("--spec", "off"))]
    said, plain = (json.loads(run.out) for run in runs)
    assert said["text"] == plain["text"]
    assert (said["spec"]["method"], "eagle3" in said["spec"]["sources"]) == ("eagle3", True)


def test_it_is_refused_alone_and_where_it_does_not_belong(machine: Machine) -> None:
    with pytest.raises(BadModel, match="head is an EAGLE-3 head; it cannot generate text alone") as found:
        Setup(machine.world(), "head").fetch(Setup(machine.world(), "demo").profile)
    assert any("-m MODEL --draft" in one for one in found.value.try_), found.value.try_
    setup = Setup(machine.world(), "demo", flags=profile_flags({"draft": "stranger"}))
    with pytest.raises(BadModel, match="stranger is an EAGLE-3 head that does not fit demo"):
        setup.load(setup.profile).drafts_by  # noqa: B018
    (machine.folder / "stranger" / "model.safetensors").rename(machine.folder / "stranger" / "pytorch_model.bin")
    with pytest.raises(BadModel, match="stranger are pickle files") as found:
        setup.load(setup.profile).drafts_by  # noqa: B018
    assert found.value.try_ == ("look for a safetensors copy of the model",), "pickles of draft models are never opened"
    for method, name, says in (("model", "head", "is an EAGLE-3 head"), ("eagle3", "demo", "is a complete model")):
        setup = Setup(machine.world(), "demo", flags={})
        with pytest.raises(BadModel, match=says):
            setup.load(setup.profile.replace(spec={"method": method, "model": name})).drafts_by  # noqa: B018
    done = machine("chat", "-m", "demo", "-p", "How deep?", "--spec", "eagle3")
    assert done.exit
    assert "no_draft_model" in done.err
