"""A second question to a text that was kept, under profiles that shape its past: how much sooner its first token comes.

    python tests/bench/resume.py [--tokens 8000] [--reps 2] [--profiles exact,lean,snap,fastgen] [--out FILE]

In one process and with a random model of 152M parameters: a question behind so many tokens and an answer, all of it
read against gone on from disk, first token to first token; under an exact profile the tokens must be the same.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import Rows, Words, measurement


def resumed(n: int, reps: int, profile: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """A second question behind n tokens: all of it read, and gone on from what was kept."""
    import torch

    from kvcli import load
    from kvcli.prefix_cache.prefix_cache import PrefixCache
    from tests.bench.random_model import write

    times: dict[str, list[float]] = {"read": [], "kept": [], "keeping": []}
    noise = torch.Generator().manual_seed(1)
    ids, more = (torch.randint(10, 16_000, (size,), generator=noise).tolist() for size in (n, 32))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "random-152M"))
        model = load(str(Path(folder, "random-152M")), profile, settings)
        for i in range(reps + 1):
            shelf, said = PrefixCache(Path(folder, f"kv{i}"), 1 << 34, model.lm), {}
            with model.open() as text:
                second = [*ids, *text.generate(ids, max_new_tokens=8, ignore_eos=True).ids, *more]
                model.prefix_cache, began = shelf, time.perf_counter()
                assert not text.keep().why_not
                times["keeping"].append(time.perf_counter() - began)
            for side in ("read", "kept"):
                model.prefix_cache = shelf if side == "kept" else None
                with model.open() as text:
                    turn = text.generate(second, max_new_tokens=8, ignore_eos=True)
                assert turn.stats.cached >= n * (side == "kept"), turn.stats.cached
                said[side] = turn.ids
                times[side].append(turn.stats.first_token)
            # what a policy keeps of a text depends on where its questions end
            assert model.profile.exactness != "exact" or said["read"] == said["kept"]
            model.prefix_cache = None
            nbytes = sum(path.stat().st_size for path in Path(folder, f"kv{i}").rglob("*.kv"))
    median = {side: statistics.median(found[1:]) for side, found in times.items()}
    named = {f"{side}_s": value for side, value in median.items()}
    return {"profile": profile, "tokens": n, "bytes": nbytes, **named, "gain": median["read"] / median["kept"]}


@measurement(
    "A second question behind {tokens:,} tokens of a random 152M Llama: seconds to its first token",
    columns=["profile", "bytes", "read_s", "kept_s", "gain"],
)
def resume(tokens: int = 8000, reps: int = 2, profiles: Words = ("exact", "lean", "snap", "fastgen")) -> Rows:
    for name in profiles:
        yield resumed(tokens, reps, name)


if __name__ == "__main__":
    resume.main()
