"""CurDKV: score slots by the lengths of key and value within a window of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class CurDKV(TopK):
    """CurDKV (Sengupta et al., 2025, arXiv 2509.15038): keeps tokens with long keys and values among neighbours.

    With 50% of the tokens, the demo finds 0.44 of the facts, with `keydiff` 0.31 (measurements/lab-log.md).
    """

    part: Annotated[int, Range(1)] = 16  # neighbours among which lengths are compared; 1 = every token is as good

    name: ClassVar[str] = "curdkv"
    by: ClassVar[str] = "the lengths of its key and value"
    is_share: ClassVar[bool] = False

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the product of each slot's shares of the squared key lengths and value lengths of its window.

        Windows of `part` slots follow each other from the first one on; the last may be shorter. Squared lengths stand
        for leverage scores, as in the paper's code.
        """
        import torch
        from torch.nn.functional import pad

        from kvcli.policies.scoring.token_units import wide

        order = s.pos.where(s.pos >= 0, torch.iinfo(s.pos.dtype).max).argsort(dim=1, stable=True)  # empty slots last
        found = torch.ones_like(s.pos, dtype=wide(s.k[:, :0]).dtype)
        for x in (s.k, s.v):
            length = wide(x).square().sum(2).masked_fill(s.pos < 0, 0.0).gather(1, order)
            parts = pad(length, (0, -length.shape[1] % self.part)).view(length.shape[0], -1, self.part)
            share = parts / parts.sum(2, keepdim=True).clamp_min(torch.finfo(parts.dtype).tiny)
            found *= torch.empty_like(found).scatter_(1, order, share.flatten(1)[:, : length.shape[1]])
        return found
