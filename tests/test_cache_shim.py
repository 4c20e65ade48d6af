"""Which pass a call of a model is of, and what its layers get as their cache."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch

from kvcli.engine.engine import run
from kvcli.engine.forward import ForwardPass
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.cache_shim import RunningPass, active_pass, cache_name, call, current
from kvcli.engine.hf.lm import LM
from tests import families, make


def feed_of(lm: LM, seed: int) -> ForwardRequest:
    return ForwardRequest(lm, Rows.chain(families.prompt(9, seed=seed), 0), make.dense(lm), want=range(9))


def test_engines_in_two_threads_answer_their_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one model, layer by layer in step: each meets the other in every layer."""
    lm = make.model()
    feeds = [feed_of(lm, seed) for seed in (1, 2)]
    alone = [run([feed])[0].logits for feed in feeds]
    in_step, attend = Barrier(2, timeout=60), ForwardPass.attend

    def attend_in_step(self: ForwardPass, *args: Any) -> torch.Tensor:
        in_step.wait()
        return attend(self, *args)

    monkeypatch.setattr(ForwardPass, "attend", attend_in_step)
    with ThreadPoolExecutor(2) as threads:
        both = [made.logits for (made,) in threads.map(run, [[feed] for feed in feeds])]
    assert all(map(torch.equal, both, alone))


def test_a_call_that_breaks_leaves_no_pass_behind() -> None:
    lm = make.model()
    with active_pass(RunningPass()), pytest.raises(NotImplementedError):
        call(lm.model, [1, 2], its_pass=RunningPass())
    assert current() is None


def test_a_call_of_no_pass_stands_above_one_that_is() -> None:
    with active_pass(outer := RunningPass()):
        with active_pass(None):
            assert current() is None
        assert current() is outer


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_cache_has_the_name_that_its_class_gives_it(name: str) -> None:
    lm = make.model(name)
    assert cache_name(type(lm.model)) in ("cache", "past_key_values")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([feed_of(lm, 1)])


def test_a_class_that_takes_no_cache_gets_none() -> None:
    assert cache_name(type("Strange", (), {"forward": partial(print, sep="")})) is None
