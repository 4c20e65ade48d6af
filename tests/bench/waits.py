"""What a decoding step asks of the device: operations, waits of the host, tensors that come from it.

    python tests/bench/waits.py [--layers 3,9] [--steps 4] [--out FILE]

Tiny random models. A wait is an operation whose result the host needs before it can go on, as `.tolist()`, `int()` or
`nonzero`; on a CPU it costs nothing, on a GPU each one empties the queue. They are counted as they are called, so the
count is the same on any device; what the host knows by itself (numpy, lists, what was made of tensors that came over)
is none. With the name of the line that waits.

Each side once by single operations, and once recorded (engine/cuda_graphs/captured_passes.py): on a CPU by a device
that stands for CUDA's graphs and counts what waits for it (tests/fake_graphs.py). Then operations are those that are
not replayed.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.engine.cuda_graphs.capture import CudaGraphs
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run_to_end
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.drafts.self_draft import SelfDraft
from kvcli.methods.policies.snapkv import Snap
from tests import families, make
from tests.bench.harness import Ints, Rows, measurement
from tests.fake_graphs import FakeGraphs

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}
COPIES = {"lift_fresh", "lift"}
EVERY = 8  # tokens between two boundaries of a policy
CHAIN: dict[str, Any] = {"adaptive": False, "branches": 1, "copies": False}
SIDES: dict[str, tuple[str, Any, bool]] = {  # family, drafter, whether a policy evicts
    "dense": ("llama", Off(), False),
    "dense, n-gram": ("llama", Ngram(adaptive=False, max=7), False),
    "dense, fafo": ("llama", Lookahead(adaptive=False, view="stream", sinks=2, recent=5, refresh=32), False),
    "dense, draft model": ("llama", SeparateModelDraft(depth=5, **CHAIN), False),
    "dense, draft model's tree": ("llama", SeparateModelDraft(depth=5, **CHAIN | {"branches": 3}), False),
    "dense, self-draft": ("llama", SelfDraft(depth=5, view="stream", recent=16, **CHAIN), False),
    "sliding": ("gemma3", Off(), False),
    "sliding, n-gram": ("gemma3", Ngram(adaptive=False, max=7), False),
    "dense, sampled": ("llama", Off(), False),
    "dense, penalties": ("llama", Ngram(adaptive=False, max=7), False),
    "dense, constraint": ("llama", Ngram(adaptive=False, max=7), False),
    "dense, snap": ("llama", Off(), True),
}


class Even:
    """A constraint: every other token."""

    def allowed(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.arange(97) % 2 == 0


class Count(TorchDispatchMode):
    """Operations as they are dispatched."""

    def __init__(self, graphs: FakeGraphs | None = None) -> None:
        super().__init__()
        self.graphs = graphs
        self.operations = 0
        self.allocations = 0
        self.waits: Counter[str] = Counter()
        self.copies = 0
        self.host = WeakTensorKeyDictionary()  # tensors that came over, and what is made of them alone

    def is_on_host(self, t: torch.Tensor) -> bool:
        return t in self.host or (self.graphs is not None and t.untyped_storage()._cdata in self.graphs.of_host)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if self.graphs is not None and self.graphs.is_inside:
            return op(*args, **(kwargs or {}))
        self.operations += 1
        self.copies += name in COPIES
        given = tensors([args, kwargs])
        is_here = bool(given) and all(map(self.is_on_host, given))
        by_flags = name.startswith("index") and any(
            t.dtype == torch.bool and t not in self.host for t in tensors(args[1])
        )
        if (name in WAITS and not is_here) or by_flags:
            self.waits[_line()] += 1
        made = op(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in given}
        self.allocations += not is_here and any(t.untyped_storage()._cdata not in known for t in tensors(made))
        for t in tensors(made) if is_here else ():
            self.host[t] = True
        return made


class Asked(TorchFunctionMode):
    """What comes over to the host without being dispatched where it is there already."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and (kwargs or {}).get("device") is not None:  # a copy from memory that is not pinned
            self.count.waits[_line()] += 1
        if func in (torch.Tensor.tolist, torch.Tensor.cpu) or (func is torch.Tensor.to and "cpu" in args):
            if self.count.is_on_host(args[0]):
                return func(*args, **(kwargs or {}))
            self.count.waits[_line()] += 1
            if func is not torch.Tensor.tolist:
                here = args[0].clone()
                self.count.host[here] = True
                return func(here, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def tensors(of: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(of) if isinstance(t, torch.Tensor)]


def _line() -> str:
    """The line of ours that waits."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "transformers"


def opened(side: str, layers: int, device: str = "cpu", *, is_recorded: bool = False) -> GenerationSession:
    """A session that has read its prompt and written until boundaries evict."""
    family, drafts, is_evicting = SIDES[side]
    lms = [wrap_lm(families.build(family, torch.float32, **sized(family, n)).to(device)) for n in (layers, 2)]
    graphs = FakeGraphs() if device == "cpu" else CudaGraphs(lms[0].device)
    for each in lms:
        each.is_on_accelerator = True  # as on a GPU
        each.remembers |= {CapturedPasses: CapturedPasses(graphs)} if is_recorded else {}
    lm, kv, drafter = lms[0], make.dense(lms[0]), drafts.drafter((), ModelPair(*lms))
    policy = Snap(sinks=2, recent=5, keep=0.5, keep_new=9, compression_interval=EVERY) if is_evicting else None
    sampler = Sampler(temperature=0.8, top_p=0.9, seed=3) if "sampled" in side else Sampler()
    if "penalties" in side:
        sampler = Sampler(repetition_penalty=1.2, presence_penalty=0.4, dry_multiplier=0.5, logit_bias=((5, -1.0),))
    every = EVERY if is_evicting else None
    session = make.session(lm, kv, drafter, sampler, policy=policy, every=every, chunk=64)
    again = families.prompt(9)
    session.constraint = Even() if "constraint" in side else None
    run_to_end(session.read([*families.prompt(17, seed=2), *again, *families.prompt(5, seed=3), *again[:6]]))
    for _ in range(3 * EVERY):  # from here on every boundary evicts
        run_to_end(session.step())
    return session


SHOWN = ("operations", "allocations", "waits", "copies")


def steps_of(side: str, steps: int) -> int:
    """So many, or from boundary to boundary."""
    return EVERY if SIDES[side][2] else steps


def counted(side: str, layers: int, steps: int, device: str = "cpu", *, is_recorded: bool = False) -> dict[str, Any]:
    session, steps = opened(side, layers, device, is_recorded=is_recorded), steps_of(side, steps)
    frames = captured_passes(session.lm)
    graphs = frames.graphs if frames is not None and isinstance(frames.graphs, FakeGraphs) else None
    before = graphs.waits if graphs is not None else 0
    with Count(graphs) as count, Asked(count):
        for _ in range(steps):
            run_to_end(session.step())
    if graphs is not None:
        count.waits["kvcli/engine/cuda_graphs/captured_pass.py, as it asks for"] += graphs.waits - before
    return {
        "side": f"{side}, recorded" if is_recorded else side,
        "eager": dict(frames.eager) if frames is not None else {},
        "allocations": count.allocations / steps,
        "family": SIDES[side][0],
        "layers": layers,
        "operations": count.operations / steps,
        "waits": count.waits.total() / steps,
        "copies": count.copies / steps,
        "where": {line: n / steps for line, n in count.waits.most_common()},
    }


def sized(family: str, layers: int) -> dict[str, Any]:
    """Settings of a family with so many layers, of which it may name the kind of each."""
    kinds = families.FAMILIES[family].config.get("layer_types")
    more = {"layer_types": [kinds[i % len(kinds)] for i in range(layers)]} if kinds else {}
    return {"num_hidden_layers": layers, **more}


@measurement("What a decoding step asks of the device", is_counts=True, columns=("side", "layers", *SHOWN))
def waits(layers: Ints = (3, 9), steps: int = 4) -> Rows:
    torch.set_num_threads(1)
    for side, n, is_recorded in product(SIDES, layers, (False, True)):
        found = counted(side, n, steps, is_recorded=is_recorded)
        yield found
        for line, count in found["where"].items():
            print(f"{count:8.1f}  {line}")
        for why, count in found["eager"].items():
            print(f"{count:8}  passes by single operations: {why}")


if __name__ == "__main__":
    waits.main()
