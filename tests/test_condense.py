"""A text whose beginning goes on in fewer slots, and the chat that outlives its window so."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch

import kvcli
from kvcli.bench.workloads import facts_in
from kvcli.demo.report import write_report
from kvcli.drafts.off import Off
from kvcli.engine.engine import drive, events
from kvcli.engine.lm import LM
from kvcli.engine.rope import rotaries
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.errors import BadConfig
from kvcli.kernels.rotate import rotate, unrotate
from kvcli.kv.dense import Dense
from kvcli.kv.slots import Slots
from kvcli.policies.condense import condense
from tests import families

torch.set_num_threads(1)
N, END, MOST = 45, 30, 12


@cache
def lm(name: str = "llama") -> LM:
    return LM.of(families.build(name, torch.float64))


def session(ids: list[int], name: str = "llama") -> Session:
    model = lm(name)
    s = Session(model, Dense(model.shapes, model.dtype), Off(), Sampler(), chunk=16)
    drive(s.read(ids))
    return s


def places(whole: Slots, part: Slots) -> torch.Tensor:
    """[K, n]: which slots of `whole` those of `part` were, by their values."""
    return torch.stack([(a.unsqueeze(1) == b).all(-1).int().argmax(1) for a, b in zip(part.v, whole.v, strict=True)])


def test_each_head_moves_what_it_keeps_and_turns_its_keys() -> None:
    s, ids = session(families.prompt(N)), families.prompt(N)
    model, before = s.lm, [Slots(*(t.clone() for t in (x.k, x.v, x.pos))) for x in map(s.kv.slots, range(3))]
    assert drive(condense(s, END, MOST))
    assert (s.committed, s.condensed, s.lost) == (MOST, MOST, {"forgotten"})
    assert s.ids[MOST] == ids[END], "the next to be read"
    chosen = []
    for layer, rotary in enumerate(rotaries(model)):
        now = s.kv.slots(layer)
        assert now.pos.tolist() == [list(range(MOST))] * now.pos.shape[0]
        old = places(before[layer], now)
        chosen += old.tolist()
        assert (old.diff(dim=1) > 0).all()
        assert old[:, :4].tolist() == [[0, 1, 2, 3]] * old.shape[0], "sinks stay where they are"
        assert (old < END).all()
        k = before[layer].k.gather(1, old.unsqueeze(-1).expand(-1, -1, now.k.shape[2]))
        assert rotary is not None
        torch.testing.assert_close(now.k, rotate(unrotate(k, old, rotary), now.pos, rotary))
    assert len(set(map(tuple, chosen))) > 1, "heads choose for themselves"
    drive(s.chunk([*s.ids[:MOST], *ids[END:]]))
    assert s.committed == MOST + N - END - 1
    assert len(list(events(s.stream(5)))) == 5


def test_what_was_condensed_before_competes_by_what_it_was_worth() -> None:
    s = session(families.prompt(N))
    assert drive(condense(s, END, MOST))
    text = [*s.ids[:MOST], *families.prompt(N, seed=3)]
    while drive(s.chunk(text)):
        pass
    worth, before = dict(s.worth), [s.kv.slots(layer).v.clone() for layer in range(3)]
    assert drive(condense(s, MOST + 20, MOST))
    for layer in range(3):
        now = s.kv.slots(layer)
        for head in range(now.v.shape[0]):
            kept = (now.v[head].unsqueeze(1) == before[layer][head, :MOST]).all(-1)  # [n, MOST]
            old, lost = worth[layer][head][kept.any(0)], worth[layer][head][~kept.any(0)]
            torch.testing.assert_close(s.worth[layer][head][kept.any(1)], old)
            assert not len(lost) or lost.max() <= s.worth[layer][head].min()


def test_a_window_moves_as_it_is() -> None:
    s = session(families.prompt(N), "gemma3")
    full = [i for i, window in enumerate(s.lm.windows) if window is None]
    sliding = [i for i in range(s.lm.n_layers) if i not in full]
    before = {i: Slots(s.kv.slots(i).k.clone(), s.kv.slots(i).v.clone(), s.kv.slots(i).pos.clone()) for i in sliding}
    assert drive(condense(s, END, MOST))
    for i in sliding:
        now = s.kv.slots(i)
        assert int(now.pos[0, -1]) == MOST - 1
        old = places(before[i], now)
        assert (old - now.pos == END - MOST).all()
    assert len(list(events(s.stream(5)))) == 5


def test_within_it_nothing_can_be_taken_back_and_behind_it_all_can() -> None:
    s, ids = session(families.prompt(N)), families.prompt(N)
    drive(condense(s, END, MOST))
    text = [*s.ids[:MOST], *ids[END:]]
    while drive(s.chunk(text)):
        pass
    other = s.fork()
    assert s.begin(text[: MOST + 5], Sampler()) == MOST + 4
    assert s.condensed == MOST
    assert other.begin(text[: MOST - 2], Sampler()) == 0
    assert not other.condensed
    assert not other.lost


def test_too_few_slots_change_nothing() -> None:
    s = session(families.prompt(N))
    s.spans = [kvcli.engine.kinds.Span(0, 20, kvcli.engine.kinds.SYSTEM)]
    before = s.kv.slots(1).k.clone()
    assert not drive(condense(s, END, MOST))
    assert s.committed == END
    assert torch.equal(s.kv.slots(1).k, before[:, :END])


# --- a chat


def chat_of(how: str, model: kvcli.chat.local.Model):  # type: ignore[no-untyped-def]
    return model.open(set={"context.on_overflow": how}).chat("Answer briefly.")
