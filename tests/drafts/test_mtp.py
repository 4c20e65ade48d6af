"""MTP layers draft: what they read, what they store, and that the text is the model's own whatever they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kvcli.drafts.draft_models.mtp_head import MtpHead
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.drafting.mtp import Mtp, mtp_of
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.stats import Step
from kvcli.errors import BadModel
from kvcli.fit import weights
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, PlannedModel, plan
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.draft_buffers import ROOM
from kvcli.methods.drafts.mtp import MtpDraft
from kvcli.methods.drafts.off import Off
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.shape import shape_of
from kvcli.settings.profile import Profile
from tests import drafters, families, make

SAMPLERS = {"greedy": Sampler(), "drawn": Sampler(temperature=0.9, top_k=24, seed=3)}


def loaded(family: str = "llama", *, is_laid_out: bool = True) -> LM:
    found = make.model(family)
    if is_laid_out:
        install_kernels(found)
    return found


def written(
    lm: LM, drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"], n: int = 40
) -> tuple[list[int], list[Any]]:
    session = make.session(lm, drafter=drafter, sampler=sampler, chunk=13)
    run_to_end(session.read(families.prompt(50)))
    steps = list(iterate_events(session.stream(40)))
    return session.ids, steps


@pytest.mark.parametrize("is_laid_out", [True, False], ids=["straight", "by its own loop"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", [LAST_STATE, (2, 1, 1), (0, -1)], ids=str)
def test_shown_states_are_those_that_transformers_hands_out(
    layers: tuple[int, ...], family: str, is_laid_out: bool
) -> None:
    """Alone, and beside a sequence that needs those of other layers."""
    lm, ids = loaded(family, is_laid_out=is_laid_out), families.prompt(23)
    feed = ForwardRequest(lm, Rows.chain(ids, 0), make.dense(lm), want=[3, 4, 22], record_hidden_states=layers)
    beside = ForwardRequest(lm, Rows.chain(ids, 0), feed.cache, want=[22], record_hidden_states=(0, 2))
    plain, other = run([feed])[0], run([beside, feed])
    stock = families.build(family)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    want = torch.cat([stock[layer][0] for layer in layers], 1)
    torch.testing.assert_close(plain.hidden, want[[3, 4, 22]], rtol=1e-3, atol=1e-4)
    assert other[0].hidden is not None
    torch.testing.assert_close(other[0].hidden, torch.cat([stock[0][0], stock[2][0]], 1)[[22]], rtol=1e-3, atol=1e-4)
    assert plain.hidden is not None
    assert other[1].hidden is not None
    # torch's products of layers that are not laid out know their neighbours on some processors
    near = {"rtol": 0.0, "atol": 0.0} if lm.is_row_invariant else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(other[1].hidden, plain.hidden, **near, msg="among others")


def test_a_head_gives_what_transformers_makes_of_the_same_text() -> None:
    """Token by token as it is heard, against one pass of `MtpModel` with its own cache and attention."""
    lm, stock = loaded(), families.build("llama")
    stock.config.num_mtp_layers = 1
    theirs, ours = MtpModel(stock, 1), drafters.head_of(lm)
    families.sharpen(theirs, seed=5)
    theirs.set_attn_implementation("eager")
    head, states = MtpHead(lm, ours), torch.randn(31, 48, generator=torch.Generator().manual_seed(2))
    ids = families.prompt(32)
    head.start(ids[:1])
    for at in (2, 5, 6, 13, 32):  # so many tokens of the text after steps that accept some
        had = head.length
        new, rows = ids[had:at], Rows.chain(ids[had - 1 : at - 1], had - 1)
        head.observe(Step(rows, torch.empty(0), list(range(len(new))), list(new), 0.0, hidden=states[had - 1 : at - 1]))
        head.extend(list(new))
        (found,) = run_to_end(head.catch_up())
        (again,) = run_to_end(head.catch_up())
        assert again[:8] == found[:8], "asked twice it says the same"
    cache, pos = MtpCache(config=stock.config.get_mtp_config()), torch.arange(1, 32)[None]
    hidden = theirs.forward_layer(0, states[None], pos, cache, input_ids=torch.tensor([ids[1:]]))
    want = theirs._project_to_logits(hidden)[0, -1]
    _alike(found, want)
    assert head.usage()[0].slots == 31
    assert [u.tier for u in head.usage()] == ["draft"]
    run_to_end(head.continue_from([5, 6], [-1, -1]))
    (deeper,) = run_to_end(head.continue_from([7], [1]))  # behind the second of them
    for token, at in ((6, 32), (7, 33)):
        of = {"position_ids": torch.tensor([[at]]), "mtp_cache": cache, "input_ids": torch.tensor([[token]])}
        hidden = theirs.forward_layer(0, hidden[:, -1:], **of)
    _alike(deeper, theirs._project_to_logits(hidden)[0, -1])
    assert head.usage()[0].slots == 31, "guesses are not stored"


def _alike(hook_output: Sequence[float], logits: Tensor) -> None:
    wide = len(hook_output) // 2
    assert [int(i) for i in hook_output[:5]] == logits.topk(5).indices.tolist()
    torch.testing.assert_close(torch.tensor(hook_output[wide : wide + 5]), logits.topk(5).values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_text_is_that_of_plain_decoding(family: str, sampler: str) -> None:
    lm = loaded(family)
    want, _ = written(lm, Off(), SAMPLERS[sampler])
    for drafter in (drafters.Headed(want, depth=5, branches=2), drafters.Headed(), drafters.Headed(adaptive=True)):
        ids, steps = written(lm, drafter, SAMPLERS[sampler])
        assert ids == want
        assert drafter.report() is not None
        assert not drafter.report().fault
    _, steps = written(lm, drafters.Headed(want, depth=5), SAMPLERS[sampler])
    assert sum(step.n_accepted for step in steps) > 10, "what a good head says is used"


class Lost(Mtp):
    """Says numbers that are none."""

    def forward(self, *args: Any, **told: Any) -> Any:
        out = super().forward(*args, **told)
        out.logits.fill_(torch.nan)
        return out


class Torn(Mtp):
    """Breaks in its third pass of a text."""

    passes = 0

    def forward(self, *args: Any, **told: Any) -> Any:
        self.passes += 1
        if self.passes % 4 == 3:
            raise RuntimeError("it broke")
        return super().forward(*args, **told)


@pytest.mark.breaks
@pytest.mark.parametrize(("kind", "said"), [(Lost, ""), (Torn, "it broke")])
def test_a_head_that_is_broken_costs_no_text(kind: type[Mtp], said: str) -> None:
    lm = loaded()
    want, _ = written(lm, Off())
    drafter = drafters.Headed(of=kind)
    ids, _ = written(lm, drafter)
    assert ids == want
    report = drafter.report()
    assert report is not None
    assert said in report.fault


def test_hidden_states_that_were_not_recorded_are_computed_again_and_an_undo_forgets() -> None:
    lm = loaded()
    want, _ = written(lm, Off())
    head = MtpHead(lm, drafters.head_of(lm))
    session = make.session(lm)
    run_to_end(session.read(want[:60]))
    seen: list[ForwardRequest] = []

    def ask(ids: Sequence[int]) -> list[float]:
        head.start(ids)
        head.bind(session)  # type: ignore[arg-type]
        work = head.catch_up()
        feed = next(work)
        while True:
            seen.append(feed)
            try:
                feed = work.send(run([feed])[0])
            except StopIteration as end:
                found: list[list[float]] = end.value
                return found[0]

    first = ask(want[:60])
    assert [feed.lm for feed in seen] == [lm, head._head], "its newest tokens are read again, and the store is not"
    assert session.cache.n_slots(0) == 59
    run_to_end(session.cache.crop(40) or iter(())) if False else session.cache.crop(40)
    session.ids, session.committed = session.ids[:41], 40
    ask(want[:41])
    assert max(int(pos) for pos in head._kv.positions(0).flatten()) == 40
    assert first


def test_a_model_without_such_layers_is_refused_by_name() -> None:
    with pytest.raises(BadModel) as found:
        mtp_of(loaded())
    assert found.value.code == "no_draft_head"
    assert "MTP" in found.value.message


SMALL = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"intermediate_size": 56, "moe_intermediate_size": 24, "max_position_embeddings": 512}
QWEN = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
QWEN |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 1}
MELLUM = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
MELLUM |= {"num_experts": 4, "num_experts_per_tok": 2}
GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OUTER = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
LAYOUTS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    # how files name the block, and what is beside it: behind "mtp.", or as a further layer of the model
    "qwen3_5_text": (QWEN, "mtp.layers.0.", {f"mtp.{name}": of for name, of in OUTER.items()}),
    "mellum": (
        {**MELLUM, "num_nextn_predict_layers": 1},
        "mtp.layers.0.",
        {f"mtp.{name}": of for name, of in OUTER.items()},
    ),
    "glm4_moe": (
        {**GLM, "num_nextn_predict_layers": 1},
        "model.layers.2.",
        {
            f"model.layers.2.{name}": of
            for name, of in {
                "eh_proj": "eh_proj",
                "enorm": "enorm",
                "hnorm": "hnorm",
                "shared_head.norm": "post_norm",
            }.items()
        },
    ),
}


def saved(kind: str, folder: Path, *, has_head: bool = True) -> dict[str, Tensor]:
    """A tiny checkpoint, and what its MTP layer should be, by the names of `MtpModel`."""
    changes, block, beside = LAYOUTS[kind]
    config = AutoConfig.for_model(kind, **SMALL, num_hidden_layers=2, **changes)
    model = AutoModelForCausalLM.from_config(config)
    families.sharpen(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    held = load_file(file)
    noise = torch.Generator().manual_seed(9)
    shapes = {of: (48, 96) if of == "eh_proj" else (48,) for of in beside.values()}
    want = {name: torch.randn(shapes[of], generator=noise) for name, of in beside.items()}
    last = {name: t for name, t in held.items() if name.startswith("model.layers.1.")}
    copied = {name.replace("model.layers.1.", block): t.flip(0) for name, t in last.items()}
    if has_head:
        save_file(
            held | copied | {f"{name}.weight": t.contiguous() for name, t in want.items()}, file, {"format": "pt"}
        )
    found = {f"layers.0.{beside[name]}.weight": t for name, t in want.items()}
    query = next(name for name in last if name.endswith("self_attn.q_proj.weight"))
    return {**found, "layers.0.mtp_block.self_attn.q_proj.weight": last[query].flip(0)}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layers_of_a_checkpoint_are_those_in_its_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = saved(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind == "glm4_moe":  # transformers knows its layers by the numbers that the published sizes have
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])
    head = mtp_of(wrap_lm(model))
    held = dict(head.model.mtp.named_parameters())
    for name, t in want.items():
        assert torch.equal(held[name], t), name
    assert head.shapes[0].k_dim == 16
    assert head.n_layers == 1


def test_layers_that_were_left_out_are_refused_by_name(tmp_path: Path) -> None:
    saved("mellum", tmp_path, has_head=False)
    lm = wrap_lm(AutoModelForCausalLM.from_pretrained(tmp_path), id="tiny")
    with pytest.raises(BadModel, match="MTP layers of tiny cannot be used") as found:
        mtp_of(lm)
    assert any("may lack them" in line for line in found.value.lines)


@pytest.mark.parametrize("kind", ["mellum", "qwen3_5_text"])
def test_a_checkpoint_with_layers_drafts_by_them(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    lm = wrap_lm(AutoModelForCausalLM.from_pretrained(tmp_path))
    install_kernels(lm)
    want, _ = written(lm, Off())
    drafter = MtpDraft(adaptive=False, copies=False, branches=1).drafter(pair=ModelPair(lm, lm))
    ids, steps = written(lm, drafter)
    assert ids == want
    assert not drafter.report().fault
    assert sum(step.n_drafted for step in steps) > 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "lfm2"])
def test_with_recurrent_layers_a_head_drafts_after_its_first_recorded_step(name: str) -> None:
    """What led to the prompt's last token is not made again there: a first step says it."""
    lm = make.model(name, id=name)
    want, _ = written(lm, Off())
    drafter = drafters.Headed(want, depth=5, branches=1)
    ids, steps = written(lm, drafter)
    assert ids == want
    assert not drafter.report().fault
    assert steps[0].n_drafted == 0
    assert sum(step.n_accepted for step in steps) > 10


def test_what_a_head_stores_is_foretold() -> None:
    lm = loaded()
    head = MtpHead(lm, drafters.head_of(lm))
    head._kv.append(0, *(torch.zeros(shape.n_kv_heads, 300, shape.k_dim) for shape in [lm.shapes[0]] * 2), 0)
    shape = shape_of(lm.model.config.to_dict())
    held = weights.of_shape(shape, 4)
    subject = PlannedModel("tiny", shape, held, "float32", CheckpointFormat(), True, False, 1 << 20)
    with_it, without = (
        plan(
            subject,
            Profile.load("exact").replace(spec={"method": method}),
            AvailableMemory("cpu", 8 << 30),
            300,
            MeasuredFacts(),
        )
        for method in ("mtp", "ngram")
    )
    stored = sum(use.nbytes for use in head.usage())
    of_a_tree = ROOM * stored // (2 * Dense.STEP)  # 300 tokens take two steps
    assert with_it.need.draft - without.need.draft == stored + of_a_tree


def test_layers_that_find_no_room_are_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("kvcli.engine.drafting.mtp.MtpModel.from_pretrained", full)
    with pytest.raises(CacheFull, match="not enough memory for the MTP layers"):
        mtp_of(loaded())
