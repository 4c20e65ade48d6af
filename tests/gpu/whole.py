"""Random models of an 8B Llama's shape: the text of plain decoding against drafted ones, recorded or not, and logits.

Chains and trees that are right for a while and then wrong, greedy and drawn. Where `is_row_invariant` says that a row
has the same bits alone as among others, every text has to be that of plain decoding; where not, it is counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvcli.engine.cuda_graphs.captured_passes import captured_passes
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.engine import run as run_feeds
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import enable_graph_capture, install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.methods.drafts.off import Off
from tests import drafters, families, make
from tests.gpu.models import eight
from tests.gpu.stage import On, Row, why

SIDES = (("bf16", 8, 512), ("int4", 8, 512), ("nf4", 8, 512), ("int4", 32, 128))  # weights, layers, tokens
SAMPLERS = {"greedy": Sampler(), "drawn": Sampler(temperature=0.8, top_k=40, top_p=0.95, seed=3)}
DRAFTS: dict[str, Callable[..., Drafter]] = {"chain": drafters.Moody, "tree": drafters.Bush}
READ, STOP = 300, -1


def opened(weights: str, layers: int, graphs: str, on: On) -> LM:
    """`graphs`: as `load.graphs` has it."""
    quant: dict[str, Any] = {} if weights == "bf16" else {"quant": weights}
    lm = wrap_lm(eight(on.device, on.is_tiny, layers), device=torch.device(on.device), **quant)
    install_kernels(lm)
    enable_graph_capture(lm, graphs)
    return lm


def _text(lm: LM, drafter: Drafter, sampler: Sampler, new: int) -> list[int]:
    session = make.session(lm, drafter=drafter, sampler=sampler)
    run_to_end(session.read(families.prompt(READ, vocab=lm.vocab)))
    list(iterate_events(session.stream(new)))
    return session.ids


def _parted(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts part; None = nowhere."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _texts(lm: LM, plain: dict[str, list[int]], new: int) -> Iterator[Row]:
    """The first plain text of a sampler is the one that all others have to be, whatever the captured passes."""
    for name, sampler in SAMPLERS.items():
        for kind, drafts in {"plain": None, **DRAFTS}.items():
            row: Row = {"what": "text", "sampler": name, "drafts": kind}
            try:
                ids = _text(lm, Off() if drafts is None else drafts(plain[name], lm.vocab, STOP), sampler, new)
            except Exception as error:
                yield {**row, "fault": why(error)}
                continue
            plain.setdefault(name, ids)
            at = _parted(ids, plain[name])
            yield {
                **row,
                "tokens": len(ids) - READ,
                "parted_at": at,
                "same": at is None and len(ids) == len(plain[name]),
            }


def _logits(on: On) -> Row:
    """Two layers in bfloat16 on the device against the same weights in float32 on the CPU."""
    found = []
    model = eight(on.device, on.is_tiny, 2)
    for device, dtype in ((on.device, torch.bfloat16), ("cpu", torch.float32)):
        lm = wrap_lm(model.to(device, dtype))
        kv = make.dense(lm)
        rows = Rows.chain(families.prompt(READ, vocab=lm.vocab), 0)
        (made,) = run_feeds([ForwardRequest(lm, rows, kv, want=range(READ), is_prompt=True)])
        found.append(made.logits.float().cpu())
    got, want = found
    return {"what": "logits", "relative_error": float((got - want).norm() / want.norm())}


def run(on: On) -> Iterator[Row]:
    tried = same = claimed = 0
    sides = (("bf16", 2, 8),) if on.is_tiny else SIDES
    for weights, layers, new in sides:
        plain: dict[str, list[int]] = {}
        for graphs in ("auto", "off"):
            side: Row = {"weights": weights, "layers": layers, "graphs": graphs}
            if on.left < 0:
                yield {"says": f"{same} of {tried} texts as plain decoding; out of time at {side}"}
                return
            try:
                lm = opened(weights, layers, graphs, on)
            except Exception as error:
                yield {**side, "fault": why(error)}
                continue
            side |= {"is_row_invariant": lm.is_row_invariant, "records": captured_passes(lm) is not None}
            side["notes"] = lm.info.notes
            for row in _texts(lm, plain, new):
                yield {**side, **row}
                tried, same = tried + 1, same + row.get("same", False)
                claimed += lm.is_row_invariant and not row.get("same", False)
            del lm
            gc.collect()
    try:
        yield _logits(on)
    except Exception as error:
        yield {"what": "logits", "fault": why(error)}
    yield {
        "same": same,
        "tried": tried,
        "says": f"{same} of {tried} texts as plain decoding; {claimed} against a claim",
    }
