"""The table of exactness: any drafter gives the text of plain decoding with the same storage, policy and sampler.

Columns of the table: storage, policy, drafter, sampler and precision. A new storage, policy or drafter is added to
tests/exact/table.py before its speed is published. The short form runs rows in which any three columns meet, or any two
for the storages in `ALIKE`. The slow form runs all rows. The core (tests/core.py) runs `CORE`, a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from kvcli.engine import step_time
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.engine import generate_together, iterate_events, run_to_end
from kvcli.engine.forward_request import Coroutine, await_passes
from kvcli.engine.prefill.prompt_pieces import PromptPieces
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kernels.native import native
from kvcli.kv.slots import KVCache
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.off import Off
from kvcli.models.retokenizer import TokenMapping
from kvcli.prefix_cache.live_prefix import copy_by_layer
from tests import drafters, families, make
from tests.covering import covering, marked, pairs, spread
from tests.exact.half import Half
from tests.exact.table import (
    BROKEN,
    CANCELLED,
    CHAINS,
    DECODERS,
    DRAFTERS,
    EXPERTS,
    FURTHER,
    LOWER,
    NEW,
    PARTS,
    POLICIES,
    READ,
    RUNGS,
    SAMPLERS,
    SEGMENTS,
    SPENDS,
    STOP,
    STORAGES,
    TWINS,
    Make,
    decode,
    forked,
    lm,
    opened,
    past,
    plain,
    prompt,
    serves,
    sibling,
    side_by_side,
    written,
)
from tests.small_tokenizers import letters


def continued(session: GenerationSession, new: int) -> Coroutine[object, list[int]]:
    yield from session.stream(new, stop={STOP})
    return session.ids


def is_slow(storage: str, policy: str, sampler: str, drafter: str = CHAINS[1]) -> bool:
    """True if a row is in the slow form alone, because its columns do not act on each other: a constraint ("held") and
    most policies; a tier and most policies and samplers; a KV format and most drafters, as all formats are read alike;
    a sampler of `FURTHER` and all but the plain storage.
    """
    if sampler in FURTHER:
        return (storage, policy) != ("dense", "ragged")
    if storage in make.FORMS and storage not in ("gear", "mustafar") and drafter not in CHAINS:
        return True
    if storage in (*PARTS, *READ, *EXPERTS):
        return not {policy, sampler} <= {"all", "ragged", *SPENDS, "greedy", "sampled"}
    if storage in LOWER:
        return not {policy, sampler} <= {"ragged", "window", "greedy", "sampled"}
    return sampler == "held" and policy not in ("all", "ragged")


COLUMNS = product(STORAGES, POLICIES, DRAFTERS, SAMPLERS)
ROWS = [(*stored, policy, *rest) for stored, policy, *rest in COLUMNS if serves(stored[0], policy, rest[0])]
QUICK = [row for row in ROWS if not is_slow(row[0], row[2], row[4], row[3])]
OWN = ("minmax", "certified", *RUNGS)  # rows that choose what they read, and slots that a policy places
# storages that differ from others only in a tier, in the prefill order, in the kernel that multiplies, in the index of
# pages, or in the type or the block of the prompt
ALIKE = ({*PARTS, *READ, *EXPERTS, *LOWER, *make.INDEXES} | {"given", "rounded", "blocks"}) - {*OWN}
SHORT = covering([row for row in QUICK if row[0] not in ALIKE]) | covering([row for row in QUICK if row[0] in ALIKE], 2)
STORED = [[row for row in SHORT if row[0] == storage] for storage in {row[0] for row in SHORT}]
CORE = covering(sorted(SHORT), 1).union(*(spread(rows, 4) for rows in STORED))


@pytest.mark.parametrize(("storage", "dtype", "policy", "drafter", "sampler"), marked(ROWS, SHORT, CORE))
def test_any_drafter_gives_the_text_of_plain_decoding(
    storage: str, dtype: str, policy: str, drafter: str, sampler: str
) -> None:
    want = plain(storage, policy, sampler, dtype)
    assert decode(storage, policy, sampler, dtype, DRAFTERS[drafter](want)) == want


# storages of one tier: a decoding method refuses the others
WHOLE = [row for row in STORAGES if row[0] in ("dense", "sliding", "sinks", "uneven", "blocks", "latents", "experts")]
FORKED = [(*stored, *rest) for stored, *rest in product(WHOLE, DECODERS, SAMPLERS)]
FORKED = [row for row in FORKED if row[2] != "first-finish" or SAMPLERS[row[3]].temperature]
SHORT_FORKED = covering(FORKED, 2)


@pytest.mark.parametrize(
    ("storage", "dtype", "decoder", "sampler"), marked(FORKED, SHORT_FORKED, spread(SHORT_FORKED, 8))
)
def test_a_decoding_method_gives_one_answer_with_drafts_and_beside_others(
    storage: str, dtype: str, decoder: str, sampler: str
) -> None:
    want = run_to_end(forked(decoder, storage, sampler, dtype, 0))
    beside = written(opened(storage, "all", "sampled", dtype, DRAFTERS["ngram"]([])), storage)
    tasks = generate_together(*(forked(decoder, storage, sampler, dtype, draft) for draft in (2, 5)), beside)
    assert [task.result() for task in tasks] == [want, want, plain(storage, "all", "sampled", dtype)]


# eight texts each, drafted by turns: a policy meets every storage, a precision each of both
BESIDE = [(*stored, policy) for stored, policy in product(STORAGES, POLICIES) if serves(stored[0], policy)]
SHORT_BESIDE = covering([row for row in BESIDE if not is_slow(row[0], row[2], "greedy")], 2)


@pytest.mark.parametrize(("storage", "dtype", "policy"), marked(BESIDE, SHORT_BESIDE, spread(SHORT_BESIDE, 8)))
def test_texts_side_by_side_are_those_of_plain_decoding_alone(
    storage: str, policy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the host learns of a pass is read back at once, as from a GPU."""
    monkeypatch.setattr(lm(storage, dtype), "is_on_accelerator", True)
    for at, (task, want) in enumerate(side_by_side(storage, policy, dtype)):
        assert task.is_over
        if at == BROKEN:
            assert isinstance(task.error, MemoryError)
        elif at != CANCELLED:
            assert task.result() == want


REPLAYED = [row for row in BESIDE if row[0] not in ("blend", *TWINS)]  # a prompt with spans of others is not read again


@pytest.mark.parametrize(("storage", "dtype", "policy"), marked(REPLAYED, spread(covering(REPLAYED, 1), 4), set()))
def test_a_text_whose_kv_is_computed_again_goes_on_as_if_it_had_never_been_lost(
    storage: str, policy: str, dtype: str
) -> None:
    want = plain(storage, policy, "sampled", dtype)
    session, n = opened(storage, policy, "sampled", dtype, DRAFTERS["chain"](want)), len(prompt(storage))
    run_to_end(session.read(prompt(storage)))
    run_to_end(session.replay(want[: n + 23]))
    run_to_end(await_passes(session.drafter.start(session.ids, session.sampler)))
    left = n + NEW - len(session.ids)
    assert run_to_end(continued(session, left if STOP not in session.ids[n:] else 0)) == want


WHOLE = ("dense", "sliding", "sinks", "uneven", "latents", "given")  # storages of all KV as computed
COPIED = [row for row in STORAGES if row[0] in WHOLE]


@pytest.mark.parametrize(("storage", "dtype"), marked(COPIED, spread(COPIED, 3)))
def test_a_text_that_copies_its_beginning_from_another_is_written_as_one_that_prefills_it(
    storage: str, dtype: str
) -> None:
    source, session = (opened(storage, "all", "sampled", dtype, Off()) for _ in range(2))
    run_to_end(source.read([*prompt(storage), 5, 6, 7]))
    run_to_end(copy_by_layer(session, source, prompt(storage)))
    assert session.committed == len(prompt(storage)) - 1
    assert run_to_end(written(session, storage)) == plain(storage, "all", "sampled", dtype)


@pytest.mark.parametrize("storage", ["dense", "sliding"])
def test_a_text_whose_source_leaves_while_it_copies_keeps_nothing(storage: str) -> None:
    source, session = (opened(storage, "all", "sampled", "fp32", Off()) for _ in range(2))
    run_to_end(source.read([*prompt(storage), 5, 6, 7]))
    copying = copy_by_layer(session, source, prompt(storage))
    for _ in range(len(session.lm.storing) + 1):  # room for each layer, and the first layer
        next(copying)
    assert session.cache.n_slots(0) > 0
    source.rewind(0)
    assert list(copying) == []
    assert (session.committed, session.cache.n_slots(0)) == (0, 0)
    assert run_to_end(written(session, storage)) == plain(storage, "all", "sampled", "fp32")


@pytest.mark.core
@pytest.mark.parametrize("drafter", ["right", "moody", "bush"])
def test_scores_of_drafts_that_are_read_back_at_once_are_those_of_plain_decoding(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain("dense", "ragged", "sampled", "fp32")  # read back row by row
    monkeypatch.setattr(lm("dense", "fp32"), "is_on_accelerator", True)
    found = decode("dense", "ragged", "sampled", "fp32", DRAFTERS[drafter](want))
    assert found == want
    assert [len(score) for score in found.scores] == [1 + 2 * 3] * (len(want) - len(prompt()))


IN_PIECES = [row for row in BESIDE if row[1] != "fp64" and native() is not None]
IN_PIECES = [row for row in IN_PIECES if not is_slow(row[0], row[2], "greedy")]
IN_PIECES = sorted(covering(IN_PIECES, 1))  # in one order, in every process
SHORT_PIECES = [row for row in IN_PIECES if row[0] in ("dense", "given", "blend")]


@pytest.mark.parametrize(("storage", "dtype", "policy"), marked(IN_PIECES, SHORT_PIECES, SHORT_PIECES))
def test_a_chunk_in_pieces_beside_others_gives_the_text_of_one_pass(
    storage: str, policy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has time for more than the least rows, and texts join while others are read and written."""
    monkeypatch.setattr(step_time, "LEAST", 5)
    cut = list[int]()
    piece = PromptPieces.piece
    monkeypatch.setattr(PromptPieces, "piece", lambda of, n: cut.append(n) or piece(of, n))  # type: ignore[func-returns-value]
    for at, (task, want) in enumerate(side_by_side(storage, policy, dtype, longest=0.0, apart=4)):
        assert task.is_over
        if at not in (BROKEN, CANCELLED):
            assert task.result() == want
    assert cut.count(5) > 5


@pytest.mark.parametrize(("drafter", "sampler", "is_apart"), pairs(product(DRAFTERS, SAMPLERS, (False, True))))
def test_a_constraint_is_kept_under_any_sampler(
    drafter: str, sampler: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm("dense", "fp32"), "is_on_accelerator", is_apart)

    def held(drafter: Drafter) -> list[int]:
        session = opened("dense", "ragged", sampler, "fp32", drafter)
        session.start_answer(prompt(), SAMPLERS[sampler], Half(97, 3))
        return run_to_end(written(session))

    want = held(Off())
    assert held(DRAFTERS[drafter](want)) == want
    assert want != plain("dense", "ragged", sampler, "fp32")
    answer = want[len(prompt()) :]
    masks = [Half(97, 3).allowed(answer[:at]) for at in range(len(answer))]
    assert all(mask is None or mask[i] for mask, i in zip(masks, answer, strict=True))


def test_the_right_drafts_are_taken_and_the_wrong_ones_are_not() -> None:
    want = plain("dense", "all", "greedy", "fp32")
    right = drafters.Right(want, 97, STOP)
    decode("dense", "all", "greedy", "fp32", right)
    wrong = drafters.Wrong(want, 97, STOP)
    decode("dense", "all", "greedy", "fp32", wrong)
    assert len(right.steps) == -(-NEW // 8)
    assert all(step.n_accepted == step.n_drafted for step in right.steps)
    assert len(wrong.steps) == NEW
    assert all(step.n_accepted == 0 for step in wrong.steps)


@pytest.mark.parametrize("storage", LOWER)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("all", "keepall", *SPENDS)])
def test_what_a_policy_lets_go_lies_below_in_the_rows_of_the_table(storage: str, policy: str) -> None:
    session = opened(storage, policy, "greedy", "fp32", Off())
    run_to_end(written(session))
    use = {at: [one.slots for one in session.cache.usage() if one.layer == 1][at] for at in (0, 1)}
    assert 0 < use[0] < len(session.ids) - 5
    assert use[1] > 5
    assert session.approximations == (
        {"unread"} if storage == "recalled" else {"rounded"} if storage == "lowered" else set()
    )


@pytest.mark.parametrize(("storage", "policy"), [(s, p) for s in RUNGS for p in SPENDS if serves(s, p)])
def test_a_budget_spreads_the_rows_of_the_table_over_its_levels(storage: str, policy: str) -> None:
    session = opened(storage, policy, "greedy", "fp32", Off())
    run_to_end(written(session))
    held = [use.slots for use in session.cache.usage() if use.layer == 1 and use.tier != "index"]
    assert sum(n > 0 for n in held) > (2 if policy == "budget" else 1)
    assert ("unread" in session.approximations) == (storage == "rungs recalled")
    assert "rounded" in session.approximations


def test_some_rows_of_the_table_do_end_at_a_stop_token() -> None:
    policies = [p for p in POLICIES if serves("dense", p)]
    ended = [p for p in policies for s in SAMPLERS if plain("dense", p, s, "fp32")[-1] == STOP]
    assert ended, "choose a STOP that the samplers draw, or the table does not cover it"


@pytest.mark.parametrize("storage", ["sliding", "lazy", "lazy selected", "chosen", "layers"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_reading_in_other_chunks_gives_the_same_text(sampler: str, storage: str) -> None:
    def text(chunk: int) -> list[int]:
        return run_to_end(written(opened(storage, "all", sampler, "fp64", Off(), chunk=chunk), storage))

    texts = [text(chunk) for chunk in (1, 7, 13, 512)]
    assert texts[1:] == texts[:-1]


# rows cannot be stopped between layers that keep a state: that is refused (tests/test_hybrids.py); nor can segments
@pytest.mark.parametrize(("storage", "dtype"), [row for row in STORAGES if row[0] not in (*READ, *SEGMENTS, "hybrid")])
def test_layer_by_layer_stores_what_chunk_by_chunk_does(storage: str, dtype: str) -> None:
    """To the bit, in every tier, and after another turn; the model's kernels may do with rows what they like."""
    model, turns = lm(storage, dtype), [prompt(storage), families.prompt(41, seed=6)]
    every = 16 if storage in PARTS else None
    of = [
        make.session(model, past(storage, model), chunk=13, every=every, by_layers=by_layers)
        for by_layers in (False, True)
    ]
    for turn in turns:
        for session in of:
            run_to_end(session.read(turn))
            list(iterate_events(session.stream(7)))
        chunks, layers = of
        assert chunks.ids == layers.ids
        assert chunks.cache.usage() == layers.cache.usage()
        for layer in model.storing:
            for a, b in zip(stored_in(chunks.cache, layer), stored_in(layers.cache, layer), strict=True):
                assert torch.equal(a, b)


def stored_in(kv: KVCache, layer: int) -> list[Tensor]:
    """Keys, values and positions of a layer."""
    found = kv.slots(layer)
    return [found.k, found.v, found.pos]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_another_turn_after_an_undo_gives_the_same_text(drafter: str) -> None:
    model = lm("dense", "fp64")
    first, second = prompt(), [*prompt(), *families.prompt(8, seed=9)]

    def fresh(maker: Make, truth: Sequence[int]) -> GenerationSession:
        return make.session(model, drafter=maker(truth), chunk=13)

    alone = fresh(lambda _: Off(), [])
    run_to_end(alone.read(second))
    list(iterate_events(alone.stream(20)))
    session = fresh(DRAFTERS[drafter], alone.ids)
    run_to_end(session.read(first))
    list(iterate_events(session.stream(10)))
    cached = session.resume(second)
    assert cached >= len(first) - 1
    run_to_end(session.read(second[len(session.ids) :]))
    list(iterate_events(session.stream(20)))
    assert session.ids == alone.ids


SPELLED = {"another": (131, 2), "its own": (97, 1)}  # the tokenizer of who drafts; its own: many drafts come true


@cache
def drawn(temperature: float, seed: int) -> list[int]:
    return respelling(Off(), temperature, seed).ids


def respelling(drafter: Drafter, temperature: float, seed: int) -> GenerationSession:
    session = opened("dense", "all", "greedy", "fp32", drafter)
    session.start_answer(prompt(), Sampler(temperature=temperature, top_k=40, seed=seed))
    run_to_end(written(session))
    return session


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("words", SPELLED)
def test_at_any_temperature_and_seed_a_drafter_of_other_words_gives_the_text_of_plain_decoding(
    words: str, seed: int
) -> None:
    target, (size, of) = lm("dense", "fp32"), SPELLED[words]
    draft = target if words == "its own" else sibling()
    pair = ModelPair(target, draft, TokenMapping(letters(97, 1), letters(size, of)))
    accepted = 0
    for temperature in (0.0, 0.7, 1.0):
        made = SeparateModelDraft(adaptive=False, depth=4, copies=False, branches=2).drafter([STOP], pair)
        assert respelling(made, temperature, seed).ids == drawn(temperature, seed)
        accepted += made.report().accepted_by["model"]
    assert accepted > 0 or words == "another"
    assert len({tuple(drawn(temperature, seed)) for temperature in (0.0, 0.7, 1.0)}) == 3


def test_texts_of_other_seeds_are_others() -> None:
    assert len({tuple(drawn(0.7, seed)) for seed in (1, 2, 3)}) == 3
