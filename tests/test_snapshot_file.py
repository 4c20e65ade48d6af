"""A KV cache that settings shaped goes on from a file as the session that was never saved does: the same to the bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import KvcliError
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import KVCache
from kvcli.kv.snapshot import SnapshotMismatch, State, leaves, tree_of
from kvcli.kv.tiers.host import HostTier
from kvcli.methods.policies.expected_attention import Expected
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.h2o import H2O
from kvcli.methods.policies.kvzip import KVzip
from kvcli.methods.policies.snapkv import Snap
from kvcli.methods.policies.streaming import StreamingLLM as Stream
from kvcli.methods.prune.lazy import LazyLLM
from kvcli.prefix_cache import snapshot_file
from kvcli.prefix_cache.snapshot_file import CorruptFile
from tests import families, make
from tests.covering import pinned
from tests.exact import table

torch.set_num_threads(1)
DRAWS = Sampler(temperature=0.8, seed=5)
IDS = families.prompt(190)
MORE = families.prompt(37, seed=8)
ANSWER, AGAIN = 27, 40


def over(lm: LM, *below: TierLevel, **how: Any) -> TieredCache:
    return make.tiered(lm, *below, step=16, **{"holds": 16, "group": 8, "sinks": 4, **how})


STORES: Mapping[str, Callable[[LM], KVCache]] = {
    "dense": lambda lm: make.dense(
        lm, windows=make.windows(lm, back=16)
    ),  # whole blocks are evicted within these short texts,
    "packed 8 8": lambda lm: over(lm, TierLevel(make.quantized(lm, group=8), group=8)),
    "packed 8 4": lambda lm: over(lm, TierLevel(make.quantized(lm, (8, 4), group=8), group=8)),
    "packed 4 2": lambda lm: over(lm, TierLevel(make.quantized(lm, (4, 2), group=8, rotate="hadamard"), group=8)),
    "ladder": lambda lm: over(lm, TierLevel(make.quantized(lm, (4, 8), group=8), 24, 8), TierLevel(make.disk(lm))),
    "host": lambda lm: over(lm, TierLevel(HostTier(make.quantized(lm, group=8), "cpu"), group=8)),
    "disk": lambda lm: over(lm, TierLevel(make.disk(lm))),
    **{name: partial(make.cache, name) for name in (*make.INDEXES, *table.LOWER)},
}
POLICIES: Mapping[str, tuple[Policy | None, int | None]] = {
    "none": (None, 16),
    "window": (Stream(sinks=2, window=40), 16),
    "snap": (Snap(keep=0.4, sinks=2, recent=8, compression_interval=16), 16),
    "snap, by chunk": (Snap(keep=0.5, sinks=2, recent=8, compression_interval=16, per_chunk=True, keep_new=12), 16),
    "h2o": (H2O(keep=0.4, sinks=2, recent=8, compression_interval=16, keep_new=12, queries=16), 16),
    "h2o, on": (H2O(keep=0.4, sinks=2, recent=8, compression_interval=16, keep_new=12, queries=16), 16),
    "expected": (Expected(keep=0.4, sinks=2, recent=8, compression_interval=16, keep_new=12), 16),
    "kvzip": (KVzip(keep=0.4, sinks=2, recent=8, compression_interval=16), 16),
    "fastgen": (FastGen(keep=0.5, sinks=2, recent=8, compression_interval=16), 16),
    "fastgen, frequent": (FastGen(keep=0.5, sinks=2, recent=8, compression_interval=16, policies=("frequent",)), 16),
    "fastgen, on": (
        FastGen(keep=0.5, sinks=2, recent=8, compression_interval=16),
        16,
    ),  # else a question has heads choose anew
    "fastgen, frequent, on": (
        FastGen(keep=0.5, sinks=2, recent=8, compression_interval=16, policies=("frequent",)),
        16,
    ),
}
PRUNED = {
    "lazy": LazyLLM(min_prompt=64, sinks=2, recent=8),
    "lazy revived": LazyLLM(min_prompt=64, sinks=2, recent=8, scope="prefill+decode", revive_interval=4),
}
ROWS = [("llama", store, "none") for store in STORES]
ROWS += [("llama", "dense", policy) for policy in POLICIES if policy != "none"]
ROWS += [("gemma3", "dense", policy) for policy in ("none", "snap", "fastgen")]
ROWS += [
    ("llama", "packed 8 4", "snap"),
    ("llama", "packed 4 2", "snap"),
    ("llama", "sketch", "h2o"),
    ("llama", "lowered", "snap"),
]
ROWS += [("llama", "recalled", "snap"), ("llama", "demoted", "fastgen"), *(("deep", "dense", of) for of in PRUNED)]


@pytest.fixture(scope="module")
def models() -> Callable[[str], LM]:
    found: dict[str, LM] = {}

    def model(name: str) -> LM:
        if name not in found:
            found[name] = make.model("llama", num_hidden_layers=8) if name == "deep" else make.model(name)
            install_kernels(found[name])
        return found[name]

    return model


def session(lm: LM, store: str, policy: str) -> GenerationSession:
    keep, every = POLICIES.get(policy, (None, 16))
    pruning = PRUNED.get(policy)
    return make.session(lm, STORES[store](lm), sampler=DRAWS, policy=keep, every=every, chunk=50, pruning=pruning)


def answered(lm: LM, store: str, policy: str) -> GenerationSession:
    s = session(lm, store, policy)
    list(iterate_events(s.read(IDS)))
    list(iterate_events(s.stream(ANSWER)))
    return s


def goes_on(s: GenerationSession, more: list[int]) -> tuple[Tensor, list[int]]:
    """The logits behind a second question, and what is said to it."""
    text = [*s.ids, *more]
    s.start_answer(text, DRAWS)
    while run_to_end(s.prefill_chunk(text)):
        pass
    (made,) = run([ForwardRequest(s.lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.cache, want=[0])])
    assert made.logits is not None
    list(iterate_events(s.stream(AGAIN)))
    return made.logits[0], s.ids[len(text) :]


def test_a_tree_deeper_than_any_is_refused() -> None:
    """Who walks it calls itself once a level."""
    with pytest.raises(SnapshotMismatch, match="trees within trees"):
        tree_of({"a/" * 3000 + "x": 1})


@pytest.mark.parametrize(
    ("model", "store", "policy"), pinned(ROWS, ("deep", "dense", "lazy revived")), ids=[" ".join(row) for row in ROWS]
)
def test_a_text_goes_on_from_a_file_as_if_it_had_never_been_saved(
    models: Callable[[str], LM], tmp_path: Path, model: str, store: str, policy: str
) -> None:
    s = answered(models(model), store, policy)
    size = snapshot_file.write(tmp_path / "one", s.state())
    assert size == (tmp_path / "one").stat().st_size
    again = session(s.lm, store, policy)
    again.restore(snapshot_file.read(tmp_path / "one"), s.ids[-1])
    assert (again.ids, again.committed, again.approximations) == (s.ids, s.committed, s.approximations)
    snapshot_file.write(tmp_path / "two", again.state())
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    more = [] if policy.endswith("on") else MORE  # on: the same answer is written on
    logits, said = goes_on(s, more)
    same, heard = goes_on(again, more)
    assert torch.equal(logits, same)
    assert said == heard
    assert len(said) == AGAIN


def without(state: State, path: tuple[str, ...]) -> State:
    """The tree without the part at this path."""
    name, *rest = path
    if not rest:
        return {key: part for key, part in state.items() if key != name}
    return {**state, name: without(state[name], tuple(rest))}  # type: ignore[arg-type]


def parts(state: State, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all leaves and subtrees; of empty subtrees only those at the top."""
    below = [part for name, of in state.items() if isinstance(of, Mapping) for part in parts(of, (*above, name))]
    return [*((*above, name) for name, of in state.items() if not above or not isinstance(of, Mapping) or of), *below]


@contextmanager
def naming(path: tuple[str, ...]) -> Iterator[None]:
    """Fail, with the path, if nothing is raised."""
    yield
    pytest.fail(f"{'/'.join(path)} is not missed")


def keyed_by_name(path: tuple[str, ...]) -> bool:
    """Not an entry of a list, which is shorter without its last one, and not the mark of a snapshot of today."""
    return not path[-1].isdigit() and path != ("has_empty",)


@pytest.mark.parametrize(
    ("model", "store", "policy"),
    [
        ("llama", "dense", "snap"),
        ("llama", "packed 8 4", "none"),
        ("llama", "dense", "expected"),
        ("deep", "dense", "lazy revived"),
    ],
    ids=lambda each: each,
)
def test_a_saved_state_that_lacks_a_part_is_refused(
    models: Callable[[str], LM], model: str, store: str, policy: str
) -> None:
    s = answered(models(model), store, policy)
    state, again = s.state(), session(s.lm, store, policy)
    paths = [path for path in parts(state) if keyed_by_name(path)]
    assert len(paths) > 15
    for path in paths:
        with pytest.raises(SnapshotMismatch), naming(path):
            again.restore(without(state, path), s.ids[-1])
        assert (again.ids, again.committed) == ([], 0)


def test_a_state_saved_before_empty_parts_were_written_goes_on(models: Callable[[str], LM], tmp_path: Path) -> None:
    s = answered(models("llama"), "dense", "snap")
    found = {name: leaf for name, leaf in leaves(s.state()) if not name.endswith("/") and name != "has_empty"}
    snapshot_file.write(tmp_path / "one", tree_of(found))
    again, state = session(s.lm, "dense", "snap"), snapshot_file.read(tmp_path / "one")
    assert "aux_cache" not in state
    again.restore(state, s.ids[-1])
    logits, said = goes_on(s, MORE)
    same, heard = goes_on(again, MORE)
    assert torch.equal(logits, same)
    assert said == heard


def test_slots_behind_a_window_keep_their_places(tmp_path: Path) -> None:
    """Sums are made by spans of 4,096 places, of which those that were given back are some."""
    lm = make.model("gemma3", sliding_window=300, max_position_embeddings=8192)
    install_kernels(lm)
    s, again = session(lm, "dense", "none"), session(lm, "dense", "none")
    list(iterate_events(s.read(families.prompt(4150))))
    snapshot_file.write(tmp_path / "one", s.state())
    again.restore(snapshot_file.read(tmp_path / "one"), s.ids[-1])
    (logits, said), (same, heard) = goes_on(s, MORE), goes_on(again, MORE)
    assert torch.equal(logits, same)
    assert said == heard


# --- files that are not what was written

FUZZED = [("llama", "ladder", "none"), ("llama", "packed 8 4", "snap"), ("llama", "dense", "fastgen, frequent")]
FUZZED += [("llama", "sketch", "h2o"), ("gemma3", "dense", "snap")]


@pytest.mark.parametrize("files", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_file_is_believed_that_does_not_fit(
    models: Callable[[str], LM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """Bytes that are damaged, and trees that are well written and wrong: refused, or a text that goes on."""
    made, asked, path = torch.empty, list[int](), tmp_path / "past"

    def counted(*shape: Any, **how: Any) -> Tensor:
        t = made(*shape, **how)
        asked.append(t.nbytes)
        return t

    ends: dict[str, int] = {}
    trees = []
    for model, store, policy in FUZZED:
        s = answered(models(model), store, policy)
        trees.append((s, dict(leaves(s.state()))))
    for seed in range(files):
        rng = random.Random(seed)
        (s, tree), (_, store, policy) = trees[seed % len(FUZZED)], FUZZED[seed % len(FUZZED)]
        snapshot_file.write(path, tree_of(bent(tree, rng) if seed % 2 else tree))
        if not seed % 2:
            path.write_bytes(damaged(path.read_bytes(), rng))
        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", counted)
            try:
                found = snapshot_file.read(path)
            except CorruptFile:
                found = None
        assert sum(asked) <= path.stat().st_size, seed
        end = end_of(found, session(s.lm, store, policy), s.ids, 16 if seed % 4 == 1 else 1)
        ends[end] = ends.get(end, 0) + 1
    assert {"damaged", "misfit", "goes on"} <= ends.keys()


def test_a_byte_that_is_another_one_is_noticed(models: Callable[[str], LM], tmp_path: Path) -> None:
    """In the first tensor, in the last and between; a number of the header too, and what made it."""
    path = tmp_path / "past"
    snapshot_file.write(path, answered(models("llama"), "packed 8 4", "none").state(), "made by this")
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    for at in (first, first + 1, (first + len(whole)) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptFile, match="its checksum is wrong"):
            snapshot_file.read(path, "made by this")
    number = re.search(rb'": (\d)', whole[:first].replace(b"\\", b" "))
    assert number is not None
    path.write_bytes(whole[: number.start(1)] + b"%d" % (9 - int(number[1])) + whole[number.end(1) :])
    with pytest.raises(CorruptFile, match="its checksum is wrong"):
        snapshot_file.read(path, "made by this")
    path.write_bytes(whole)
    with pytest.raises(CorruptFile, match="its checksum is wrong"):
        snapshot_file.read(path, "made by another")
    snapshot_file.read(path, "made by this")


def end_of(found: State | None, s: GenerationSession, ids: list[int], new: int) -> str:
    if found is None:
        return "damaged"
    try:
        s.restore(found, ids[-1])
    except SnapshotMismatch:
        assert not s.committed
        assert not any(use.slots for use in s.cache.usage() if use.tier != "index")
        return "misfit"
    text = [*s.ids, *MORE]
    try:
        s.start_answer(text, DRAWS)
        list(iterate_events(s.read(MORE)))
        list(iterate_events(s.stream(new)))
    except KvcliError:  # logits that are no numbers
        return "no numbers"
    return "goes on"


def bent(tree: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same with one thing wrong."""
    found = dict(tree)
    name = rng.choice(list(found))
    leaf = found[name]
    match rng.randrange(7):
        case 0:
            del found[name]
        case 1:
            found[name] = rng.choice([-1, 1 << 40, 3, 0.5, True])
        case 2:
            found[f"{name}x"] = found.pop(name)
        case _ if not isinstance(leaf, Tensor) or not leaf.numel():
            found[name] = torch.zeros(3)
        case 3:
            found[name] = leaf[rng.randrange(len(leaf)) :].clone() if leaf.dim() else leaf
        case 4:
            found[name] = leaf.to(rng.choice([torch.float16, torch.int64, torch.float64, torch.uint8]))
        case 5:
            found[name] = torch.cat([leaf] * 3, rng.randrange(leaf.dim()))
        case _:
            flat = leaf.clone().view(-1)
            wild = (
                rng.choice([-1, 0, 1, 120, 1e30, float("nan")]) if flat.is_floating_point() else rng.randrange(-9, 99)
            )
            flat[rng.randrange(len(flat))] = wild
            found[name] = flat.view(leaf.shape)
    return found


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, longer, or other somewhere."""
    found, size = bytearray(data), int.from_bytes(data[:8], "little")
    match rng.randrange(6):
        case 0:
            del found[rng.randrange(len(found)) :]
        case 1:
            found += rng.randbytes(rng.randrange(1, 9))
        case 2:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        case 3:
            at = rng.randrange(8 + size)
            found[at : at + 8] = rng.randbytes(8)
        case _:  # another number in the header: a size, an offset, a count
            header = data[8 : 8 + size].decode()
            numbers = list(re.finditer(r"\d+", header))
            one = rng.choice(numbers)
            other = str(rng.choice([0, 1, 7, 1 << 31, 1 << 62, 10**30, int(one[0]) + 1]))
            text = (header[: one.start()] + other + header[one.end() :]).encode()
            found[:] = len(text).to_bytes(8, "little") + text + data[8 + size :]
    return bytes(found)


def test_a_file_says_nothing_that_is_run(tmp_path: Path) -> None:
    """A pickle is no KV cache."""
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return ran.touch, ()

    torch.save({"k": Runs()}, tmp_path / "past")
    with pytest.raises(CorruptFile):
        snapshot_file.read(tmp_path / "past")
    assert not ran.exists()


def test_a_text_that_was_taken_back_goes_on_too() -> None:
    model = make.model("llama", torch.float32)
    s, again = (make.session(model) for _ in range(2))
    run_to_end(s.read(families.prompt(100)))
    s.rewind(50)
    again.restore(s.state(), s.ids[-1])
    assert run_to_end(again.step()).new == run_to_end(s.step()).new
