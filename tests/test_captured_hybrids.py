"""Captured passes of models with recurrent layers, on a device that records (fake_graphs.py): the text and states of
single operations, whatever is accepted, taken back or lost."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses
from kvcli.engine.engine import Engine, run_to_end
from kvcli.engine.hf import recurrent_layers
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kernels.gated_delta import reference
from kvcli.kv.recurrent_state import DeviceStates, RecurrentStates, StateCheckpoint, apart_by
from tests import make
from tests.fake_graphs import FakeGraphs
from tests.hybrids import prompt
from tests.test_hybrids import Partly, written

PROMPT, NEW = 29, 24  # tokens
BY_ROW = ("qwen3_5_text", "lfm2", "olmo_hybrid")  # a gated delta net, short convolutions, another gated delta net
OTHER = "no kernel computes its recurrent layers row by row"


@cache
def model(name: str) -> LM:
    """In float64, with what a captured pass takes on a CPU in eager passes, too: native code cannot be captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_layers, "implementation", lambda *_, **__: reference)
        return make.model(name, torch.float64, id=name)


@pytest.fixture(autouse=True)
def as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_layers, "implementation", lambda *_, **__: reference)


def session(name: str, graphs: FakeGraphs | None, drafter: Any = None) -> GenerationSession:
    lm = model(name)
    lm.remembers = {} if graphs is None else {CapturedPasses: CapturedPasses(graphs)}
    return make.session(lm, make.dense(lm, step=8), drafter, chunk=16)


def read(text: GenerationSession, ids: list[int]) -> GenerationSession:
    run_to_end(text.read(ids))
    return text


@cache
def truth(name: str, new: int = NEW, seed: int = 1) -> tuple[int, ...]:
    text = read(session(name, None), prompt(PROMPT, seed))
    written(text, new)
    return tuple(text.ids)


def states_of(name: str, ids: list[int]) -> StateCheckpoint:
    """What is known behind all but the last of these, by passes of single operations."""
    before, lm = model(name).remembers, model(name)
    try:
        return read(session(name, None), ids).states.now
    finally:
        lm.remembers = before


def is_right(name: str, text: GenerationSession) -> bool:
    theirs = states_of(name, text.ids)
    return text.states.at == theirs.at == text.committed and apart_by(text.states.now, theirs) < 1e-5


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("drafts", [False, True])
def test_text_and_states_are_those_of_single_operations(name: str, drafts: bool) -> None:
    """No pass runs one operation at a time, and the host waits once in each."""
    want, graphs = list(truth(name)), FakeGraphs()
    text = read(session(name, graphs, Partly(want) if drafts else None), prompt(PROMPT))
    passes, n = text.lm.remembers[CapturedPasses], 0
    while len(text.ids) < len(want):
        run_to_end(text.step(most=len(want) - len(text.ids)))
        n += 1
    assert text.ids == want
    assert not passes.eager
    assert graphs.waits == n < (NEW if drafts else NEW + 1)
    assert graphs.replays > 2 * n
    assert is_right(name, text)


@pytest.mark.parametrize("name", BY_ROW)
def test_sequences_side_by_side_and_turns_taken_back(name: str) -> None:
    """Two share each pass; one is copied, taken back into its prompt and to the end of it, and goes on as if not."""
    each = [list(truth(name)), list(truth(name, seed=5))]
    graphs = FakeGraphs()
    texts = [session(name, graphs, Partly(want, seed)) for seed, want in enumerate(each)]
    many = Engine()
    for text, want in zip(texts, each, strict=True):
        read(text, want[:PROMPT])
        many.add(text.stream(NEW))
    while many.step():
        pass
    assert [text.ids for text in texts] == each
    assert all(is_right(name, text) for text in texts)
    text, other = texts[0], copy.deepcopy(texts[0])
    for n in (PROMPT + 1, 20):
        text.rewind(n)
        while run_to_end(text.prefill_chunk(each[0][:n])):
            pass
        assert written(text, 6) == (each[0][n : n + 6] if n > PROMPT else text.ids[n:])
        assert is_right(name, text)
    written(other, 5)  # a copy shares no state with what it was copied from
    assert other.ids[: len(each[0])] == each[0]
    assert is_right(name, other)
    assert graphs.waits
    assert not text.lm.remembers[CapturedPasses].eager


@pytest.mark.parametrize("name", BY_ROW[:2])
def test_a_pass_that_fails_before_its_commit_costs_the_tokens_since_a_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has updated the state, and nobody knows by what was accepted."""
    want, graphs = list(truth(name)), FakeGraphs()
    text = read(session(name, graphs), prompt(PROMPT))
    written(text, 5)
    with monkeypatch.context() as patch:
        patch.setattr(GenerationSession, "_commit", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(text.step(most=3))
    ids = text.ids[: PROMPT + 5]
    kept = text.resume(ids)
    assert kept == text.states.at < len(ids) - 1
    while run_to_end(text.prefill_chunk(ids)):
        pass
    written(text, len(want) - len(text.ids))
    assert text.ids == want
    assert is_right(name, text)


def test_a_copy_made_after_a_pass_failed_knows_that_its_state_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lfm2"
    want = list(truth(name))
    text = read(session(name, FakeGraphs()), prompt(PROMPT))
    written(text, 5)
    with monkeypatch.context() as patch:
        patch.setattr(GenerationSession, "_commit", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(text.step(most=3))
    ids = text.ids[: PROMPT + 5]
    for each in (text.fork(), text):
        assert each.resume(ids) == each.states.at < len(ids) - 1
        while run_to_end(each.prefill_chunk(ids)):
            pass
        written(each, len(want) - len(each.ids))
        assert each.ids == want
        assert is_right(name, each)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_answer_that_stops_within_what_was_accepted_keeps_its_state() -> None:
    """The device may not update a state by rows behind a stop token, which the host alone knows."""
    name = "qwen3_5_text"
    want = list(truth(name))
    stop = next(i for i in range(PROMPT + 2, len(want)) if want[i] not in want[PROMPT:i])
    text = read(session(name, FakeGraphs(), Partly(want, most=12)), prompt(PROMPT))
    text.drafter.lot.randint = lambda low, high: high  # all of it is right
    while text.ids[-1] != want[stop]:
        run_to_end(text.step((want[stop],), 12))
    assert text.ids == want[: stop + 1]
    assert is_right(name, text)


@pytest.mark.parametrize("fault", ["rows", "count", "shared"])
def test_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States updated by all rows, or by none, or those of a copy: each of them another state."""
    name = "qwen3_5_text"
    want = list(truth(name))
    own = recurrent_layers.SequenceSlice.advance_
    if fault == "rows":

        def all_rows(part: Any, count: Tensor) -> None:
            own(part, torch.where(count > 0, part.folding.n_rows, count))

        monkeypatch.setattr(recurrent_layers.SequenceSlice, "advance_", all_rows)
    elif fault == "count":
        monkeypatch.setattr(recurrent_layers.SequenceSlice, "advance_", lambda part, count: own(part, count * 0))
    else:
        monkeypatch.setattr(RecurrentStates, "__deepcopy__", lambda states, memo: copy.copy(states))
    text = read(session(name, FakeGraphs(), Partly(want)), prompt(PROMPT))
    written(text, 4)
    if fault == "shared":
        other = text.fork()
        written(other, 6)
    else:
        while len(text.ids) < len(want) - 6:
            run_to_end(text.step(most=len(want) - len(text.ids)))
            text.ids = want[: len(text.ids)]  # whatever is drawn from such a state
    assert not is_right(name, text)


@pytest.mark.parametrize("name", ["granitemoehybrid", "kimi_linear"])
def test_other_recurrences_say_why_they_are_not_captured(name: str) -> None:
    lm = make.model(name, id=name)
    lm.remembers[CapturedPasses] = passes = CapturedPasses(FakeGraphs())
    text = read(make.session(lm, chunk=16), prompt(PROMPT))
    written(text, 2)
    assert dict(passes.eager) == {OTHER: 2}
    assert lm.recurrent_layers.why_not_captured == OTHER


def test_bytes_on_the_device_are_reported_and_freed_with_the_sequence() -> None:
    text = read(session("qwen3_5_text", FakeGraphs()), prompt(PROMPT))
    states, like = text.states, sum(t.nbytes for _, t in text.states._like.tensors)
    marks = len({mark.at for mark in states._marks})
    written(text, 6)
    assert sum(use.nbytes for use in states.usage()) == like * (
        marks + 1
    )  # one at its address, no other but checkpoints
    assert isinstance(states.on_device(), DeviceStates)
    now = states.now
    assert now is states.now  # copied once
    assert states.on_device().synced_length == 1
