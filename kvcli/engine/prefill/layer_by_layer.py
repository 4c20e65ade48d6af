"""Layer-wise prefill of the prompts of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.forward_request import Rows, await_passes
from kvcli.engine.prefill.layerwise import LayerwisePrefill
from kvcli.kv.companion import Companion

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession


def require_layer_gates(lm: LM) -> None:
    """Raise BadModel if rows cannot be stopped between the layers of the model."""
    if lm.direct_forward is None:
        lm.check_layer_gates()


class LayerByLayer(Companion):
    """Layer-wise prefill of the prompts of a sequence. The policy runs once, after a prompt."""

    may_revive = False  # deferred tokens may be revived later

    def __init__(self, lm: LM) -> None:
        """Raises BadModel if rows cannot be stopped between the layers."""
        require_layer_gates(lm)
        self._lm = lm
        self._under_way: LayerwisePrefill | None = None

    @property
    def progress(self) -> int:
        """Number of tokens through all layers that equals the work done."""
        return self._under_way.n_done if self._under_way is not None else 0

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 if layers of a prompt under way evicted slots that are needed."""
        return n if self._under_way is None or self._under_way.kv.reaches(n) else 0

    def rewind(self, n: int, of: int) -> None:
        """Abandon a prompt under way."""
        self._under_way = None

    def prefill(self, text: GenerationSession, end: int) -> Passes[None]:
        """Run one pass of the prompt, whose tokens are committed when all layers are done."""
        prompt = self._under_way = self._under_way or (yield from await_passes(self.begin(text, end)))
        try:
            yield from prompt.step()
        except BaseException:
            text.rewind(text.committed + 1)
            raise
        if prompt.is_over:
            self.finish(text, prompt)
            text.committed += prompt.rows.n_rows
            self._under_way = None  # last: on an earlier failure the prompt is abandoned

    def begin(self, text: GenerationSession, end: int) -> LayerwisePrefill | Passes[LayerwisePrefill]:
        """Return the prefill of the tokens up to `end`, or of the first of them."""
        rows = Rows.chain(text.ids[text.committed : end], text.committed)
        recorded = text.query_recorder.rows_to_record_in_chunk(text.committed, rows.n_rows)
        return LayerwisePrefill(self._lm, text.cache, rows, text.chunk_rows, recorded)

    def finish(self, text: GenerationSession, prompt: LayerwisePrefill) -> None:
        """Take what a prefill leaves besides KV: the queries that the policy needs."""
        n = prompt.rows.n_rows
        if text.query_recorder.rows_to_record_in_chunk(text.committed, n):
            text.query_recorder.take(prompt.rows, prompt.recorded_rows, prompt.queries, range(n))
