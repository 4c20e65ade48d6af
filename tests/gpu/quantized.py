"""Weights in fewer bits: bitsandbytes' as `load.quant` makes them on this device, and kvcli's own packed layers.

Logits of a random model against those of the same weights in bfloat16, bytes, and the time of a pass of 1 and 32 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.engine.engine import run as run_feeds
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.kernels.linear_quantized import PackedLinear, pack, why_not
from tests import families, make
from tests.bench.decode import build
from tests.exact import table as exactness
from tests.gpu.clock import spread, times
from tests.gpu.stage import On, Row, why

TOKENS = 64


def _model(on: On) -> Any:
    return families.build("llama", torch.bfloat16, **exactness.BLOCKS) if on.is_tiny else build()


def _ours(on: On, bits: Any) -> LM:
    """Decoder layers in kvcli's 8 or 4 bits, by the reference, as there is no kernel for GPUs yet."""
    model = _model(on)
    for parent in list(model.model.layers.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and not why_not((layer.out_features, layer.in_features), bits):
                setattr(parent, name, PackedLinear(pack(layer.weight.detach(), bits, native=False), layer.bias))
    return wrap_lm(model.to(on.device))


def _logits(lm: LM, n: int) -> Tensor:
    """[n, V] of a pass over random tokens, and nothing is kept."""
    ids = families.prompt(n, vocab=lm.vocab)
    kv = make.dense(lm)
    (made,) = run_feeds([ForwardRequest(lm, Rows.chain(ids, 0), kv, want=range(n))])
    return made.logits.float()


def run(on: On) -> Iterator[Row]:
    kinds: dict[str, Any] = {"bf16": lambda: wrap_lm(_model(on).to(on.device))}
    for quant in ("int8", "int4") if on.is_tiny else ("int8", "int4", "nf4"):  # nf4 is for CUDA
        kinds[f"load.quant = {quant}"] = lambda quant=quant: wrap_lm(
            _model(on), quant=quant, device=torch.device(on.device)
        )
    kinds |= {f"kvcli's {bits} bits": lambda bits=bits: _ours(on, bits) for bits in (8, 4)}
    want: Tensor | None = None
    said = []
    for name, load in kinds.items():
        row: Row = {"weights": name}
        try:
            lm = load()
            logits = _logits(lm, TOKENS)
            want = logits if want is None else want
            off = float((logits - want).square().mean().sqrt() / want.square().mean().sqrt())
            row |= {"relative_error": off, "same_top": float((logits.argmax(-1) == want.argmax(-1)).float().mean())}
            row |= {"finite": bool(logits.isfinite().all()), "bytes": lm.info.weight_bytes, "backend": lm.info.backend}
            row |= {"notes": lm.info.notes}
            reps = 2 if on.is_tiny else 10
            for n in (1, 32):
                row[f"ms_{n}_rows"] = spread(times(lambda lm=lm, n=n: _logits(lm, n), on.device, reps))  # type: ignore[misc]
            said.append(f"{name} {off:.3f}")
            del lm
        except Exception as error:
            row["fault"] = why(error)
            said.append(f"{name} failed")
        yield row
    yield {"says": ", ".join(said)}
