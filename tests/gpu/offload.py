"""Tiers beside the device, and sparse attention over them: the text of everything on the device, and what travels.

Random models in float32 whose keys and values go down to the host or the disk every few tokens, so that nearly all that
is read lies there; then the bundled model by the keys of a profile. Last, how fast each way to host memory is: slots of
eight layers of an 8B shape in bf16, one row and many, beside a level of the device's own. "overlap" is the share of the
shorter of the two that is hidden behind the longer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.offload.host_access import CpuAttention, StreamedCopy, Way, ZeroCopyKernel
from kvcli.kv.offload.link_rates import rates
from kvcli.kv.offload.transfer import bus_of
from kvcli.kv.slots import AttentionParams, KVCache, Slots, alike, run_of
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.disk import ExtentTier
from kvcli.kv.tiers.host import HostTier, Mappings
from kvcli.kv.tiers.quantized import QuantizedTier
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from tests import families, make
from tests.exact import table as exactness
from tests.gpu.clock import runtime_calls, spread, times
from tests.gpu.stage import On, Row, why

BIG = 1 << 30
BEHIND, CHUNK = {"device": "8MiB", "host": "1GiB"}, 256  # of the bundled model's 4,400 tokens, 900 stay on the device
PART: dict[str, Any] = {
    "fraction": 1.0,
    "floor": 1,
    "sinks": 1,
    "recent": 4,
    "dense_layers": 0,
    "selection_interval": 8,
}  # all of it
Shape = tuple[int, int, int]


def _stores(lm: LM) -> dict[str, tuple[Callable[[], KVCache], str]]:
    """By name: how one is made, and which other one must give its text."""
    of: Shape = (lm.n_layers, lm.n_kv_heads, lm.head_dim)
    cpu = torch.device("cpu")

    def dense(device: torch.device = lm.device) -> Dense:
        return Dense(lm.shapes, lm.dtype, device)

    def packed(device: torch.device = lm.device) -> QuantizedTier:
        return QuantizedTier(alike(*of), lm.dtype, device, k_bits=8, v_bits=8, group=4, rotate="none")

    def far(tier: Any, way: Way = CpuAttention) -> HostTier:
        return HostTier(tier, lm.device, way)

    def streamed() -> HostTier:
        return far(ExtentTier(Mappings(lm.shapes, lm.dtype, bus_of(lm.device))), StreamedCopy)

    def ladder(*below: TierLevel, group: int = 4) -> TieredCache:
        return TieredCache(dense(), list(below), holds=6, group=group, sinks=2)

    def disk() -> HostTier:
        return far(make.disk(of, lm.dtype))

    return {
        "device": (dense, "device"),
        "two tiers": (lambda: ladder(TierLevel(dense())), "device"),
        "host": (lambda: ladder(TierLevel(far(dense(cpu)))), "device"),
        "streamed": (lambda: ladder(TierLevel(host := streamed(), attend_async=host.attend_async)), "device"),
        "host and disk": (lambda: ladder(TierLevel(far(dense(cpu)), 8, 4), TierLevel(disk())), "device"),
        "disk": (lambda: ladder(TierLevel(disk())), "device"),
        "packed": (lambda: ladder(TierLevel(packed())), "packed"),
        "packed, host": (lambda: ladder(TierLevel(far(packed(cpu)))), "packed"),
        "recall of all, host": (
            lambda: ladder(TierLevel(MinMax(**PART).bind_tier(far(dense(cpu)), lm.attention_params))),
            "device",
        ),
        "sketch of all, host": (
            lambda: ladder(TierLevel(Sketch(**PART).bind_tier(far(dense(cpu)), lm.attention_params))),
            "device",
        ),
        "certified, device": (
            lambda: ladder(
                TierLevel(Certified(**{**PART, "fraction": 0.2}, epsilon=0.0).bind_tier(dense(), lm.attention_params))
            ),
            "device",
        ),
    }


def _written(lm: LM, kv: KVCache, drafts: bool, new: int) -> GenerationSession:
    drafter = Ngram(adaptive=False, max=7).drafter() if drafts else Off()
    session = make.session(lm, kv, drafter, exactness.SAMPLERS["sampled"], every=8, chunk=13)
    run_to_end(session.read(exactness.prompt()))
    list(iterate_events(session.stream(new)))
    return session


def _tried(lm: LM, name: str, want: list[int], new_cache: Callable[[], KVCache], new: int, on: On) -> Row:
    began = time.monotonic()
    kv = new_cache()
    session = _written(lm, kv, False, new)
    slots: dict[str, int] = {}
    for use in kv.usage():
        slots[use.tier] = slots.get(use.tier, 0) + use.slots
    row: Row = {"store": name, "slots": slots, "seconds": round(time.monotonic() - began, 2)}
    row |= {"same": not want or session.ids == want, "ids": list(session.ids)}  # steps follow
    try:
        row["drafting_changes_nothing"] = _written(lm, new_cache(), True, new).ids == session.ids
    except ImportError as error:
        row["drafting_changes_nothing"] = why(error)
    if not on.is_tiny:
        row["calls_of_4_steps"] = runtime_calls(lambda: [run_to_end(session.step()) for _ in range(4)])
    return row


def _by_profile(on: On) -> Row:
    """The bundled model with room on the device for a part of the report."""
    import kvcli
    from kvcli.demo import report_path
    from kvcli.settings.profile import Profile

    load, texts = {"device": on.device, "dtype": "fp32"}, {}
    for name, memory in (("device", {}), ("host", BEHIND)):
        more = {"load": load, "prefill": {"chunk": CHUNK}, "sample": {"temperature": 0.0}}
        chosen = Profile.load("exact").replace(**more, memory=memory)
        with kvcli.load("demo", chosen, offline=True) as model:
            turn = model.generate(report_path().read_text(encoding="utf-8"), max_new_tokens=32)
            texts[name] = (turn.ids, turn.stats.kv, turn.stats.decode)
    same = texts["device"][0] == texts["host"][0]
    return {"store": "demo, mostly in host memory", "same": same, "bytes": texts["host"][1], "decode": texts["host"][2]}


WAYS: dict[str, Way] = {"by query": CpuAttention, "by kernel": ZeroCopyKernel, "by stream": StreamedCopy}


def _timed(name: str, way: Way, rows: int, on: On) -> Row:
    """One pass of attention over slots in host memory, over as many on the device, and over both."""
    device = torch.device(on.device)
    layers, n, (heads, group, dim) = (2, 600, (2, 2, 16)) if on.is_tiny else (8, 32_768, (8, 4, 128))
    dtype = torch.float32 if on.is_tiny else torch.bfloat16
    shapes, bus = alike(layers, heads, dim), bus_of(device)
    tier = ExtentTier(Mappings(shapes, dtype, bus))
    host, own = HostTier(tier, device, way), Dense(shapes, dtype, device)
    row: Row = {"way": name, "rows": rows}
    for layer in range(layers):
        k = torch.randn(heads, n, dim, dtype=dtype)
        tier.take(layer, Slots(k, k.flip(1), run_of(0, n, heads, k.device)))
        own.take(layer, Slots(k.to(device), k.flip(1).to(device), run_of(n, n, heads, device)))
    row["unreached"] = "" if on.is_tiny else tier.pieces(0)[0].unreached
    if row["unreached"] and name == "by kernel":
        return row
    q, sight, pos = (
        torch.randn(heads * group, rows, dim, dtype=dtype, device=device),
        AttentionParams(dim**-0.5),
        [2 * n] * rows,
    )

    def read(*, far: bool, near: bool) -> None:
        for layer in range(layers):
            answer = host.attend_async(layer, q, sight, pos) if far else list
            if near:
                own.attend(layer, q, sight, pos)
            answer()

    reps = 2 if on.is_tiny else 5
    kinds = {"host": (True, False), "device": (False, True), "both": (True, True)}
    found = {kind: times(lambda f=f, d=d: read(far=f, near=d), on.device, reps) for kind, (f, d) in kinds.items()}  # type: ignore[misc]
    least = {kind: min(seconds) for kind, seconds in found.items()}
    nbytes = sum(t.nbytes for layer in range(layers) for piece in tier.pieces(layer) for t in piece.tensors)
    hidden = (least["host"] + least["device"] - least["both"]) / min(least["host"], least["device"])
    row |= {"bytes": nbytes} | {kind: spread(seconds) for kind, seconds in found.items()}
    row |= {"bytes_s": round(nbytes / least["host"]), "overlap": round(hidden, 3)}
    if not on.is_tiny:  # of the link, of the CPU, and of a query that goes down
        known = rates(device)
        row |= {"link": round(known.link), "cpu": round(known.cpu), "round_trip": known.round_trip}
        row["of_the_link"] = round(row["bytes_s"] / known.link, 3)
    return row


def run(on: On) -> Iterator[Row]:
    new, tried, good, faults = 8 if on.is_tiny else 40, 0, 0, 0
    for family in ("llama",) if on.is_tiny else ("llama", "gemma3", "gpt_oss"):
        lm = wrap_lm(families.build(family).to(on.device))
        texts: dict[str, list[int]] = {}
        for name, (new_cache, like) in _stores(lm).items():
            try:
                row = _tried(lm, name, texts.get(like, []), new_cache, new, on)
            except Exception as error:
                faults += 1
                yield {"family": family, "store": name, "fault": why(error)}
                continue
            texts[name] = row.pop("ids")
            tried, good = tried + 1, good + (row["same"] and row["drafting_changes_nothing"] is True)
            yield {"family": family, "like": like, **row}
    if not on.is_tiny:  # a CPU has no host beside itself
        try:
            yield (row := _by_profile(on))
            tried, good = tried + 1, good + row["same"]
        except Exception as error:
            faults += 1
            yield {"store": "demo", "fault": why(error)}
    for name, way in WAYS.items():
        for rows in (1, 16, 512):
            if on.left < 0:
                break
            try:
                yield _timed(name, way, rows, on)
            except Exception as error:
                faults += 1
                yield {"way": name, "rows": rows, "fault": why(error)}
    yield {"says": f"{good} of {tried} stores give the text of the one beside them, drafting or not; {faults} faults"}
