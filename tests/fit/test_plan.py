"""Plans of the demo model and of a described machine; predictions against real stores and weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcli import load
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.mla import LatentProjection
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.resources import DRAWN, working_bytes
from kvcli.errors import BadInput, DoesNotFit, UsageError
from kvcli.fit.advice import binding, changes
from kvcli.fit.available_memory import AvailableMemory, choose, container_room, rooms, size
from kvcli.fit.explain import alike
from kvcli.fit.memory import AGAIN, GIB, LINEAR, PRODUCT, WIDTHS, largest, need
from kvcli.fit.plan import MeasuredFacts, PlannedModel, plan, subject_of
from kvcli.fit.preflight import Preflight
from kvcli.fit.run_log import Beyond
from kvcli.fit.speed import at, by_rows, speed
from kvcli.fit.weights import of_files, of_shape, panels, weigh
from kvcli.kernels.attention_mass.reference import SCORES
from kvcli.kernels.quantize_kv import LANES, pack_keys, pack_values
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.capacity import EVERY
from kvcli.kv.footprint import NO_SIZES, STEP
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import POSITION, AttentionParams, LayerShape, nbytes, windows_of
from kvcli.kv.tiers.dense import Dense
from kvcli.models import machine, source
from kvcli.models.checkpoint import CheckpointFormat, TensorHeader, WeightFile
from kvcli.models.shape import shape_of
from kvcli.policies.scoring.topk import SCORE
from kvcli.schemas.fit import CalibrationDocument, ModelTimes, PassTime
from kvcli.settings.profile import Profile
from kvcli.settings.schema import size_of
from tests import families, hybrids, make

MIB = 1 << 20
PROFILES = {name: Profile.load(name) for name in ("exact", "ngram", "streaming")}


@pytest.fixture(scope="module")
def demo():
    return subject_of(source.find("demo"))


def planned(subject, profile="exact", context=4096, available=64 * GIB, **facts):
    chosen = profile if isinstance(profile, Profile) else PROFILES[profile]
    return plan(subject, chosen, AvailableMemory("cpu", available), context, MeasuredFacts(**facts))


@pytest.mark.parametrize("profile", PROFILES)
def test_keys_and_values_are_what_the_kv_cache_allocates(demo, profile):
    with load("demo", profile, set={"load.device": "cpu", "load.verify": False, "prefill.chunk": 256}) as model:
        ids = torch.arange(700).remainder(model.lm.vocab).tolist()
        most = 0
        for _ in iterate_events(model.text_session.session.read(ids)):
            most = max(most, nbytes(model.text_session.session.cache)["cpu"])
        found = planned(demo, model.profile, 700)
        if profile != "streaming":  # which settles before anybody can look
            assert found.need.kv == most
        assert found.need.kv >= most


def test_sliding_layers_are_planned_with_what_they_keep(demo):
    shape = demo.shape
    sliding = replace(shape, windows=(300, None) * (shape.layers // 2) + (None,) * (shape.layers % 2))
    profile = PROFILES["exact"].replace(prefill={"chunk": 256}, sample={"max_new_tokens": 320})
    shapes = [LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers
    kv = Dense(
        shapes, torch.bfloat16, windows=windows_of(shapes, [AttentionParams(1.0, window=w) for w in sliding.windows])
    )
    most, prompt, n = 0, 5000, 5320
    for start in (*range(0, prompt, 256), *range(prompt, n, 64)):
        count = min(256, prompt - start) if start < prompt else 64
        for layer in range(shape.layers):
            kv.append(layer, *torch.zeros(2, shape.kv_heads, count, shape.head_dim).bfloat16(), start)
        most = max(most, nbytes(kv)["cpu"])
        kv.compress((), min(start + count, prompt))  # an answer is kept as a whole
    found = planned(replace(demo, shape=sliding), profile, n).need.kv
    assert most <= found <= 1.05 * most
    assert found < 0.65 * planned(demo, profile, n).need.kv


HALVES = {"kv.k_bits": 8, "kv.v_bits": 8, "kv.split_codes": True}
FEWER = [{"kv_format.method": method} for method in ("mustafar", "freqkv", "subgen")]  # numbers, of 16 bits
FEWER += [{"kv_format.method": "cskv", "kv.group": 256}]


@pytest.mark.parametrize(
    "packs",
    [*({"kv.k_bits": k, "kv.v_bits": v} for k, v in ((8, 8), (4, 4), (4, 2), (16, 8))), HALVES, *FEWER],
    ids=lambda packs: " ".join(map(str, packs.values())),
)
def test_quantized_keys_and_values_are_planned_as_they_lie(demo, packs):
    kv = packs | {"exactness": "approx"}
    with load("demo", "exact", set={"load.device": "cpu", "load.verify": False, "prefill.chunk": 16, **kv}) as model:
        ids = torch.arange(1400).remainder(model.lm.vocab).tolist()
        most = max(
            sum(nbytes(model.text_session.session.cache).values())
            for _ in iterate_events(model.text_session.session.read(ids))
        )
        found = planned(demo, model.profile, 1400).need.kv
        number = model.lm.dtype.itemsize
        unpacked = sum(shape.slot_bytes(number) for shape in model.lm.shapes)
    # at most one chunk, one group and one step of growth are in full precision, unseen after a compression point
    assert most <= found <= most + (EVERY + model.profile.kv.group + STEP) * unpacked


@pytest.mark.parametrize("budget", ["25%", "1MiB", "64MiB", "fit"])
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_budget_is_planned_with_what_a_pass_adds(demo, budget, chunk, monkeypatch):
    settle, held = TieredCache.compress, []
    monkeypatch.setattr(
        TieredCache, "compress", lambda kv, *of: (held.append(sum(nbytes(kv).values())), settle(kv, *of))[1]
    )
    asked = {"memory.budget": budget, "policy.score": "keydiff", "prefill.chunk": chunk}
    with load("demo", "budget", set={"load.device": "cpu", "load.verify": False, **asked}) as model:
        ids = torch.randint(model.lm.vocab, (1400,), generator=torch.Generator().manual_seed(0))
        run_to_end(model.text_session.session.read(ids.tolist()))
        remembered = sum(of.numel() for of in model.text_session.session.policy_record.state.worth.total.values()) * 8
    found = planned(demo, model.profile, 1400).need.kv
    assert max(held) + remembered <= found <= 1.1 * (max(held) + 8 * 12 * 1400) + STEP * planned(demo).per_token


@pytest.mark.parametrize(
    ("each", "shares"),
    [(20, [1, 0, 0, 0]), (16, [1, 0, 0, 0]), (8, [0.2, 0, 0.8, 0]), (6, [0, 0, 1, 0]), (3, [0, 0, 0.5, 0.5])],
)
def test_tokens_worth_alike_lie_on_two_levels_of_the_hull(each, shares):
    # the second level is never best: it costs half of what the third saves, and leaves less than half of the way
    assert alike([16.0, 11.0, 6.0, 0.0], [1.0, 0.9, 0.85, 0.0], each) == pytest.approx(shares)


def test_what_always_stays_must_fit_into_a_budget(demo):
    profile = Profile.load("budget").replace(memory={"budget": "0.1MiB"})
    found = planned(demo, profile, 1400)
    assert not found.fits
    assert found.need.over == 64 * (6 * (2 * 2 * 64 * 2 + 4)) - size_of("0.1MiB")
    share = profile.replace(memory={"budget": "25%"})  # of which the prompt is there whole while it is read
    room = (planned(demo, share, 8000).least - 8 * MIB) * 10 // 9  # of which a tenth is kept free
    assert planned(demo, profile.replace(memory={"budget": "fit"}), 8000, room).fits
    assert not planned(demo, share, 8000, room).fits


def test_what_is_free_is_divided_before_what_each_text_takes_of_it(demo):
    one, two = (
        planned(demo, Profile.load("budget").replace(memory={"budget": "fit", "sequences": n}), 4000, 2 * GIB).need
        for n in (1, 2)
    )
    assert one.budget - 2 * two.budget > one.working == two.working > 0  # and the keys and values of a pass


@pytest.mark.parametrize("profile", ["streaming", "lean"])
def test_a_kv_cache_that_drafts_is_planned_beside_the_full_one(demo, profile):
    checked = {"exactness": "exact", "spec.method": "self", "spec.copies": False, "prefill.chunk": 64}
    with load("demo", profile, set={"load.device": "cpu", "load.verify": False, **checked}) as model:
        run_to_end(model.text_session.session.read(torch.arange(1400).remainder(model.lm.vocab).tolist()))
        held = nbytes(model.text_session.session.cache)
        found = planned(demo, model.profile, 1400).need
    assert held["cpu"] <= found.kv <= 1.2 * held["cpu"]
    assert held["draft"] <= found.draft <= 1.5 * held["draft"] + (1 << 20)
    assert found.mapped == planned(demo, "exact", 1400).need.mapped, "what drafts is not loaded"


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_weights_are_what_loading_leaves(demo, quant):
    with load(
        "demo", "exact", set={"load.quant": quant, "load.device": "cpu", "load.verify": False, "exactness": "approx"}
    ) as model:
        # layers with a layout of their own hold their weights where no other code sees them
        own = [m.blocked for m in model.lm.model.modules() if hasattr(m, "blocked")]
        plain = (*model.lm.model.parameters(), *model.lm.model.buffers(), *(t for t in own if not t.is_mkldnn))
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())
        held += sum(t.numel() * t.element_size() for t in own if t.is_mkldnn)
        found = planned(demo, model.profile)
    assert found.need.weights == pytest.approx(held, rel=0.02)


def test_the_largest_context_fits_and_one_token_more_does_not(demo):
    whole = planned(demo, context=8192)
    run = replace(whole.run, room=AvailableMemory("cpu", (whole.need.running - 5 * MIB) * 10 // 9))
    most = largest(run)
    assert 0 < most < 8192
    assert need(run, most).least <= run.room.usable < need(run, most + 1).least


def test_a_policy_bounds_what_is_kept_and_a_chunk_comes_on_top(demo):
    long, longer = planned(demo, "streaming", 6000), planned(demo, "streaming", 8000)
    assert long.need.kv == longer.need.kv
    assert long.need.kv < planned(demo, "exact", 6000).need.kv


def test_evictions_that_are_rare_let_more_gather_than_a_chunk(demo):
    rare = PROFILES["streaming"].replace(policy={"compression_interval": 4096})
    assert planned(demo, rare, 8192).need.kv > planned(demo, "streaming", 8192).need.kv


def test_heads_of_unequal_length_and_drafts_bring_products_of_their_own(demo, monkeypatch):
    monkeypatch.setattr("kvcli.fit.plan.is_native", lambda *_: False)
    drafts, plain = planned(demo, "ngram", 8192).need.working, planned(demo, "exact", 8192).need.working
    assert drafts == plain + LINEAR * WIDTHS * PRODUCT
    uneven = PROFILES["ngram"].replace(policy={"name": "snap"}, exactness="approx")
    heads = demo.shape.layers * demo.shape.kv_heads
    judged = SCORE * SCORES  # a block of attention
    assert planned(demo, uneven, 8192).need.working == drafts + judged + 2 * AGAIN * heads * PRODUCT
    even = PROFILES["ngram"].replace(policy={"name": "snap", "alloc": "uniform"}, exactness="approx")
    assert planned(demo, even, 8192).need.working == drafts + judged
    wide = PROFILES["ngram"].replace(load={"dtype": "fp32"})  # whose products are not compiled
    assert planned(demo, wide).need.working == planned(demo, wide.replace(spec={"method": "off"})).need.working


def test_judging_by_attention_takes_memory_and_what_is_held_has_a_bound(demo):
    def working(**policy):
        return planned(demo, PROFILES["exact"].replace(policy=policy, exactness="approx"), 8192).need.working

    plain = planned(demo, "exact", 8192).need.working
    rows = [*range(4096, 8176, 255), *range(8176, 8192)]  # 16 over the second half on a CPU, and the newest 16
    few = 2 * demo.shape.heads * sum(row + 1 for row in rows)
    assert working(name="fastgen") == plain + few
    assert working(name="fastgen", paper=True) > plain + few
    assert working(name="fastgen", paper=True, max_profile_mb=4.0) == plain + (4 << 20)
    assert working(name="kvzip") == plain + SCORE * SCORES
    assert working(name="window") == plain


def ordered(subject, order, context, available=64 * GIB):
    return planned(subject, PROFILES["exact"].replace(prefill={"order": order}), context, available)


def test_reading_by_layers_holds_one_layer_of_a_chunk_and_the_hidden_states_of_all(demo):
    shape, n, number = demo.shape, 4096, 2
    fresh, last = shape.kv_per_token * 2048 * number, shape.kv_per_token * n * number / shape.layers
    hidden = n * shape.hidden * number - last  # of the last layer, which stores as what it is given goes
    chunks, layers = (ordered(demo, order, n).need.working for order in ("chunks", "layers"))
    assert layers - chunks == pytest.approx(hidden - 1.6 * (fresh - fresh / shape.layers), abs=shape.hidden * number)
    pruned = Profile.load("lazy").replace(spec={"method": "off"})
    assert planned(demo, pruned, n).run.order == "layers"
    assert planned(demo, pruned, n).need.working == layers  # who goes on is copied part by part


def test_what_may_come_back_is_planned_as_a_vector_a_token(demo):
    """No less than a session holds once it has read, and nothing where it stays behind for good."""
    back = {
        "method": "lazy",
        "start_prune_layer": 0.17,
        "end_prune_layer": 0.34,
        "num_prune": 2,
        "end_keep_ratio": 0.1,
        "scope": "prefill+decode",
    }
    profile, n = Profile.load("lazy").replace(spec={"method": "off"}), 1100
    for scope in ("prefill+decode", "prefill"):
        profile = profile.replace(prune=back | {"scope": scope})
        with load("demo", profile, set={"load.device": "cpu", "load.verify": False}) as model:
            session = model.text_session.session
            run_to_end(session.read(torch.arange(n).remainder(model.lm.vocab).tolist()))
            held = nbytes(*session.companions).get("deferred", 0)
        more = planned(demo, profile, n).need.kv - planned(demo, "exact", n).need.kv
        assert held <= more <= 1.2 * held, "the first, the newest and the template's are not behind"
        assert bool(held) == (scope == "prefill+decode")


def test_chunks_come_first_and_layers_where_only_so_it_fits(demo):
    found = set()
    for mib in range(520, 600, 4):
        auto, chunks, layers = (ordered(demo, order, 2048, mib * MIB) for order in ("auto", "chunks", "layers"))
        by_chunks = chunks.fits or chunks.most >= layers.most
        assert auto.run.order == ("chunks" if by_chunks else "layers")
        assert auto.fits == (chunks.fits or layers.fits)
        found.add((auto.run.order, auto.fits))
        assert planned(demo, "streaming", 2048, mib * MIB).run.order == "chunks", "whose policy judges chunks"
    assert {("chunks", True), ("layers", True)} <= found


def test_the_index_of_sparse_attention_is_in_memory_too(demo):
    plain = PROFILES["exact"].replace(exactness="approx")
    reads = plain.replace(sparse={"method": "sketch"})
    layers = demo.shape.layers - reads.sparse.dense_layers
    index = int(4096 * layers * demo.shape.kv_heads * reads.sparse.index_bytes(demo.shape.head_dim, 2).slot)
    assert planned(demo, reads).need.kv == planned(demo, plain).need.kv + index
    kept = {"load.device": "cpu", "load.verify": False, "exactness": "approx", "sparse.method": "sketch"}
    with load("demo", "exact", set=kept) as model:
        run_to_end(model.text_session.session.read(torch.arange(4096).remainder(model.lm.vocab).tolist()))
        found = nbytes(model.text_session.session.cache)
    assert index == pytest.approx(found["index"], rel=0.05)


def test_older_tokens_go_to_host_memory_behind_a_gpu_and_no_further_than_there_is_room(demo):
    card = PROFILES["exact"].replace(memory={"host": "auto"})
    quiet = PROFILES["exact"].replace(load={"graphs": "off"})  # as passes over two places are not recorded
    whole = plan(demo, quiet, AvailableMemory("cuda:0", 8 * GIB), 8192, MeasuredFacts()).need
    free = int((whole.running - whole.kv // 2) / 0.97)  # room for half of the keys and values
    small = plan(demo, card, AvailableMemory("cuda:0", free, host=whole.kv), 8192, MeasuredFacts())
    assert small.fits
    assert small.need.host > whole.kv // 3
    assert small.need.kv + small.need.host >= whole.kv - STEP * small.per_token
    none = plan(demo, card, AvailableMemory("cuda:0", free, host=whole.kv // 4), 8192, MeasuredFacts())
    assert (none.fits, none.need.over > 0, none.missing > 0) == (False, True, True)
    assert 0 < none.most < 8192


def test_the_program_takes_of_host_memory_too(demo):
    """Behind a GPU what is free of it is not all for keys and values."""
    card = PROFILES["exact"].replace(memory={"host": "auto"})
    for base in (1 << 20, 1 << 30, 3 << 30):
        found = plan(demo, card, AvailableMemory("cuda:0", 8 * GIB, host=2 * GIB), 8192, MeasuredFacts(base=base))
        assert found.run.host == max(0, 2 * GIB - base)


def test_a_pass_has_as_many_rows_as_drafts_or_steps_ask_for(demo):
    """Steps that are judged go through in one pass, however few drafts there are."""
    steps = {"method": "lookahead", "model": "demo", "ahead": 4, "tokens": 100}
    judging = PROFILES["exact"].replace(exactness="approx", reasoning_steps=steps)
    plain, judged = (planned(demo, of, find=lambda _: demo).run for of in (PROFILES["exact"], judging))
    assert (plain.rows, judged.rows) == (1, 1 + 4 * 100)
    assert planned(demo, PROFILES["ngram"]).run.rows == PROFILES["ngram"].spec.rows > 1


CHUNK = {"prefill.chunk": 512}


@pytest.mark.parametrize(
    ("profile", "sets"),
    [
        ("exact", {"memory.device": "7MiB"}),
        ("exact", {"memory.device": "5MiB"}),  # where no whole chunk fits
        ("exact", {"memory.device": "7MiB", **CHUNK}),
        ("exact", {"memory.device": "10MiB", "memory.disk": "10MiB"}),
        ("exact", {"memory.device": "10MiB", "memory.disk": "10MiB", **CHUNK}),
        ("lean", {"memory.device": "10MiB"}),
        ("max-context", {"memory.device": "10MiB"}),
        ("max-context", {"memory.device": "6MiB", "memory.disk": "4MiB", **CHUNK}),
    ],
)
def test_a_kv_cache_holds_the_longest_text_that_is_planned_and_no_longer_one(demo, profile, sets):
    most = planned(demo, Profile.load(profile).replace(**sets)).most
    assert 100 < most < 8192 - 2

    def read(n):
        kept = {"load.device": "cpu", "load.verify": False, "context.limit": n + 1, **sets}
        with load("demo", profile, set=kept) as model:
            run_to_end(model.text_session.session.read(torch.arange(n).remainder(model.lm.vocab).tolist()))
            assert model.text_session.session.committed == n - 1

    read(most - 1)
    with pytest.raises(CacheFull):
        read(most + 1 + most // 20)


def test_a_dtype_that_is_not_the_files_makes_a_second_copy_while_loading(demo):
    wide = planned(demo, PROFILES["exact"].replace(load={"dtype": "fp32"}))
    assert wide.run.weights.loaded
    assert wide.need.loading - wide.need.base > wide.need.weights + demo.files * 0.99
    assert not planned(demo).run.weights.loaded


def test_mapped_files_count_in_the_peak_and_not_in_what_must_be_free(demo):
    small = planned(demo, PROFILES["exact"].replace(load={"quant": "int4"}, exactness="approx"), 16)
    assert small.need.peak == small.need.loading > small.need.least


@pytest.mark.parametrize("more", [300 * MIB, -20 * MIB])
def test_what_runs_took_beyond_their_estimates_corrects_the_program_alone(demo, more):
    plain, learned = planned(demo), planned(demo, beyond=Beyond(more, more, more, 3))
    assert learned.need == replace(plain.need, base=plain.need.base + more, loading=plain.need.loading + more)
    parts = learned.need
    assert learned.total == parts.base + parts.weights + parts.kv + parts.draft + parts.working + parts.loading_peak


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_policy_that_runs_a_prompt_again_answers_later(demo, is_timed):
    """A pass of 512 rows takes 1 s and 1 ms for each token before it."""
    passes = [PassTime(rows=512, context=n, seconds=s, low=s, high=s) for n, s in ((0, 1.0), (8000, 9.0))]
    timed = ModelTimes.model_construct(passes=passes)
    measured = CalibrationDocument.model_construct(
        model=timed if is_timed else None, gemm={"bfloat16": 1e9}, bandwidth=1e12, links={}
    )

    def first(**policy):
        profile = PROFILES["exact"].replace(exactness="approx", policy=policy)
        found = speed(planned(demo, profile, 4096), demo.shape, measured)
        step = at(by_rows(passes)[512], profile.policy.footprint(4096).slots) if is_timed else 1 / found.tok_s
        return found.first_token - step

    whole, evicting, again = first(name="none"), first(name="window"), first(name="kvzip")
    assert first(name="snap") == pytest.approx(whole)  # which compresses when all has been read
    if is_timed:
        assert evicting < whole
        assert whole == pytest.approx(sum(1 + 0.512 * i for i in range(8)))
        assert again == pytest.approx(whole + (4096 + 7 * 8) / 512 * (1 + 4.096))
    else:
        assert 2 * whole < again < 3.1 * whole


def test_beyond_the_models_limit_nothing_fits(demo):
    assert not planned(demo, context=8193).fits


def test_every_change_that_is_offered_fits(demo):
    wrong = planned(demo, context=8192, available=530 * MIB)
    assert not wrong.fits
    found = changes(demo, wrong, PROFILES, {"cpu": wrong.room}, wrong.facts)
    assert 0 < len(found) <= 3
    assert all(change.total <= wrong.usable for change in found)
    assert any(change.type.startswith("--ctx") for change in found)


def test_nothing_is_offered_where_the_program_alone_is_too_large(demo):
    wrong = planned(demo, available=100 * MIB)
    assert changes(demo, wrong, PROFILES, {"cpu": wrong.room}, wrong.facts) == []


# ---- before a run ----


@pytest.fixture
def outlook(demo, tmp_path):
    def with_room(available):
        return Preflight(demo, "demo", tmp_path / "data", {"cpu": AvailableMemory("cpu", available)})

    return with_room


def test_auto_takes_the_largest_window_that_fits(outlook):
    looked = outlook(545 * MIB)
    found, note = looked.fitted(PROFILES["exact"], lambda: PROFILES)
    assert found.fits
    assert 1025 <= found.need.context < 8192
    assert f"{found.need.context:,} of 8,192" in note
    assert outlook(64 * GIB).fitted(PROFILES["exact"], lambda: PROFILES)[1] == ""


@pytest.mark.parametrize(("context", "whole"), [({"limit": 8192}, False), ({}, True)])
def test_what_was_asked_by_name_is_refused_and_never_made_smaller(outlook, context, whole):
    profile = PROFILES["exact"].replace(context=context) if context else PROFILES["exact"]
    with pytest.raises(DoesNotFit) as caught:
        outlook(545 * MIB).fitted(profile, lambda: PROFILES, whole=whole)
    error = caught.value
    assert error.code == "does_not_fit"
    assert error.detail["needed"] > error.detail["usable"]
    assert any(item.startswith("--ctx") for item in error.try_)
    assert outlook(545 * MIB).fitted(profile, lambda: PROFILES, whole=whole, force=True)[1] == ""


def test_a_model_that_drafts_and_is_too_large_is_what_is_named_and_given_up(demo, outlook):
    heavy = replace(
        demo, path="elsewhere", held=tuple(replace(h, shape=(h.shape[0] << 12, *h.shape[1:])) for h in demo.held)
    )
    profile = Profile.load("draft").replace(spec={"model": "heavy"})
    looked = outlook(2 * GIB)
    looked.find = lambda name: heavy
    with pytest.raises(DoesNotFit, match="demo and draft model heavy with") as caught:
        looked.fitted(profile, lambda: {})
    assert caught.value.try_[0] == "--spec ngram"
    assert caught.value.detail["draft"] > 2 * GIB > caught.value.detail["kv"]
    assert binding(looked.plan(profile)) == "draft model"


def test_too_little_for_any_answer_is_refused(outlook):
    with pytest.raises(DoesNotFit):
        outlook(400 * MIB).fitted(PROFILES["exact"], lambda: PROFILES)


# ---- rooms ----


def test_sizes_have_units():
    assert size("12GiB", "--vram") == size("12G", "--vram") == size("12 gib", "--vram") == 12 * GIB
    assert size("0.1GiB", "--vram") == int(0.1 * GIB)
    for wrong in ("12", "0GiB", "twelve", "-1GiB"):
        with pytest.raises(UsageError):
            size(wrong, "--vram")


def test_memory_of_the_host_lies_behind_cards_alone(monkeypatch):
    """Elsewhere a store has none of it (kv/cache/plan.py): on Apple's GPUs it is the same memory."""
    kinds = ("cpu", "cuda:0", "mps")
    found = [machine.DeviceInfo(kind, kind, 8 * GIB, 8 * GIB) for kind in kinds]
    monkeypatch.setattr(machine, "devices", lambda: found)
    assert {kind: room.host > 0 for kind, room in rooms().items()} == {"cpu": False, "cuda:0": True, "mps": False}


def test_the_container_counts_before_the_machine(tmp_path):
    assert container_room(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert container_room(tmp_path) == 600
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 150\n")
    assert container_room(tmp_path) == 750
    assert container_room(tmp_path, is_empty=True) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert container_room(tmp_path) > 1 << 60


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/cluster/job", "cluster/job", ("memory.max", "memory.current")),
        ("4:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_limit_of_our_own_group_counts_where_the_root_has_none(tmp_path, line, folder, names):
    (tmp_path / "cgroup").write_text(f"12:cpu:/other\nbroken\n{line}\n")
    (tmp_path / folder).mkdir(parents=True)
    assert container_room(tmp_path, tmp_path / "cgroup") > 1 << 60
    for name, size_ in zip(names, ("1000", "400"), strict=True):
        (tmp_path / folder / name).write_text(size_)
    assert container_room(tmp_path, tmp_path / "cgroup") == 600


@pytest.mark.parametrize(("job", "service"), [(300, 900), (900, 300)])
def test_of_groups_within_each_other_the_least_counts_and_none_outside(tmp_path, job, service):
    (tmp_path / "cgroup").write_text("0::/../service/job\n")
    for folder, left in (("../service", 1), ("service", service), ("service/job", job)):
        (tmp_path / "root" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / folder / "memory.max").write_text(str(left))
        (tmp_path / "root" / folder / "memory.current").write_text("0")
    assert container_room(tmp_path / "root", tmp_path / "cgroup") == 300


def test_auto_is_the_first_gpu_else_the_cpu():
    cpu, gpu = AvailableMemory("cpu", 1), AvailableMemory("cuda:0", 2)
    assert choose({"cpu": cpu}, "auto") == cpu
    assert choose({"cpu": cpu, "cuda:0": gpu}, "auto") == choose({"cpu": cpu, "cuda:0": gpu}, "cuda") == gpu
    with pytest.raises(UsageError):
        choose({"cpu": cpu}, "cuda:1")


# ---- parts that are easily left out ----


def test_the_logits_of_all_rows_of_a_draft_are_in_working_memory(demo):
    """In float32 for the sampler, and what a card sorts of all rows at once."""
    shape = replace(demo.shape, vocab=1_000_003)  # so many that writing takes more than reading
    sizes = [
        working_bytes(shape, chunk=1, rows=rows, slots=64, number=2, kv_number=2, device="cuda") for rows in (5, 16)
    ]
    assert sizes[1] - sizes[0] == pytest.approx(11 * (4 + DRAWN) * shape.vocab, rel=0.01)


def test_what_loading_takes_at_its_highest_must_be_free_too(demo):
    wide = planned(demo, PROFILES["exact"].replace(load={"dtype": "fp32"}), 16).need
    loads = replace(wide, loading=wide.running + wide.mapped + 7)  # 7 bytes more than what runs later, without files
    assert loads.least == wide.running + 7


def test_what_a_drafter_remembers_is_in_host_memory(demo):
    drafts, plain = planned(demo, "ngram", 8000), planned(demo, "exact", 8000)
    assert drafts.need.draft - plain.need.draft == PROFILES["ngram"].spec.footprint(8000, NO_SIZES).host > 0
    card = plan(demo, PROFILES["ngram"], AvailableMemory("cuda:0", 8 * GIB), 8000, MeasuredFacts())
    assert card.need.draft == 0


def test_a_pass_reads_stored_numbers_in_the_size_they_are_stored_in(demo):
    measured = CalibrationDocument.model_construct(
        model=None, gemm={"bfloat16": 1e12, "float32": 1e12}, bandwidth=1e9, links={}
    )
    times = {}
    for dtype in ("bf16", "fp32"):
        found = planned(demo, PROFILES["exact"].replace(kv={"dtype": dtype}, exactness="approx"), 8000)
        times[dtype] = 1 / speed(found, demo.shape, measured).tok_s
    stored = 2 * demo.shape.kv_per_token * 8000  # bytes that fp32 adds
    assert times["fp32"] - times["bf16"] == pytest.approx(stored / 1e9)


def test_a_slot_in_8_bits_has_its_scales():
    heads, dim, slots = 3, 64, 4 * LANES  # whole lanes, so that nothing is spare
    x = torch.randn(slots, dim, dtype=torch.bfloat16)
    keys, values = pack_keys(x, 8, slots), pack_values(x, 8, slots)
    real = sum(t.nbytes for r in (keys, values) for t in (r.codes, r.scale, r.zero) if t is not None)
    kv = PROFILES["exact"].replace(kv={"k_bits": 8, "v_bits": 8}, exactness="approx").kv
    assert slots * (Kivi().nbytes(LayerShape(heads, dim, dim), kv, 2) - POSITION) == heads * real


MOVED = {
    "recalled": ({"sparse": {"method": "sketch"}}, {"cpu", "demoted", "index"}),
    "packed": ({"kv": {"k_bits": 4, "v_bits": 4}}, {"cpu", "packed"}),
    "gear": ({"kv": {"k_bits": 4, "v_bits": 4}, "kv_format": {"method": "gear"}}, {"cpu", "packed"}),
    "mustafar": ({"kv_format": {"method": "mustafar"}}, {"cpu", "packed"}),
    "disk": ({"memory": {"disk": "1GiB"}}, {"cpu", "disk"}),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("policy", ["window", "snap"])
def test_what_a_policy_moves_down_is_planned_where_it_lies(demo, name, policy):
    changes, tiers = MOVED[name]
    keep = {"window": 300} if policy == "window" else {"keep": 0.2, "alloc": "uniform"}
    own = PROFILES["exact"].replace(exactness="approx", policy={"name": policy} | keep, prefill={"chunk": 256})
    own = own.replace(**changes).replace(memory={"evicted": "demote"})
    with load("demo", own, set={"load.device": "cpu", "load.verify": False}) as model:
        found = [
            nbytes(model.text_session.session.cache)
            for _ in iterate_events(model.text_session.session.read([7] * 1400))
        ]
        number = model.lm.dtype.itemsize
        whole = 1400 * sum(shape.slot_bytes(number) for shape in model.lm.shapes)
    assert set(found[-1]) == tiers
    need = planned(demo, own, 1400).need
    away = max(f.pop("disk", 0) for f in found)
    most = max(sum(f.values()) for f in found)
    assert most <= need.kv <= 1.1 * most + 0.25 * whole
    assert bool(away) == bool(need.disk)
    if name == "disk":
        assert need.disk < whole
    assert need.over == 0


def of_latents(tmp_path, **packed):
    """A model of DeepSeek-V3's kind; `packed`: by the ends of their names, tensors in place of those that expand."""
    config = families.config_of("deepseek_v3").to_dict()
    if packed:
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tensors = {
        f"model.layers.{i}.self_attn.kv_b_proj.{end}": TensorHeader(dtype, shape, 4096)
        for i in range(config["num_hidden_layers"])
        for end, (dtype, shape) in (packed or {"weight": ("F32", (64, 16))}).items()
    }
    file = WeightFile(tmp_path / "model.safetensors", 1 << 20, tensors)
    return subject_of(source.Source("latents", tmp_path, "", config, (file,), is_pickle=False))


def test_what_expands_latents_is_counted_twice_where_kernels_multiply_it_by_head():
    lm = make.model("deepseek_v3")
    install_kernels(lm)
    held = [m.panels for m in lm.model.modules() if isinstance(m, LatentProjection)]
    shape = shape_of(families.config_of("deepseek_v3").to_dict())
    found = panels(shape, lm.dtype.itemsize)
    assert list(found) == [sum(t.nbytes for t in of) for of in held if of is not None]
    assert len(found) == lm.n_layers
    plain = weigh(of_shape(shape, 4), shape, number=4, quant="none", device="cpu", given=False)
    whole = PlannedModel("latents", shape, of_shape(shape, 4), "float32", CheckpointFormat(), True, False, 1 << 20)
    assert planned(whole, context=64).run.weights.memory == plain.memory + sum(found)


def test_latents_whose_weights_stay_quantized_are_planned_as_they_are_stored(tmp_path):
    plain = of_latents(tmp_path)
    packed = of_latents(tmp_path, qweight=("I32", (2, 64)), scales=("F16", (1, 64)))
    heads, (key, value) = plain.shape.heads, plain.shape.stores[0].head
    assert planned(plain, context=64).run.number == 4
    each = [sum(of.numbers for of in one.on("cpu").stores) // one.shape.layers for one in (plain, packed)]
    assert each == [plain.shape.stores[0].key, heads * (key + value)]
    assert planned(packed, context=512).need.kv > 2 * planned(plain, context=512).need.kv


def test_a_plan_is_for_one_token_at_least(demo):
    with pytest.raises(BadInput) as found:
        planned(demo, context=0)
    assert found.value.code == "bad_length"


def test_layers_that_keep_a_state_are_not_placed_by_hand():
    shape = shape_of(hybrids.build(next(iter(hybrids.HYBRIDS))).config.to_dict())
    subject = PlannedModel("hybrid", shape, of_shape(shape, 2), "bfloat16", CheckpointFormat(), True, False, 1 << 20)
    profile = PROFILES["exact"].replace(load={"layers_on_gpu": 1})
    with pytest.raises(UsageError) as found:
        plan(subject, profile, AvailableMemory("cuda", 8 * GIB), 64, MeasuredFacts())
    assert found.value.code == "no_split"


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("lies", ["outputs first", "inputs first"])
def test_experts_are_quantized_over_their_inputs_however_they_lie(name, lies, tmp_path):
    """gpt-oss has [E, K, N]: groups of int4 run over K, and 100 inputs are in none."""
    experts, hidden, inner = 4, 128, 96
    n, k = (2 * inner, hidden) if name == "gate_up_proj" else (hidden, inner)
    size = (experts, n, k) if lies == "outputs first" else (experts, k, n)
    config = families.config_of("llama").to_dict() | {
        "hidden_size": hidden, "num_local_experts": experts, "intermediate_size": inner
    }  # fmt: skip
    tensors = {f"model.layers.0.mlp.experts.{name}": TensorHeader("BF16", size, 2 * experts * n * k)}
    file = WeightFile(tmp_path / "model.safetensors", 1 << 20, tensors)
    (held,) = of_files(source.Source("experts", tmp_path, "", config, (file,), is_pickle=False))
    assert held.shape == (experts, n, k)
