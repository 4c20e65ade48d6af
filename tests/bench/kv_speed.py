"""Speed of decoding over a long past, by how it is stored: same weights, sides interleaved in one run.

    python tests/bench/kv_speed.py [--slots 16384] [--steps 66] [--reps 5] [--rows 8] [--only dense,k8v8] [--out FILE]

The random bf16 Llama of 152M parameters; each side's store is filled directly with the same random keys and values, as
many slots as asked for. Per repetition each side decodes `--steps` tokens, boundaries every 64 tokens included, then
the next side does, the first one another time; then passes of 1 row and of `--rows` rows that are not kept. Times over
those of "dense" of the same repetition: least, median, most. "recall" sides read a part, by the settings of the profile
`max-context`; on their noise no page is better than another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import run_to_end
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import Slots, nbytes
from kvcli.settings.profile import load_profile
from tests import make
from tests.bench.harness import Rows, Words, in_turns, measurement, picked, quotients, spread
from tests.bench.random_model import build, opened, ours_of

RESIDUAL, GROUP, SINKS = 128, 64, 4  # slots that stay in full beside what is packed, and slots that are packed at once
EVERY = 64  # tokens between two boundaries
QUARTER = (0.1, 0.2, 0.3, 0.4)  # what heads keep in turn, a quarter on average


def dense(lm: Any) -> Any:
    return make.dense(lm)


def two(lm: Any) -> Any:
    """Two dense tiers with half of the slots each."""
    return TieredCache(dense(lm), [TierLevel(dense(lm))], holds=8192, group=GROUP, sinks=SINKS)


def packed(k_bits: int, v_bits: int, recall: str = "none") -> Callable[[Any], Any]:
    def place(lm: Any) -> Any:
        tier = make.quantized(lm, (k_bits, v_bits), group=GROUP)
        return TieredCache(dense(lm), [TierLevel(read(lm, tier, recall))], holds=RESIDUAL, group=GROUP, sinks=SINKS)

    return place


def on_disk(recall: str) -> Callable[[Any], Any]:
    def place(lm: Any) -> Any:
        disk = make.disk(lm, most=1 << 34, writes=1 << 36)
        return TieredCache(dense(lm), [TierLevel(read(lm, disk, recall))], holds=RESIDUAL, group=GROUP, sinks=SINKS)

    return place


def recalled(recall: str) -> Callable[[Any], Any]:
    def place(lm: Any) -> Any:
        store = dense(lm)
        return settings(recall).bind(store, store, lm.attention_params)

    return place


def settings(recall: str) -> Any:
    return load_profile("max-context").replace(sparse={"method": recall}).sparse.settings


def read(lm: Any, tier: Any, recall: str) -> Any:
    return settings(recall).bind_tier(tier, lm.attention_params)


SIDES: dict[str, Callable[[Any], Any]] = {
    "dense": dense,
    "k8v8": packed(8, 8),
    "keep25": dense,
    "two": two,
    "k4v4": packed(4, 4),
    "k4v2": packed(4, 2),
    "minmax": recalled("minmax"),
    "k8v8 minmax": packed(8, 8, "minmax"),
    "k4v4 minmax": packed(4, 4, "minmax"),
    "k4v4 sketch": packed(4, 4, "sketch"),
    "disk": on_disk("none"),
    "disk minmax": on_disk("minmax"),
    "disk sketch": on_disk("sketch"),
}
USUAL = ("dense", "k8v8", "keep25", "two", "k4v4", "k4v2")


def session(lm: Any, side: str, n: int) -> Any:
    """A session that has n slots of noise stored and one token pending."""
    kv, noise = SIDES[side](lm), torch.Generator().manual_seed(0)
    for layer in range(lm.n_layers):
        k, v = (torch.randn(lm.n_kv_heads, n, lm.head_dim, generator=noise).to(lm.dtype) for _ in "kv")
        kv.take(layer, Slots(k, v, torch.arange(n).expand(lm.n_kv_heads, -1)))
        if side == "keep25":
            share = torch.tensor([QUARTER[j % len(QUARTER)] for j in range(lm.n_kv_heads)]).unsqueeze(1)
            kv.evict_except(layer, torch.rand(lm.n_kv_heads, n, generator=noise) < share)
    made = opened(lm, kv, every=EVERY)
    made.ids = torch.randint(8, lm.vocab, (n + 1,), generator=noise).tolist()
    made.committed = n
    run_to_end(made.compress_cache())
    return made


def step_seconds(session: Any, steps: int) -> list[float]:
    """Seconds of each of so many tokens, what happens at boundaries included."""
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        run_to_end(session.step())
        found.append(time.perf_counter() - began)
    return found


def pass_seconds(session: Any, rows: int) -> float:
    """Seconds of one pass of so many rows; nothing of it is kept."""
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import Draft, ForwardRequest, Rows

    built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain(list(range(9, 8 + rows))))
    began = time.perf_counter()
    run([ForwardRequest(session.lm, built, session.cache, want=range(built.n_rows))])
    return time.perf_counter() - began


@measurement(
    "Decoding over {slots:,} stored tokens on a random 152M Llama, by how they are stored",
    schema="kvcli.bench.kv_speed/1",
)
def kv_speed(
    slots: int = 16384,
    steps: int = EVERY + 2,
    reps: int = 5,
    rows: int = 8,
    only: Annotated[Words, "the first one is what the others are held against"] = USUAL,
) -> Rows:
    lm = ours_of(build())
    sessions = {side: session(lm, side, slots) for side in picked(only, SIDES)}

    def once(side: str) -> dict[str, float]:
        each = step_seconds(sessions[side], steps)
        passes = {f"rows{m}": median(pass_seconds(sessions[side], m) for _ in range(5)) for m in (1, rows)}
        return {"step": median(each), "with_boundaries": fmean(each), **passes}

    found = in_turns({side: partial(once, side) for side in only}, reps)
    for side, each in found.items():
        row: dict[str, Any] = {"side": side, "mib": round(sum(nbytes(sessions[side].cache).values()) / 2**20, 1)}
        for name in each[0]:
            first, mine = ([one[name] for one in found[which]] for which in (only[0], side))
            row[f"{name}_ms"] = spread([1000 * x for x in mine], 3)
            row[f"{name}_speedup"] = quotients(first, mine)
        yield row
    return {"slots": slots}


if __name__ == "__main__":
    kv_speed.main()
