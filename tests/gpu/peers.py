"""What others take for a token on the same weights, behind the same context: a random model of an 8B Llama's shape.

kvcli in int4 and bf16, recorded; transformers' own `generate` in bf16 and with bitsandbytes' nf4; and the loop of
`static_loop` by `torch.compile` with CUDA graphs, in int4 and bf16. The loop has fewer layers, since each takes seconds
to compile: `layers` says how many, and `ms_of_all` scales what the layers take to all of them, which is computed and
not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvcli.engine.cuda_graphs.captured_passes import captured_passes
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.loading.open_lm import enable_graph_capture, install_kernels, wrap_lm
from tests import families, make
from tests.bench.decode import theirs
from tests.exact import table as exactness
from tests.gpu.clock import spread, times
from tests.gpu.models import eight
from tests.gpu.stage import On, Row, why
from tests.gpu.static_loop import StaticLoop

ALL, FEW = 32, 8  # layers
CONTEXT, NEW = 2048, 128


def _model(on: On, layers: int = ALL) -> Any:
    return (
        families.build("llama", torch.bfloat16, **exactness.BLOCKS) if on.is_tiny else eight(on.device, False, layers)
    )


def _kvcli(quant: str, on: On, context: int, new: int) -> Row:
    lm = wrap_lm(_model(on), quant=quant, device=torch.device(on.device))
    install_kernels(lm)
    if lm.is_on_accelerator:
        enable_graph_capture(lm, "auto")
    session = make.session(lm)
    run_to_end(session.read(families.prompt(context, vocab=lm.vocab)))
    steps = [step.seconds for step in iterate_events(session.stream(new))]
    return {"ms": spread(steps[2:]), "records": captured_passes(lm) is not None, "layers": lm.n_layers}


def _transformers(quant: str, on: On, context: int, new: int) -> Row:
    model = _model(on)
    if quant == "nf4":
        from kvcli.engine.loading.weights import quantize_with_bitsandbytes

        quantize_with_bitsandbytes(model.model.layers, "nf4", torch.device(on.device))
    _, steps, _ = theirs(model, families.prompt(context, vocab=model.config.vocab_size), new)
    return {"ms": spread(steps[2:]), "layers": model.config.num_hidden_layers}


def _loop(quant: str, on: On, context: int, new: int) -> Row:
    """The cache holds zeros where the context is: they are read like any others."""
    row: Row = {}
    for layers in (ALL,) if on.is_tiny else (FEW // 2, FEW):
        model = _model(on, layers)
        loop = StaticLoop(model, context + new, is_packed=quant == "int4").eval()
        step: Any = loop if on.is_tiny else torch.compile(loop, mode="reduce-overhead", fullgraph=True)
        token, pos = torch.ones(1, 1, dtype=torch.long, device=on.device), torch.tensor([context], device=on.device)

        def one(step: Any = step, token: Any = token, pos: Any = pos) -> None:
            token.copy_(step(token, pos))
            pos.add_(1).clamp_(max=context + new - 1)

        with torch.inference_mode():
            took = times(one, on.device, 2 if on.is_tiny else new // 2, warm=1 if on.is_tiny else 4)
        row[f"ms_{layers}_layers"] = spread(took)
        row |= {"ms": spread(took), "layers": len(loop.layers)}
        del model, loop, step
        gc.collect()
    if not on.is_tiny:
        few, more = row[f"ms_{FEW // 2}_layers"][1], row[f"ms_{FEW}_layers"][1]
        row["ms_of_all"] = round(more + (ALL - FEW) * (more - few) / (FEW - FEW // 2), 3)
    return row


SIDES: dict[str, Callable[[On, int, int], Row]] = {
    "kvcli int4": partial(_kvcli, "int4"),
    "transformers bitsandbytes nf4": partial(_transformers, "nf4"),
    "compiled loop int4": partial(_loop, "int4"),
    "transformers bf16": partial(_transformers, "none"),
    "kvcli bf16": partial(_kvcli, "none"),
    "compiled loop bf16": partial(_loop, "none"),
}


def run(on: On) -> Iterator[Row]:
    context, new = (40, 5) if on.is_tiny else (CONTEXT, NEW)
    said = []
    for name, side in SIDES.items():
        if on.is_tiny and "nf4" in name:  # for CUDA
            continue
        if on.left < 0:
            said.append("out of time")
            break
        row: Row = {"side": name, "context": context, "new": new}
        try:
            row |= side(on, context, new)
            said.append(f"{name} {row.get('ms_of_all', row['ms'][1]):.2f}")
        except ImportError as error:
            row["not_here"] = why(error)
        except Exception as error:
            row["fault"] = why(error)
        yield row
        gc.collect()
        if not on.is_tiny:
            torch.cuda.empty_cache()
    yield {"says": f"ms a token behind {context:,}: {', '.join(said)}"}
