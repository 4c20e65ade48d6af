"""LagKV: score slots by how far their keys and values deviate, scaled by the next part's range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.topk import Alloc, TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Lag(TopK):
    """LagKV (2025, arXiv 2504.04704): keeps tokens whose keys and values deviate most from the next part of the text.

    With 50% of the tokens, the demo model's accuracy is 0.58, or 0.375 less than with all (measurements/policies.md).
    """

    alloc: Alloc = "uniform"
    part: Annotated[int, Range(2)] = 128  # tokens per part
    across: bool = False  # rank tokens of all parts together, not an equal share of each

    name: ClassVar[str] = "lag"
    by: ClassVar[str] = "how far its KV deviates from the next tokens"

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the rank of each token's deviation, scaled by the next part, within its part; `across` skips ranking,
        so that parts compete. Parts begin after the sinks. Sinks and tokens that no whole part follows score highest.
        """
        import torch

        from kvcli.policies.scoring.token_units import wide

        size = self.part
        order = s.pos.where(s.pos >= 0, torch.iinfo(s.pos.dtype).max).argsort(dim=1, stable=True)  # empty slots last
        count = (s.pos >= 0).sum(1, keepdim=True) - self.sinks  # [K, 1] tokens cut into parts
        parts = (s.n_slots - self.sinks) // size
        out = torch.ones_like(s.pos, dtype=wide(s.k[:, :0]).dtype)
        if parts < 2:
            return out
        body = order[:, self.sinks : self.sinks + parts * size]
        spread = (_spread(s.k, body, size) + _spread(s.v, body, size)) / 2  # [K, parts - 1, size]
        if not self.across:
            spread = spread.argsort(dim=2, stable=True).argsort(dim=2).to(spread.dtype) / size
        # the next part has to be whole, too
        whole = (torch.arange(2, parts + 1, device=s.pos.device) * size <= count).unsqueeze(-1)
        spread = spread.where(whole, 1.0)
        return out.scatter_(1, body[:, : (parts - 1) * size], spread.flatten(1))


def _spread(x: Tensor, body: Tensor, size: int) -> Tensor:
    """Return each token's share of its part's deviation over channels [K, parts - 1, size]."""
    import torch

    from kvcli.policies.scoring.token_units import wide

    cut = wide(x).gather(1, body.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    cut = cut.view(x.shape[0], -1, size, x.shape[2])  # [K, parts, size, D]
    low, high = cut[:, 1:].amin(2, keepdim=True), cut[:, 1:].amax(2, keepdim=True)
    room = (high - low).clamp_min(torch.finfo(cut.dtype).tiny)  # for constant channels
    spread: Tensor = ((cut[:, :-1] - low) / room).std(dim=3).softmax(dim=2)
    return spread
