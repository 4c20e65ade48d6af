"""Layers on two devices: where each part goes, that a pass crosses once, and that nothing else sees the difference.

There is no second device here. Placement is tried on "meta"; whether every tensor is where it is wanted, with fake
tensors, which know their device and refuse to meet others; and tokens with a split whose two sides are both the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcli import assemble
from kvcli.engine.engine import generate_together, iterate_events, run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.device_split import DeviceTransfer, split_layers_
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig, BadModel, UsageError
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.settings.profile import Profile
from tests import families, make
from tests.exact.table import SAMPLERS

CPU, CARD = torch.device("cpu"), torch.device("meta")


def crossing(lm: LM) -> DeviceTransfer:
    return vars(list(lm.layers)[-1])["forward"].crossing


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_last_layers_and_the_head_go_to_the_device_and_nothing_else(family):
    model = families.build(family)
    layers = model.model.layers

    places = split_layers_(model, layers, 2, CARD)

    first = len(layers) - 2
    assert [place.type for place in places] == ["cpu"] * first + ["meta"] * 2
    for layer, place in zip(layers, places, strict=True):
        assert {t.device for t in (*layer.parameters(), *layer.buffers())} == {place}
    assert model.get_input_embeddings().weight.device == CPU
    assert {t.device.type for t in model.model.rotary_emb.buffers()} == {"cpu"}
    assert {model.get_output_embeddings().weight.device.type, model.model.norm.weight.device.type} == {"meta"}


def test_a_tied_head_gets_a_weight_of_its_own():
    model = families.build("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    split_layers_(model, model.model.layers, 99, CARD)
    assert (model.model.embed_tokens.weight.device, model.lm_head.weight.device.type) == (CPU, "meta")


@pytest.mark.parametrize("on_card", [1, 2])
def test_every_tensor_of_a_pass_is_where_it_is_wanted(on_card):
    """Fake tensors of two devices: a pass over a chunk, one with a tree, what they store, in layers of both sides, and
    one of two texts side by side."""
    lm = make.model("llama", torch.float64)  # which no native kernel serves, that would ask for addresses
    first = lm.n_layers - on_card
    twin = families.build("llama", torch.float64)
    split_layers_(twin, twin.model.layers, on_card, CARD)
    moved = {name for name, t in (*twin.named_parameters(), *twin.named_buffers()) if t.is_meta}
    places = [CPU] * first + [CARD] * on_card
    split_layers_(lm.model, list(lm.layers), on_card, CPU)
    crossing(lm).device = CARD
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, t in (*lm.model.named_parameters(), *lm.model.named_buffers()):
            parent, _, last = name.rpartition(".")
            part, fake = lm.model.get_submodule(parent), torch.empty_like(t, device=CARD if name in moved else CPU)
            held = part._parameters if last in part._parameters else part._buffers
            held[last] = torch.nn.Parameter(fake, requires_grad=False) if held is part._parameters else fake
        shape = SimpleNamespace(
            heads=lm.heads, attention_params=lm.attention_params, recurrent_layers=lm.recurrent_layers, latents={}
        )
        vars(shape).update(
            stored=lm.shapes,
            attention_sink_logits=lm.sinks,
            attentions=[layer.self_attn for layer in lm.layers],
            layers=lm.layers,
        )
        split = LM(lm.model, shape, lm.info, lambda lm: None, places)
        kv = make.dense(split, torch.float64, windows=make.windows(split))
        assert (split.entry, split.device) == (CPU, CARD)

        chunk = Rows.chain([*range(13)], 0)
        (made,) = run([ForwardRequest(split, chunk, kv, want=[12])])
        commit(kv, chunk, made, range(13))
        tree = Rows.build(5, 13, Draft([1, 2, 3], [-1, -1, 0]))
        (more,) = run([ForwardRequest(split, tree, kv, want=range(4))])
        commit(kv, tree, more, [0, 1])
        other = make.dense(split, torch.float64, windows=make.windows(split))
        both = run(
            [
                ForwardRequest(split, tree, kv, want=range(4)),
                ForwardRequest(split, Rows.chain([7, 8], 0), other, want=[1]),
            ]
        )

        assert [made.logits.device for made in both] == [CARD, CARD]
        assert {more.logits.device, made.logits.device} == {CARD}
        assert [held.k.device for held in kv._slabs.values()] == places
        assert {(use.layer < first, use.tier) for use in kv.usage()} == {(True, "cpu"), (False, "meta")}
        assert crossing(split).count == 3


@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_split_changes_no_token_and_is_crossed_once_a_pass(sampler, drafts):
    def written(lm: LM) -> tuple[list[int], int]:
        drafter, passes = Ngram(adaptive=False).drafter() if drafts else Off(), 0
        session = make.session(lm, drafter=drafter, sampler=SAMPLERS[sampler], chunk=13)
        run_to_end(session.read(families.prompt(60)))
        for _ in iterate_events(session.stream(40)):
            passes += 1
        return session.ids, passes

    whole, split = (make.model("llama", layers_on_gpu=n, verify=True) for n in (None, 2))
    assert (split.info.layers, split.is_split, whole.is_split) == (3, True, False)
    assert "2 of 3 layers on cpu" in split.info.backend
    before = crossing(split).count

    ids, passes = written(split)

    assert ids == written(whole)[0]
    assert crossing(split).count - before == passes + -(-59 // 13)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_texts_over_a_split_and_layers_with_windows(family):
    """Side by side in one pass, drafted and not, their prompts read in turn with the other's answer; each as alone."""

    def session(lm: LM, which: int) -> GenerationSession:
        kv = make.dense(lm, windows=make.windows(lm))
        return make.session(lm, kv, Ngram(adaptive=False).drafter() if which else Off(), SAMPLERS["sampled"], chunk=13)

    def answered(text: GenerationSession, which: int):
        yield from text.read(families.prompt(60, seed=which))
        yield from text.stream(30)

    whole, split = (make.model(family, torch.float64, layers_on_gpu=n) for n in (None, 2))
    assert (family == "gemma3") == any(sight.window for sight in split.attention_params)
    texts = [session(split, which) for which in (0, 1)]
    before = crossing(split).count
    tickets = generate_together(*(answered(text, which) for which, text in enumerate(texts)))
    assert [ticket.error for ticket in tickets] == [None, None]
    assert crossing(split).count - before < 2 * (30 + -(-59 // 13)), "a pass of both crosses once"
    for which, text in enumerate(texts):
        alone = session(whole, which)
        for _ in iterate_events(answered(alone, which)):
            pass
        assert text.ids == alone.ids


def test_what_chooses_from_a_kv_cache_is_refused_where_layers_lie_apart(monkeypatch):
    lm = make.model("llama", layers_on_gpu=2)
    assemble.store(lm, Profile.load("balanced"))  # all on one device after all
    lm.shapes = (*(assemble.replace(of, device=CPU) for of in lm.shapes[:1]), *lm.shapes[1:])
    assemble.store(lm, Profile.load("ngram"))
    for name in ("balanced", "streaming", "fafo", "lazy"):
        with pytest.raises(BadConfig) as found:
            assemble.store(lm, Profile.load(name))
        assert found.value.code == "split_past"


def test_rows_of_a_split_model_are_not_stopped_on_the_way():
    lm = make.model("llama", layers_on_gpu=2)
    with pytest.raises(BadModel, match="cannot stop tokens between its layers"):
        lm.check_layer_gates()


@pytest.mark.parametrize(("key", "value"), [("layers_on_gpu", 3), ("experts_on_gpu", 3), ("embeddings", "host")])
def test_what_only_a_gpu_does_is_refused_where_there_is_none(key, value):
    import kvcli

    with pytest.raises(UsageError, match=f"{key} = {value}, but the model runs on cpu"):
        kvcli.load("demo", "exact", set={"load.device": "cpu", f"load.{key}": value})
