"""Weights that a GPU reads in host memory, and an output layer in 8 bits. The device is a simulated one, on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.fused_experts import serve_experts_
from kvcli.engine.loading import weight_quantization
from kvcli.engine.loading.host_weights import in_host_memory, move_experts_
from kvcli.errors import BadModel
from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import PackedLinear, quantize_experts_
from kvcli.kv.offload.transfer import DeviceLink
from tests import families, make
from tests.fake_bus import FakeBus

CPU = torch.device("cpu")


def test_numbers_lie_in_pinned_memory_and_are_unpinned_with_their_last_reference():
    bus, t = FakeBus(), torch.randn(300, 7).to(torch.bfloat16)
    there = in_host_memory(t, bus)
    assert torch.equal(there, t)
    assert [*bus.pinned] == [there.data_ptr()]
    view = there[3:5]
    del there
    assert not bus.over
    del view
    assert len(bus.over) == 1
    with pytest.raises(BadModel, match="cpu reads its own memory alone") as error:
        in_host_memory(t, DeviceLink(CPU))
    assert error.value.code == "not_pinned"


@pytest.mark.parametrize(("family", "is_tied"), [("llama", False), ("gemma3", True)])
def test_embeddings_in_host_memory_change_no_token(monkeypatch, family, is_tied):
    bus, made = FakeBus(), families.build(family, torch.float32, tie_word_embeddings=is_tied)
    table = made.get_input_embeddings().weight.detach().clone()
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == is_tied
    monkeypatch.setattr(weight_quantization, "bus_of", lambda device: bus)

    def written(**load):
        lm = make.model(family, torch.float32, verify=True, tie_word_embeddings=is_tied, **load)
        session = make.session(lm)
        run_to_end(session.read(families.prompt(30, vocab=lm.vocab)))
        list(iterate_events(session.stream(12)))
        return lm, session.ids

    plain, ids = written(head="int8")
    lm, moved = written(head="int8", embeddings="host")
    assert moved == ids
    assert lm.info.backend.endswith(", output layer in int8, embeddings in host memory")
    assert [*bus.pinned] == [lm.model.get_input_embeddings().weight.data_ptr()]
    assert torch.equal(lm.model.get_input_embeddings().weight, table), "a tied one as well"
    assert (plain.vocab, lm.vocab) == (len(table),) * 2
    assert isinstance(lm.model.get_output_embeddings(), PackedLinear)


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_experts_in_host_memory_are_those_that_they_were(monkeypatch, quant):
    """Of the first layers; the simulated device has the kernels of a GPU, interpreted."""
    pytest.importorskip("tests.kernels.interpreted")
    bus, sizes = FakeBus(), {"hidden_size": 64, "moe_intermediate_size": 32}
    models = [families.build("qwen3_moe", torch.bfloat16, **sizes) for _ in range(2)]
    for model, far in zip(models, (2, 0), strict=True):
        move_experts_(model.model.layers[:far], quant, bus)
        if quant != "none":
            quantize_experts_(model, 4, device=CPU)
    assert len(bus.pinned) == 2 * 2, "two tensors of two layers"
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    x, sent, weights = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.rand(3, 2)
    for model in models:
        assert serve_experts_(model) == 3
    for one, other in zip(*(model.model.layers for model in models), strict=True):
        found, want = (layer.mlp.experts(x, sent, weights) for layer in (one, other))
        assert torch.equal(found, want)


def test_an_output_layer_is_quantized_by_parts_as_in_one_piece(monkeypatch):
    monkeypatch.setattr(weight_quantization, "ROWS", 16)
    made = families.build("llama", torch.float32)
    whole = PackedLinear.of(made.get_output_embeddings(), 8)
    lm = make.model("llama", torch.float32, head="int8")
    packed = lm.model.get_output_embeddings()
    assert torch.equal(packed.data, whole.data)
    assert torch.equal(packed.scale, whole.scale)


def test_a_table_that_the_output_layer_reads_in_full_stays():
    with pytest.raises(BadModel, match="reads the same table in full") as error:
        make.model("llama", embeddings="host", tie_word_embeddings=True)
    assert list(error.value.try_) == ["--set load.head=int8"]
