"""Every shipped profile, and drafting that none has, on a device that records (fake_graphs.py): which passes run one
operation at a time and why, the text of single operations, one wait for each pass that the host reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from kvcli import assemble
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.drafting.gemma4_assistant import wrap_layers
from kvcli.engine.drafting.mtp import Mtp
from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import load_profile
from tests import drafters, families
from tests.covering import marked
from tests.fake_graphs import FakeGraphs

NEW = 8
AGAIN = families.prompt(24)
PROMPT = [*families.prompt(40, seed=2), *AGAIN, *families.prompt(5, seed=3), *AGAIN[:6]]
PACKED = "no kernel reads this quantized KV on this device (kv.k_bits)"  # on a CPU; on a card they are captured
SPARSE = "tokens select the pages they read (sparse.method)"
# profiles with passes that are not captured, and why: rules that need the host
EAGER = {
    **dict.fromkeys(("balanced", "cpu", "lean", "budget"), PACKED),
    **dict.fromkeys(("max-context", "offload"), SPARSE),
    # which tokens return is decided by what they attend to, layer by layer
    **dict.fromkeys(("lazy-fast", "lazy-paper"), "revived tokens are older than stored ones"),
    "quest": "the cache view is selected by the queries of the pass (spec.view)",
}
SMALL = ["spec.working=160", "spec.sinks=4", "spec.recent=16"]
SHIPPED = {file.profile: [file.profile] for file in builtin_files()}
SHIPPED |= {name: [name, *SMALL] for name in ("specextend", "specextend-paper")}  # so that chunks are chosen
MORE = {
    "quest": ["fafo", "spec.view=quest", "spec.refresh=4"],
    "self": ["exact", "spec.method=self"],
    "self, layers": ["exact", "spec.method=self", "spec.skip=early"],
    "self, view": ["exact", "spec.method=self", "spec.view=stream", "spec.recent=16"],
    "mtp": ["exact", "spec.method=mtp"],
    "assistant": ["exact", "spec.method=assistant", "spec.model=assistant"],
    "sampled": ["fafo", "sample.temperature=0.8", "sample.top_k=20"],
    "penalties": ["fafo", "sample.repetition_penalty=1.3"],
}

SHORT = ("fafo", "draft", "self, view", "mtp", "assistant", "balanced")


class Asked(CapturedPasses):
    """Counts the passes that it is asked for, without those of prompts."""

    n = 0

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult] | None:
        self.n += not requests[0].is_prompt
        return super().run(requests)


@cache
def pair(name: str) -> ModelPair:
    """A target model, and what drafts for it."""
    if name == "assistant":
        target = wrap_lm(families.build("gemma4_shared", torch.float64))
        return ModelPair(target, wrap_layers(target, drafters.assistant_of(target)))
    target = wrap_lm(families.build("llama", torch.float64, num_hidden_layers=6 if name == "lazy-paper" else 3))
    if name == "mtp":
        return ModelPair(target, drafters.head_of(target))
    return ModelPair(target, wrap_lm(families.build("llama", torch.float64, seed=1, num_hidden_layers=2)))


def written(name: str, graphs: FakeGraphs | None) -> tuple[list[list[int]], Counter[str], int]:
    """Return the rows of each step behind the number of accepted ones, eager passes, and how many passes there were."""
    its, (profile, *sets) = pair(name if name in ("mtp", "assistant", "lazy-paper") else ""), {**SHIPPED, **MORE}[name]
    sets += ["spec.model=draft"] if load_profile(profile).spec.method == "model" else []
    sets += ["spec.adaptive=false"] if load_profile(profile, sets=sets).spec.method != "off" else []
    for lm in (its.target, its.draft):
        lm.remembers = {CapturedPasses: Asked(graphs)} if graphs is not None else {}
    its.target.remembers[Mtp] = its.draft
    session = assemble.session(its.target, load_profile(profile, sets=sets), pair=its)
    prompt = PROMPT * (3 if "specextend" in name else 1)
    run_to_end(session.read(prompt))
    steps = list[list[int]]()
    while (left := len(prompt) + NEW - len(session.ids)) > 0:
        step = run_to_end(session.step((), left))
        steps.append([len(step.path), *step.rows.ids])
    each = [lm.remembers[CapturedPasses] for lm in (its.target, its.draft) if graphs is not None]
    return steps, sum((of.eager for of in each), Counter[str]()), sum(of.n for of in each)


@pytest.mark.parametrize("name", marked([(name,) for name in (*SHIPPED, *MORE)], [(name,) for name in SHORT]))
def test_passes_are_captured_whatever_the_profile(name: str) -> None:
    graphs = FakeGraphs()
    steps, eager, n = written(name, graphs)
    assert set(eager) <= {EAGER.get(name)}
    assert graphs.waits <= n - eager.total(), "one wait for each pass that is captured"
    assert graphs.replays or name in EAGER
    assert steps == written(name, None)[0]
