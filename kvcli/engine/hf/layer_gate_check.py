"""Check whether rows can be stopped between the layers of a model and continue later; refuse the model if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward import ForwardPass
from kvcli.engine.forward_request import ForwardRequest, Passes, Rows
from kvcli.engine.hf.cache_shim import call
from kvcli.engine.hf.model_probe import WITHIN, relative_rms
from kvcli.engine.prefill.layerwise import LayerwisePrefill
from kvcli.engine.sequence.commit import commit
from kvcli.errors import BadModel
from kvcli.kv.slots import AttentionParams, layer_groups
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.borrowing import PositionMaskedCache
from kvcli.models.refusals import blame_files

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


def verify_partial_passes(lm: LM) -> None:
    """Run random tokens, some of which stop midway and continue after the others, and compare with one pass that hides
    them by a mask. Raises BadModel if later logits differ.

    The check finds any state that a model carries between layers besides the hidden states, because each layer is a
    separate pass and upper layers get fewer rows. In half precision rounding alone may cause a difference, as in
    `model_probe.verify_logits`.
    """
    kind, is_half = f"{lm.info.id} ({lm.info.family})", lm.dtype.itemsize < 4
    if lm.is_split:
        raise _unstopped(kind, "its layers are on two devices")
    layers, n = layer_groups(lm.shapes), min(24, lm.limit)
    stop, n_read = layers[len(layers) // 2].start, 2 * n // 3
    if not stop or not n_read:
        return  # no layer to stop at
    on = [row for row in range(n_read) if row % 3 or row == n_read - 1]
    noise = torch.Generator().manual_seed(0)
    for _ in range(3 if is_half else 1):
        rows = Rows.chain(torch.randint(0, lm.vocab, (n,), generator=noise).tolist(), 0)
        nothing, want = Dense(lm.shapes, lm.dtype, lm.device), range(n_read, n)
        with blame_files(lambda why: _unstopped(kind, why)):
            (first,) = run([ForwardRequest(lm, rows, nothing, layers=layers[0], is_prompt=True)])
            if first.hidden is None:
                raise _unstopped(kind, "a pass through its first layer alone does not stop")
            whole = _Hiding(ForwardRequest(lm, rows, nothing, want=want), stop, on)
            plain = call(lm.model, rows.ids, rows.pos, want, its_pass=whole)
            logits = run_to_end(_stopping(lm, rows, want, stop, on))
        off = relative_rms(logits.cpu().double(), plain.cpu().double(), len(want) // 2 if is_half else 0)
        if off <= WITHIN.get(lm.dtype, 0.05):
            return
    raise _unstopped(kind, f"{n} tokens, of which some continue later: off by {off:.2g}")


class _Hiding(ForwardPass):
    """A pass of all rows through all layers. From layer `stop` on, rows that continue do not attend to rows that
    stop."""

    def __init__(self, request: ForwardRequest, stop: int, on: Sequence[int]) -> None:
        super().__init__(request)
        n = self.rows.n_rows
        shown = torch.zeros(n, dtype=torch.bool).index_fill_(0, torch.tensor(on), True)
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        sees[on] &= shown
        self._stop, self._above = stop, replace(self.rows, tree_mask=sees)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        if layer == self._stop:
            self.rows, self._masks = self._above, {}
        return super().attend(layer, q, k, v, params, sink)


def _stopping(lm: LM, rows: Rows, want: range, stop: int, on: Sequence[int]) -> Passes[Tensor]:
    """Return the logits of the wanted rows after layer-wise prefill of the other rows."""
    kv = Dense(lm.shapes, lm.dtype, lm.device)
    read = rows.only(range(want.start))
    prompt = LayerwisePrefill(lm, kv, read, read.n_rows, (), lambda at, _: on if at == stop else None, may_revive=True)
    while not prompt.is_over:
        yield from prompt.step()
    late, hidden = rows.only(prompt.stopped[stop][0]), prompt.stopped[stop][1]
    for layers in (each for each in layer_groups(lm.shapes) if each.start >= stop):
        made = yield ForwardRequest(lm, late, PositionMaskedCache(kv), layers=layers, hidden=hidden, is_prompt=True)
        commit(kv, late, made, range(late.n_rows))
        hidden = hidden if made.hidden is None else made.hidden
    result = yield ForwardRequest(lm, rows.only(want), kv, want=range(len(want)), is_prompt=True)
    return result.logits


def _unstopped(kind: str, why: str) -> BadModel:
    return BadModel(
        f"{kind} cannot stop tokens between its layers",
        code="no_pruning",
        lines=[why],
        try_=["--set prune.method=none --set prefill.order=chunks"],
    )
