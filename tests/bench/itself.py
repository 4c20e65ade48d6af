"""The model drafting for itself: how often its draft tokens are accepted, their memory and their speed.

    python tests/bench/itself.py [--tasks demo,random] [--tokens 16384] [--new 64] [--reps 3] [--out FILE]

  demo     the demo model answers a question about a report of 4,000 tokens, and lists its findings
  random   a random Llama of 152M parameters continues random tokens, `--tokens` of them

Each side is held to its own plain decoding: that of the whole past in bf16, or of codes of 8 bits in halves.
"accepted" is of draft tokens made in every pass, four a pass (adaptive off, no copies); "speed" with them, "paced"
where the clock decides, both as a multiple of plain decoding, repetition by repetition. "bytes" are of keys and values
with all that drafts take, over those of the whole past.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.bench.profile_side import ProfileSide
from kvcli.chat.model import Model
from kvcli.settings.profile import Profile, load_profile
from tests.bench.harness import Rows, Words, measurement
from tests.bench.random_model import build, ours_of

HALVES = ["kv.split_codes=true"]
SIDES: dict[str, tuple[str, list[str]]] = {  # profile, and settings beside those of drafting
    "everything": ("exact", ["spec.method=self"]),
    "view: 16 + 496 tokens": ("exact", ["spec.method=self", "spec.view=stream"]),
    "view: 16 + 64 tokens and 32 pages of 16": ("exact", ["spec.method=self", "spec.view=quest", "spec.recent=64"]),
    "everything, layers by SWIFT": ("exact", ["spec.method=self", "spec.skip=swift"]),
    "everything, layers by CLaSp": ("exact", ["spec.method=self", "spec.skip=clasp"]),
    "everything, layers by KNN-SSD": ("exact", ["spec.method=self", "spec.skip=knn"]),
    "everything, early exit": ("exact", ["spec.method=self", "spec.skip=early"]),
    "upper half of 8 bits": ("balanced", ["spec.method=self", *HALVES]),
    **{
        f"{name}, checked": (name, ["spec.method=self", "exactness=exact"])
        for name in ("balanced", "lean", "snap", "streaming", "fastgen")
    },
}
EVERY_PASS = {"adaptive": False, "copies": False, "branches": 1}
PACED = {"adaptive": True, "copies": False}


def demo() -> tuple[Model, list[list[int]]]:
    from tests.demo_model.example import example_report

    model, report = kvcli.load("demo", profile="exact"), example_report()
    fact = report.facts[len(report.facts) // 2]
    asked = [f"What is the {fact.attribute} of {fact.entity}?", "Summarise the main findings."]
    return model, [model.encode(f"{report.text}\n\n{question}") for question in asked]


def random(tokens: int) -> tuple[Model, list[list[int]]]:
    model = kvcli.load("demo", profile="exact")
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(8, 16384, (tokens,), generator=generator).tolist()
    return Model(ours_of(build()), model.tokenizer, model.profile), [noise]


def measure(
    model: Model, prompts: list[list[int]], profile: str, sets: list[str], new: int, reps: int
) -> dict[str, Any]:
    drafting = load_profile(profile, sets=sets)
    bare = drafting.verifying_profile if drafting.is_checked else drafting
    whole = load_profile("exact")
    made = {
        "whole": under(model, whole),
        "plain": under(model, bare.replace(spec={"method": "off"})),
        "every": under(model, drafting.replace(spec=EVERY_PASS)),
        "paced": under(model, drafting.replace(spec=PACED)),
    }
    ratios: dict[str, list[float]] = {"every": [], "paced": []}
    same, drafted, accepted, size = True, 0, 0, []
    for prompt in prompts:
        stands = made["whole"].run(prompt, 1).kv_bytes or 1
        for _ in range(reps):
            plain = made["plain"].run(prompt, new)
            for name in ratios:
                got = made[name].run(prompt, new)
                ratios[name].append(got.tok_s / plain.tok_s)
                same &= got.ids == plain.ids
                if name == "every" and got.stats is not None:
                    drafted, accepted = drafted + got.stats.draft_tokens, accepted + got.stats.accepted_tokens
                    size.append((got.kv_bytes or 0) / stands)
    speeds = {"speed": median(ratios["every"]), "paced": median(ratios["paced"])}
    return {"accepted": accepted / max(1, drafted), "bytes": median(size), **speeds, "same": "yes" if same else "NO"}


def under(model: Model, profile: Profile) -> ProfileSide:
    return ProfileSide(profile.name, model.with_profile(profile), torch.get_num_threads())


@measurement(
    "Drafts of the model itself: share accepted, bytes over those of the whole past, times plain decoding",
    schema="kvcli.bench.itself/1",
)
def itself(
    tasks: Words = ("demo", "random"),
    tokens: int = 16384,
    new: int = 64,
    reps: int = 3,
    sides: Annotated[str, "parts of their names, with + between; without it all"] = "",
) -> Rows:
    wanted = [name for name in SIDES if any(part in name for part in sides.split("+"))]
    for task in tasks:
        model, prompts = demo() if task == "demo" else random(tokens)
        for name in wanted:
            yield {"task": task, "drafts_over": name, **measure(model, prompts, *SIDES[name], new, reps)}


if __name__ == "__main__":
    itself.main()
