"""A past that settings shaped goes on from a file as the session that was never saved does: the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.drafts.off import Off
from kvcli.engine.engine import drive, events, run
from kvcli.engine.feed import Feed
from kvcli.engine.gate import Pruning
from kvcli.engine.lm import LM
from kvcli.engine.policy import Policy
from kvcli.engine.rows import Rows
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.kept import past
from kvcli.kv.dense import Dense
from kvcli.kv.disk import Disk
from kvcli.kv.host import Host
from kvcli.kv.ladder import Ladder, Rung
from kvcli.kv.packed import Packed
from kvcli.kv.slots import Store
from kvcli.kv.windows import windows_of
from kvcli.policies.expected import Expected
from kvcli.policies.fastgen import FastGen
from kvcli.policies.h2o import H2O
from kvcli.policies.kvzip import KVzip
from kvcli.policies.snap import Snap
from kvcli.policies.window import Window
from kvcli.prune.lazy import Lazy
from tests import families
from tests.exact import table

torch.set_num_threads(1)
DRAWS = Sampler(temperature=0.8, seed=5)
IDS = families.prompt(190)
MORE = families.prompt(37, seed=8)
ANSWER, AGAIN = 27, 40


def packed(lm: LM, **how: Any) -> Packed:
    return Packed(lm.n_layers, lm.n_kv_heads, lm.head_dim, lm.dtype, lm.device, **{"group": 8, **how})


def disk(lm: LM) -> Disk:
    return Disk(lm.n_layers, lm.n_kv_heads, lm.head_dim, lm.dtype, 1 << 26, 1 << 30)


def over(lm: LM, *below: Rung, **how: Any) -> Ladder:
    return Ladder(Dense(lm.shapes, lm.dtype, step=16), below, **{"holds": 16, "group": 8, "sinks": 4, **how})


STORES: Mapping[str, Callable[[LM], Store]] = {
    "dense": lambda lm: Dense(lm.shapes, lm.dtype, windows=windows_of(lm.shapes, lm.sights)),
    "packed 8 8": lambda lm: over(lm, Rung(packed(lm), group=8)),
    "packed 8 4": lambda lm: over(lm, Rung(packed(lm, v_bits=4), group=8)),
    "packed 4 2": lambda lm: over(lm, Rung(packed(lm, k_bits=4, v_bits=2, rotate="hadamard"), group=8)),
    "ladder": lambda lm: over(lm, Rung(packed(lm, k_bits=4, v_bits=8), 24, 8), Rung(disk(lm))),
    "host": lambda lm: over(lm, Rung(Host(packed(lm), "cpu"), group=8)),
    "disk": lambda lm: over(lm, Rung(disk(lm))),
    **{name: lambda lm, name=name: table.past(name, lm) for name in (*table.INDEXES, *table.LOWER)},  # type: ignore[misc]
}
POLICIES: Mapping[str, tuple[Policy | None, int | None]] = {
    "none": (None, 16),
    "window": (Window(sinks=2, window=40), 16),
    "snap": (Snap(keep=0.4, sinks=2, guard=8, every=16), 16),
    "snap, by chunk": (Snap(keep=0.5, sinks=2, guard=8, every=16, per_chunk=True, keep_new=12), 16),
    "h2o": (H2O(keep=0.4, sinks=2, guard=8, every=16, keep_new=12, queries=16), 16),
    "expected": (Expected(keep=0.4, sinks=2, guard=8, every=16, keep_new=12), 16),
    "kvzip": (KVzip(keep=0.4, sinks=2, guard=8, every=16), 16),
    "fastgen": (FastGen(recovery=0.8, sinks=2, guard=8, every=16), 16),
    "fastgen, frequent": (FastGen(keep=0.5, sinks=2, guard=8, every=16, policies=("frequent",)), 16),
}
ROWS = [("llama", store, "none") for store in STORES]
ROWS += [("llama", "dense", policy) for policy in POLICIES if policy != "none"]
ROWS += [("gemma3", "dense", policy) for policy in ("none", "snap", "fastgen")]
ROWS += [("llama", "packed 8 4", "snap"), ("llama", "sketch", "h2o"), ("llama", "lowered", "snap")]
ROWS += [("llama", "recalled", "snap"), ("llama", "demoted", "fastgen"), ("llama", "dense", "lazy")]


@pytest.fixture(scope="module")
def models() -> Callable[[str], LM]:
    found: dict[str, LM] = {}

    def model(name: str) -> LM:
        if name not in found:
            found[name] = LM.of(families.build(name))
            found[name].lay_out()
        return found[name]

    return model


def session(lm: LM, store: str, policy: str) -> Session:
    keep, every = POLICIES.get(policy, (None, 16))
    pruning: Pruning | None = Lazy(least=64, sinks=2, recent=8) if policy == "lazy" else None
    return Session(lm, STORES[store](lm), Off(), DRAWS, policy=keep, every=every, chunk=50, pruning=pruning)


def answered(lm: LM, store: str, policy: str) -> Session:
    s = session(lm, store, policy)
    list(events(s.read(IDS)))
    list(events(s.stream(ANSWER)))
    return s


def goes_on(s: Session) -> tuple[Tensor, list[int]]:
    """The logits behind a second question, and what is said to it."""
    text = [*s.ids, *MORE]
    s.begin(text, DRAWS)
    while drive(s.chunk(text)):
        pass
    (made,) = run([Feed(s.lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.kv, want=[0])])
    assert made.logits is not None
    list(events(s.stream(AGAIN)))
    return made.logits[0], s.ids[len(text) :]


@pytest.mark.parametrize(("model", "store", "policy"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_a_text_goes_on_from_a_file_as_if_it_had_never_been_saved(
    models: Callable[[str], LM], tmp_path: Path, model: str, store: str, policy: str
) -> None:
    s = answered(models(model), store, policy)
    size = past.write(tmp_path / "one", s.state())
    assert size == (tmp_path / "one").stat().st_size
    again = session(s.lm, store, policy)
    again.restore(past.read(tmp_path / "one"), s.ids[-1])
    assert (again.ids, again.committed, again.lost) == (s.ids, s.committed, s.lost)
    past.write(tmp_path / "two", again.state())
    logits, said = goes_on(s)
    same, heard = goes_on(again)
    assert torch.equal(logits, same)
    assert said == heard
    assert len(said) == AGAIN
