"""Plans on GPUs that are described or faked: what is counted there, and what gives way where one has no room."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from kvcli.commands.common.load_model import MemoryWishes, prepare
from kvcli.commands.common.run_setup import Setup
from kvcli.engine.resources import DRAWN, captured_bytes, captured_sizes, working_bytes
from kvcli.errors import DoesNotFit, UsageError
from kvcli.fit import cuda_overhead, memory
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.memory import BASE, GIB
from kvcli.fit.plan import MeasuredFacts, PlannedModel, chosen, plan, plan_on, told
from kvcli.fit.preflight import Preflight
from kvcli.fit.report import document
from kvcli.fit.speed import split
from kvcli.fit.weights import of_shape
from kvcli.kv.slots import POSITION
from kvcli.kv.tiers.draft_buffers import ROOM
from kvcli.models import machine as this_machine
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.machine import DeviceInfo
from kvcli.models.shape import RecurrentShapes, shape_of
from kvcli.schemas.fit import CalibrationDocument
from kvcli.settings.profile import Profile
from tests.fakes import Machine
from tests.fit.test_formulas import config

MIB = 1 << 20
LLAMA_8B = shape_of(config(32, 4096, 32, 8, 128, 14336, 128256))
SMALL = shape_of(config(16, 2048, 32, 8, 64, 8192, 128256))
SUBJECT = PlannedModel("8B", LLAMA_8B, of_shape(LLAMA_8B), "bfloat16", CheckpointFormat(), True, False, 16 * GIB)
NGRAM, BALANCED = Profile.load("ngram"), Profile.load("balanced")


def room(gib, host=64, **more):
    return AvailableMemory("cuda:0", gib * GIB - cuda_overhead.CONTEXT, host=host * GIB, total=gib * GIB, **more)


def planned(profile, gib, context=32768, subject=SUBJECT, **more):
    return plan_on(subject, profile, room(gib, **more), context, MeasuredFacts())


@pytest.mark.parametrize(
    ("name", "gib"), [*product(("balanced", "lean", "max-context"), (8, 12)), ("gpu", 12)]
)  # keys and values of the last are in 16 bits
def test_an_8b_model_fits_at_32k(name, gib):
    found = planned(Profile.load(name), gib)

    assert found.fits
    assert found.need.working <= GIB // 2
    assert found.run.chunk == 1024, "by room"
    assert found.profile.load.quant == "int4"
    assert found.run.on_card in (None, 32), "all layers are on the card"
    (said,) = document(Preflight(SUBJECT, "8B", None, {}), [found], {}, {}, 32768, []).plans
    assert said.places["cuda"] == said.total == said.weights + said.kv + said.draft + said.working + said.base
    weights = said.weights + said.places.get("host", 0) - found.need.host
    assert weights == found.run.weights.memory, "every byte of them is somewhere"
    assert found.run.weights.memory == pytest.approx(0.53125 * LLAMA_8B.linear + 4 * 128256 * 4096, rel=0.001)


def test_a_split_names_the_bits_of_kv_with_which_all_layers_fit():
    found = planned(Profile.load("gpu"), 8)
    assert found.run.on_card < 32
    bits = int(found.whole_with[-1])
    assert found.whole_with == f"--set exactness=approx --set kv.k_bits={bits} --set kv.v_bits={bits}"
    assert found.whole_with in told(found)[-1]
    whole = planned(Profile.load("gpu").replace(exactness="approx", kv={"k_bits": bits, "v_bits": bits}), 8)
    assert whole.fits
    assert whole.run.on_card in (None, 32)
    assert planned(Profile.load("gpu"), 12).whole_with == ""
    assert planned(NGRAM, 3).whole_with == "", "no bits of the KV cache make room for the weights"


def test_scores_are_kept_where_no_fused_kernel_serves():
    why = "fused kernels need compute capability 8.0, this card has 7.5"
    long = BALANCED.replace(prefill={"chunk": 2048})
    old, new = (planned(long, 24, unserved=said).need.working for said in (why, ""))
    assert old > 3 * GIB > 0.6 * GIB > new
    assert planned(BALANCED, 24, unserved=why).run.chunk == 512, "where that leaves room for little else"
    wide = planned(long.replace(load={"dtype": "fp32"}), 80).need.working
    assert wide > 3 * GIB, "which is held to in full"


def test_of_a_card_three_in_a_hundred_are_never_planned_with():
    assert room(8).kept_free == int(0.03 * 8 * GIB)
    assert room(8).usable == room(8).available - room(8).kept_free
    assert replace(room(8), available=MIB).usable == 0, "others took the rest"


def test_libraries_take_what_their_builds_ask_for_and_a_described_card_the_most():
    ampere, large, hopper, blackwell = (
        cuda_overhead.libraries(*of)
        for of in (((8, 6), 12 * GIB), ((8, 6), 24 * GIB), ((9, 0), 80 * GIB), ((12, 0), 8 * GIB))
    )
    assert ampere < large < blackwell < hopper
    assert cuda_overhead.libraries(None, 8 * GIB) == blackwell


def test_a_draw_on_the_card_has_no_logits_in_float32():
    sizes = {"chunk": 1, "rows": 17, "slots": 512, "number": 2, "kv_number": 2, "device": "cuda", "is_fused": True}
    less, more = (working_bytes(LLAMA_8B, **sizes, draws=draws) for draws in (True, False))
    assert more - less == 32 * 128256 * (4 + DRAWN - 2), "17 rows are a pass of 32"
    greedy = NGRAM.replace(sample={"temperature": 0.0})
    assert [planned(profile, 12).run.draws for profile in (greedy, NGRAM)] == [True, False]


def test_captured_passes_keep_what_they_compute_with_while_a_prompt_is_read():
    quiet = NGRAM.replace(load={"graphs": "off"})
    kept = planned(NGRAM, 24).need.base - planned(quiet, 24).need.base
    one = partial(captured_bytes, LLAMA_8B, slots=32768, number=2, kv_number=2, draws=False)
    assert one((1, 8, 16, 8, 16)) + cuda_overhead.captured(32, 5) == kept, "of 1 row, and chains and trees of 8 and 16"
    assert 3 * MIB < one([1]) < kept < 800 * MIB
    assert captured_sizes(64) == captured_sizes(65), "wider ones are not captured"
    assert planned(NGRAM, 24, unserved="no Triton").need.base == planned(quiet, 24).need.base
    away = NGRAM.replace(memory={"host": "4GiB"})
    assert planned(away, 24).need.base == planned(quiet, 24).need.base, "nor where slots lie in two places"
    more = planned(NGRAM, 24).need.kv - planned(quiet, 24).need.kv
    assert more == 256 * 32 * (LLAMA_8B.kv_per_token // 32 * 2 + POSITION), "a step of a layer, for a pass's rows"


def test_draft_models_keep_captured_passes_and_buffers_of_draft_tokens():
    of = memory.sizes(LLAMA_8B, 2, 2, "cuda")
    buffers = ROOM * LLAMA_8B.kv_per_token * 2
    drafts = Profile.load("draft").spec.draft_footprint(4096, of)
    assert (drafts.beside, drafts.captured) == (buffers, (1, 8, 1, 8, 64)), "catching up, drafting, and a trial"
    alone = NGRAM.replace(spec={"method": "self", "max": NGRAM.spec.max})
    more = planned(alone, 24).need
    passes = captured_bytes(LLAMA_8B, [1], slots=32768, number=2, kv_number=2, draws=False)
    assert more.base - planned(NGRAM, 24).need.base == passes + cuda_overhead.captured(32, 1)
    assert more.draft >= buffers

    drafter = PlannedModel("1B", SMALL, of_shape(SMALL), "bfloat16", CheckpointFormat(), True, False, 2 * GIB)
    facts = MeasuredFacts(find=lambda name: drafter)
    draft = Profile.load("draft").replace(spec={"model": "1B"})
    each = [draft, draft.replace(load={"graphs": "off"})]
    kept, none = (plan_on(SUBJECT, profile, room(24), 4096, facts).need.draft for profile in each)
    slots = plan_on(SUBJECT, draft, room(24), 4096, facts).run.profile.spec.draft_footprint(4096, of).slots
    work = captured_bytes(SMALL, drafts.captured, slots=slots, number=2, kv_number=2, draws=True)
    assert kept - none == work + cuda_overhead.captured(16, 5)


@pytest.mark.parametrize(("gib", "chunk"), [(8, 1024), (80, 2048)])
def test_a_chunk_is_as_long_as_there_is_room_for_unless_somebody_says(gib, chunk):
    assert planned(NGRAM, gib, 8192).run.chunk == chunk
    assert planned(NGRAM.replace(prefill={"chunk": 2048}), gib, 8192).run.chunk == 2048


# ---- what gives way ----


def test_nothing_gives_way_where_there_is_room():
    found = planned(NGRAM, 24)
    assert (chosen(found), found.profile, found.run.on_card) == ({}, NGRAM, None)


def test_weights_come_in_four_bits_where_nobody_says_how_many():
    assert chosen(planned(NGRAM, 12)) == {"load.quant": "int4", "prefill.chunk": 1024}
    said = planned(NGRAM.replace(load={"quant": "none"}), 12)
    assert (said.fits, "load.quant" in chosen(said)) == (True, False)
    assert 0 < said.run.on_card < 32, "the CPU runs some"
    eight = planned(NGRAM.replace(load={"quant": "int8"}), 8, 8192)
    assert (eight.profile.load.quant, eight.fits) == ("int8", True)


def test_as_many_layers_as_fit_are_on_the_card():
    whole = NGRAM.replace(load={"quant": "none"})
    found = planned(whole, 8)
    n = found.run.on_card

    assert (found.fits, 0 < n < 32) == (True, True)
    one_more = plan(SUBJECT, whole.replace(load={"layers_on_gpu": n + 1}), room(8), 32768, MeasuredFacts())
    assert not one_more.fits
    assert found.need.weights + found.need.host_weights == found.run.weights.memory
    assert found.need.host == pytest.approx((32 - n) / 32 * 32768 * LLAMA_8B.kv_per_token * 2, rel=0.01)
    assert not planned(whole, 8, host=4).fits, "the host has no room for the others"


def test_a_tied_head_is_there_twice_where_layers_are_split():
    tied = replace(LLAMA_8B, is_tied=True)
    found = planned(NGRAM.replace(load={"quant": "none"}), 8, subject=replace(SUBJECT, shape=tied, held=of_shape(tied)))
    assert found.need.weights + found.need.host_weights == found.run.weights.memory + found.run.weights.embeddings


def test_what_reads_parts_of_a_kv_cache_keeps_its_layers_together():
    """So an 8B model in full precision is refused, and not split, under a profile that packs keys and values."""
    assert not planned(BALANCED.replace(load={"quant": "none"}), 8).fits
    quantized = replace(SUBJECT, packing=CheckpointFormat("awq"))
    assert not planned(NGRAM, 8, subject=quantized).fits
    with pytest.raises(UsageError) as found:
        planned(NGRAM.replace(load={"layers_on_gpu": 3}), 8, subject=quantized)
    assert found.value.code == "no_split"
    with pytest.raises(UsageError, match="runs on cpu"):
        plan(SUBJECT, NGRAM.replace(load={"layers_on_gpu": 3}), AvailableMemory("cpu", 64 * GIB), 4096, MeasuredFacts())


def test_a_model_that_keeps_states_is_not_split_nor_recorded():
    """Loading refuses the one and does without the other."""
    hybrid = replace(SUBJECT, shape=replace(LLAMA_8B, folds=RecurrentShapes(24, 1024, 65536, 8192)))
    assert planned(NGRAM, 4, subject=SUBJECT).run.on_card is not None
    found = planned(NGRAM, 4, subject=hybrid)
    assert (found.fits, found.run.on_card) == (False, None)
    assert [planned(NGRAM, 24, subject=of).run.records for of in (SUBJECT, hybrid)] == [True, False]


def test_layers_on_the_cpu_cost_the_bytes_that_it_reads():
    found = planned(NGRAM.replace(load={"quant": "none"}), 8)
    below = 32 - found.run.on_card
    measured = CalibrationDocument.model_construct(bandwidth=80e9)
    guessed, known = split(found, None), split(found, measured)
    assert guessed.read == pytest.approx(below * LLAMA_8B.linear / 32 * 2 + found.need.host, rel=0.01)
    assert (guessed.basis, known.basis) == ("assumed", "machine")
    assert known.seconds == known.read / 80e9 == guessed.seconds / 2
    assert split(planned(NGRAM, 24), None) is None


def test_a_narrower_window_comes_before_fewer_bits(tmp_path):
    looked = Preflight(SUBJECT, "8B", tmp_path, {"cpu": AvailableMemory("cpu", 64 * GIB), "cuda:0": room(20)})
    found, note = looked.fitted(NGRAM, dict)
    assert (found.fits, chosen(found).get("load.quant")) == (True, None)
    assert f"context {found.need.context:,} of 131,072 tokens" in note
    looked.found = {"cpu": AvailableMemory("cpu", 64 * GIB), "cuda:0": room(12)}
    found, note = looked.fitted(NGRAM, dict)
    assert (found.fits, found.profile.load.quant) == (True, "int4")
    looked.found = {"cpu": AvailableMemory("cpu", GIB), "cuda:0": room(2, host=1)}
    with pytest.raises(DoesNotFit):
        looked.fitted(NGRAM, dict)


# ---- commands, on a card that this machine seems to have ----


@pytest.fixture
def typed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "here", lambda: BASE)
    found = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", found.load)

    def with_card(mib, unserved=""):
        cards = [
            DeviceInfo("cpu", "a CPU", 64 * GIB, 64 * GIB),
            DeviceInfo("cuda:0", "a card", GIB, mib * MIB, (8, 6), unserved),
        ]
        monkeypatch.setattr(this_machine, "devices", lambda: iter(cards))
        return found

    return with_card


def test_a_chat_takes_what_fits_and_says_what_undoes_it(typed):
    machine = typed(72)
    done = machine("chat", "demo", "--prompt", "hello", "--device", "cuda")
    assert done.exit == 0
    assert "weights in int4: in full precision they do not fit on cuda:0 (--quant none" in " ".join(done.err.split())


@pytest.mark.parametrize("asked", [{"flags": {"load.quant": ("none", "--quant")}}, {"exact": True}])
def test_who_insists_on_full_precision_has_the_cpu_run_layers(typed, asked):
    world = typed(72).world()
    setup = Setup(world, "demo", **{"flags": {}, **asked})
    ready = prepare(setup, setup.profile, MemoryWishes(), print)
    assert ready.profile.load.quant == "none"
    assert isinstance(ready.profile.load.layers_on_gpu, int)
    assert any("run on the CPU" in note for note in ready.notes)


def test_what_was_chosen_holds_for_profiles_on_the_way(typed):
    setup = Setup(typed(72).world(), "demo")
    ready = prepare(setup, setup.profile, MemoryWishes(), print)
    later = ready.resolve("exact", [])
    assert (later.load.quant, later.origins["load.quant"]) == ("int4", "what fits")
    assert ready.resolve("cpu", []).load.quant == "int8", "which says so itself"


@pytest.mark.parametrize(
    ("context", "is_tied", "want"),
    [
        (7_500, False, {}),
        (15_000, False, {"load.embeddings": "host"}),
        (19_000, False, {"load.embeddings": "host", "load.head": "int8"}),
        (19_000, True, {"load.embeddings": "host", "load.head": "int8"}),
    ],
)
def test_on_a_card_of_8_gb_the_embeddings_leave_and_then_the_output_layer_has_8_bits(context, is_tied, want):
    subject = SUBJECT
    if is_tied:
        shape = replace(LLAMA_8B, is_tied=True)
        subject = replace(SUBJECT, shape=shape, held=of_shape(shape))
    found = planned(NGRAM, 8, context, subject)
    assert found.fits
    assert found.run.on_card is None
    ends = {key: value for key, value in chosen(found).items() if key in ("load.embeddings", "load.head")}
    assert ends == want
    table = 2 * 128256 * 4096
    assert found.need.host_weights == table * bool(want)
    assert found.run.weights.read == pytest.approx(
        0.53125 * LLAMA_8B.linear + table / (1 + ("load.head" in want)), rel=1e-3
    )


def test_experts_go_to_host_memory_before_layers_go_to_the_cpu():
    """A model of 30 billion weights, of which a token reads three, on 12 GB."""
    about = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shape = shape_of(config(48, 2048, 32, 4, 128, 6144, 151936, **about))
    subject = replace(SUBJECT, shape=shape, held=of_shape(shape))
    found = planned(NGRAM, 12, 16_384, subject)
    assert found.fits
    n = chosen(found)["load.experts_on_gpu"]
    assert 10 < n < 40
    assert found.run.far_experts == sum(found.run.weights.experts[: 48 - n])
    assert found.run.on_card is None
    more = planned(NGRAM.replace(load={"quant": "int4", "experts_on_gpu": n + 1}), 12, 16_384, subject)
    assert not more.fits, "it is the most that fits, and layers stay where the user's experts are"
    assert found.run.weights.memory == found.need.weights + found.need.host_weights


def test_fit_says_what_gave_way_and_what_it_costs(typed):
    machine = typed(1)
    folder = machine.folder / "model"
    folder.mkdir()
    stated = config(32, 4096, 32, 8, 128, 14336, 128256, model_type="llama", dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(stated | {"architectures": ["LlamaForCausalLM"]}))
    args = ("fit", str(folder), "--vram", "8GiB", "--ram", "64GiB", "--ctx", "32k")
    said = " ".join(machine(*args, "--profiles", "balanced,lean").out.split())
    assert "all: weights quantized to int4" in said
    assert "balanced at 32,768: 1.0 GiB of embeddings are in host memory" in said
    said = " ".join(machine(*args, "-P", "exact", "--quant", "none").out.split())
    assert "11 of 32 layers on cuda:0, the first 21 on the CPU" in said
    assert "more per token at 37.3 GiB/s (assumed)" in said


@pytest.mark.parametrize(("why", "is_torch"), [
    ("", False),
    ("fused kernels need compute capability 8.0, this card has 7.5", False),
    ("triton is not installed", True),
])  # fmt: skip
def test_doctor_says_of_each_card_what_serves_it(typed, monkeypatch, why, is_torch):
    monkeypatch.setattr("kvcli.kernels.dispatch.explain", lambda *_: [])
    monkeypatch.setattr("kvcli.kernels.linear_skinny.tinygemm.serves", lambda *_: is_torch)
    done = typed(500, why)("doctor")
    assert ("fused         Triton: compute capability 8.6" in done.out) == (not why)
    assert why in done.out
    assert ("bitsandbytes int8" in done.out) == bool(why)
    assert ("torch int4 (in bf16)" in done.out) == is_torch


def test_intels_gpus_are_refused_with_what_serves_them(typed):
    done = typed(500)("fit", "demo", "--device", "xpu:0")
    assert done.exit == 2
    assert "[no_such_device]" in done.err
    assert "vLLM-XPU" in done.err


def test_a_run_is_noted_with_what_its_card_lacks(tmp_path):
    from kvcli.engine.stats import Stats
    from kvcli.fit.preflight import _taken

    assert _taken(Stats(peak=5, available=90)) == 5
    assert _taken(Stats(peak=5, available=90, used=40, total=100)) == 30
    assert _taken(Stats(peak=50, available=90, used=40, total=100)) == 50
