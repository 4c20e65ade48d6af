"""Decoding methods: each gives the answer of its published rule, whatever is drafted and whoever runs beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kvcli import load
from kvcli.engine.engine import generate_together, run_to_end
from kvcli.engine.forward_request import Passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.sequence.constraint import Constraint
from kvcli.engine.sequence.sampler import Sampler
from kvcli.errors import BadConfig, BadInput, BadModel
from kvcli.methods.decode.adadec import AdaDec
from kvcli.methods.decode.first_finish import FirstFinish
from kvcli.methods.decode.fork_writer import Decoding, ForkWriter
from kvcli.methods.decode.patient_beam import PatientBeam
from kvcli.methods.decode.phi import PhiDecoding
from kvcli.settings.profile import Profile
from tests import families, make
from tests.exact.half import Half

NEW, PROMPT = 14, families.prompt(40)
STOP = {3, 17, 40, 41, 52, 63, 77, 96}  # many, so that answers of a random model end
DRAWN = Sampler(temperature=0.9, seed=5)


@cache
def lm(dtype: torch.dtype = torch.float64) -> LM:
    found = make.model("llama", dtype)
    if dtype != torch.float64:
        install_kernels(found)
    return found


def written(
    by: Decoding | None,
    sampler: Sampler = DRAWN,
    constraint: Constraint | None = None,
    stop: set[int] = STOP,
    new: int = NEW,
    prompt: list[int] = PROMPT,
    writer: ForkWriter | None = None,
) -> Passes[tuple[list[int], int]]:
    """The answer, and the number of passes."""
    model = lm()
    session, passes = make.session(model, sampler=sampler, chunk=13), 0
    writer = writer or (by and by.writer(model))
    session.start_answer(prompt, sampler, constraint)
    while (yield from session.prefill_chunk(prompt)):
        pass
    while (left := len(prompt) + new - len(session.ids)) > 0 and session.ids[-1] not in stop:
        step = yield from (writer.step(session, stop, left) if writer is not None else session.step(stop, left))
        passes += step.n_passes
        assert session.committed == len(session.ids) - 1 == session.cache.n_slots(0)
    return session.ids[len(prompt) :], passes


def answer(*asked: Any) -> list[int]:
    return run_to_end(written(*asked))[0]


@cache
def reference() -> Any:
    return families.build("llama", torch.float64)


@cache
def logp(*ids: int) -> torch.Tensor:
    """Log-probabilities of the next token by transformers alone."""
    with torch.no_grad():
        return reference()(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


# The published rules, by transformers' own model.


def beam(width: int, patience: float, penalty: float, stop: set[int]) -> list[int]:
    """FCFS beam decoding of arXiv 2204.05424, algorithm 1: one heap of all continuations, emptied from its top."""
    beams, finished = [(0.0, ())], []
    for _ in range(NEW):
        heap = sorted(
            ((s + float(p), (*y, i)) for s, y in beams for i, p in enumerate(logp(*PROMPT, *y))), key=lambda h: -h[0]
        )
        beams = []
        while len(beams) < width:
            s, y = heap.pop(0)
            if y[-1] in stop:
                finished.append((s / len(y) ** penalty, y))
            else:
                beams.append((s, y))
            if len(finished) >= width * patience:
                return [*max(finished)[1]]
    return [*max(finished or beams)[1]]


def adadec(width: int, limit: float, ahead: int) -> list[int]:
    """Entropy above the limit: the candidate with the best mean log-probability of itself and what greedily follows."""
    found: list[int] = []
    while len(found) < NEW and (not found or found[-1] not in STOP):
        p = logp(*PROMPT, *found)
        token = int(p.argmax())
        if float(-(p.exp() * p).sum()) > limit:
            tried = []
            for first in p.topk(width).indices.tolist():
                path = [first]
                while len(path) <= ahead and path[-1] not in STOP and len(found) + len(path) < NEW:
                    path.append(int(logp(*PROMPT, *found, *path).argmax()))
                scores = [float(logp(*PROMPT, *found, *path[:i])[path[i]]) for i in range(len(path))]
                tried.append((sum(scores) / len(scores), first))
            token = max(tried)[1]
        found.append(token)
    return found


@pytest.mark.parametrize(("patience", "penalty"), [(1.0, 1.0), (0.25, 0.0), (3.0, 1.0), (2.0, 2.0)])
def test_beam_search_is_the_published_one(patience: float, penalty: float) -> None:
    by = PatientBeam(forks=3, draft=2, patience=patience, length_penalty=penalty)
    assert answer(by) == beam(3, patience, penalty, STOP)


def test_patience_changes_the_answer() -> None:
    assert len({tuple(answer(PatientBeam(forks=4, patience=p))) for p in (0.25, 1.0, 4.0)}) > 1


@pytest.mark.parametrize(("limit", "ahead"), [(3.4, 3), (2.5, 1), (0.0, 4)])
def test_adadec_is_the_published_rule(limit: float, ahead: int) -> None:
    assert answer(AdaDec(forks=3, entropy=limit, ahead=ahead), Sampler()) == adadec(3, limit, ahead)


def test_a_limit_that_is_never_reached_leaves_plain_decoding() -> None:
    for sampler in (Sampler(), DRAWN):
        assert answer(AdaDec(entropy=100.0), sampler) == answer(None, sampler)
    assert answer(AdaDec(entropy=2.5), Sampler()) != answer(None, Sampler())


@pytest.mark.parametrize("sampler", [DRAWN, replace(DRAWN, repetition_penalty=1.4, top_k=20), replace(DRAWN, seed=8)])
@pytest.mark.parametrize("constraint", [None, Half(97, 3)], ids=["free", "held"])
def test_first_finish_is_the_shortest_of_the_answers_of_its_seeds(sampler: Sampler, constraint: Any) -> None:
    each = [answer(None, replace(sampler, seed=sampler.seed + i), constraint) for i in range(5)]
    want = min(each, key=lambda ids: (ids[-1] not in STOP, len(ids)))
    assert len({len(ids) for ids in each}) > 1
    for draft in (0, 3):
        assert answer(FirstFinish(forks=5, draft=draft), sampler, constraint) == want


def test_without_an_end_the_first_seed_answers() -> None:
    assert answer(FirstFinish(forks=3), DRAWN, None, set()) == answer(None, DRAWN, None, set())


METHODS = [FirstFinish(forks=3), PatientBeam(forks=3, patience=2.0), AdaDec(forks=3, entropy=3.0, ahead=3)]
METHODS += [PhiDecoding(forks=3, step=6, ahead=4)]


@pytest.mark.parametrize("by", METHODS, ids=lambda by: type(by).__name__)
def test_forks_draft_for_one_another_and_texts_beside_them_change_nothing(by: Decoding) -> None:
    """The second answer of a writer drafts from the forks of the first."""
    want, passes = run_to_end(written(replace(by, draft=0), stop={96}))
    writers = [replace(by, draft=draft).writer(lm()) for draft in (1, 6)]
    for is_known in (False, True):
        tasks = generate_together(*(written(by, writer=one, stop={96}) for one in writers), written(None))
        for task in tasks[:2]:
            got, fewer = task.result()
            assert got == want
            assert fewer < passes or not is_known or type(by) is not FirstFinish, "draft tokens saved passes"
        assert tasks[2].result()[0] == answer(None)


def test_phi_weighs_a_step_by_foresight_and_by_the_size_of_its_cluster() -> None:
    """exp((Norm(A) + Norm(C)) / tau) of arXiv 2503.13288, where Norm is a softmax at tau."""
    tau, foresight = 0.5, torch.tensor([-0.2, -1.0, -0.4], dtype=torch.float64)
    later = [[1, 2, 3, 4], [9, 8], [3, 2, 1, 7]]  # the first and the last share 3 of 5 tokens
    share = torch.tensor([2 / 3, 1 / 3, 2 / 3], dtype=torch.float64)
    want = (((foresight / tau).softmax(0) + (share / tau).softmax(0)) / tau).exp()
    found = PhiDecoding(tau=tau).weights(foresight.tolist(), later)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), want)


def test_phi_writes_steps_of_its_seeds() -> None:
    """Each step is what plain sampling with one of the seeds writes there, and not always the first."""
    by, text, which = PhiDecoding(forks=3, step=5, ahead=3, tau=0.1), list(PROMPT), set()
    got = answer(by)
    while got:
        each = [answer(None, replace(DRAWN, seed=5 + i), None, STOP, 5, text) for i in range(3)]
        seed, step = next((i, ids) for i, ids in enumerate(each) if ids == got[: len(ids)])
        which.add(seed)
        text, got = [*text, *step], got[len(step) :]
    assert which - {0}


def says(error: Any) -> str:
    return "\n".join([error.message, *error.lines, *error.try_])


def test_what_forks_cannot_do_is_refused() -> None:
    for others in ({"spec": {"method": "ngram"}}, {"exactness": "approx", "policy": {"name": "window"}}):
        with pytest.raises(BadConfig) as caught:
            Profile.load("exact").replace(decode={"method": "beam"}, **others)
        assert '"beam" needs a full KV cache, and forks that draft for one another' in says(caught.value)
    with pytest.raises(BadInput) as refused:
        answer(FirstFinish(), Sampler())
    assert "-t 0.8" in says(refused.value)
    with pytest.raises(BadModel) as hybrid:
        PatientBeam().writer(make.model("lfm2", torch.float64))
    assert "--set decode.method=none" in says(hybrid.value)
    beams = Profile.load("exact").replace(decode={"method": "beam"})
    with pytest.raises(BadConfig) as caught:
        load("demo").under(beams).new_session()
    assert "--set decode.method=none" in says(caught.value)


def test_an_answer_of_the_bundled_model() -> None:
    ask, told = "Repeat after me: one two three four five.", {"sample.temperature": 0.0}
    with load("demo", "exact", told) as model:
        want = model.generate(ask, max_new_tokens=24)
        with model.open(set={**told, "decode.method": "beam", "decode.patience": 2}) as text:
            assert "the answer of this decoding method appears when it is complete" in text.cautions
            turn = text.generate(ask, max_new_tokens=24)
            again = text.generate(ask, max_new_tokens=24)
            with pytest.raises(BadInput) as caught:
                text.generate(ask, top_logprobs=1)
            assert "--set decode.method=none" in says(caught.value)
            asked = iter([False] * 12)
            ended = text.generate("Count to nine.", max_new_tokens=24, cancel=lambda: next(asked, True))
        with model.open(set={**told, "decode.method": "adadec"}) as text:
            assert text.generate(ask, max_new_tokens=24).text
    assert turn.ids == again.ids
    assert turn.finish == want.finish == "stop"
    assert turn.stats.passes > 1
    assert (ended.finish, ended.text) == ("interrupted", "")
