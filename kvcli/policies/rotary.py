"""The rotary embedding of each layer, found by asking the model: which channels turn together, and how fast.

transformers keeps the frequencies in buffers and the pairing of channels in each family's code. So each candidate
(frequencies of the model, channels paired by halves or side by side, or no turning at all) is held against queries of
one token at several positions, as the layers themselves make them; what does not turn them alike is not the layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcli.kv.slots import Sight
    from kvcli.model import LM

PLACES = (0, 1, 5, 26, 131)  # positions tried: fast channels differ at the first, slow ones at the last
# relative error of a turned query: a wrong candidate is off by tenths, rounding by what the model's numbers allow
WITHIN = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class Rotary:
    """How one layer turns its queries and keys."""

    speed: Tensor  # [R / 2] float32, radians a position; channels from R on never turn
    by_halves: bool = True  # channel i turns with i + R / 2; else 2i with 2i + 1

    def turned(self, x: Tensor, pos: Tensor, back: bool = False) -> Tensor:
        """x [.., N, D] turned as at positions pos [N], from how it stands at position 0; `back` undoes it."""
        cos, sin = self.angles(pos, x.dtype)
        sin = -sin if back else sin
        turning, rest = x[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
        if self.by_halves:
            a, b = turning.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        a, b = turning[..., 0::2], turning[..., 1::2]
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)

    def mean_turn(self, pos: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """[D, D]: the mean over positions of the matrices that turn a column of D numbers."""
        cos, sin = (t.mean(0) for t in self.angles(pos, dtype))
        channel = torch.arange(2 * cos.shape[0], device=pos.device)
        a, b = channel.chunk(2) if self.by_halves else (channel[0::2], channel[1::2])
        mean = torch.eye(dim, dtype=dtype, device=pos.device)
        mean[a, a], mean[b, b], mean[a, b], mean[b, a] = cos, cos, -sin, sin
        return mean

    def angles(self, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [N, R / 2], from angles in float32, as transformers takes them."""
        angle = pos.float().unsqueeze(1) * self.speed.to(pos.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass
class _Listener:
    """Travels in place of a pass and notes the queries of each layer; attention gives nothing."""

    queries: list[Tensor] = field(default_factory=list)  # per layer [H, N, D]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sink: Tensor | None) -> Tensor:
        self.queries.append(q)
        return torch.zeros_like(q)


def rotaries(lm: LM) -> list[Rotary | None]:
    """How each layer turns; None where no candidate does as the layer does."""
    pos = torch.tensor([p for p in PLACES if p < lm.limit], device=lm.device)
    heard = _Listener()
    with torch.inference_mode():  # one token that sees nothing: only its position makes a difference
        lm.model(
            input_ids=torch.full_like(pos, lm.vocab // 2).unsqueeze(0),
            position_ids=pos.unsqueeze(0),
            use_cache=False,
            logits_to_keep=pos[:1],
            kvcli_pass=heard,
        )
    candidates = list(_candidates(lm.model))
    return [_matching(q.to(torch.promote_types(q.dtype, torch.float32)), pos, candidates, lm) for q in heard.queries]


def _candidates(model: Any) -> Iterator[Rotary]:
    yield Rotary(torch.zeros(0))
    for module in model.modules():
        for name, speed in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                yield from (Rotary(speed.float().clone(), by_halves) for by_halves in (True, False))


def _matching(q: Tensor, pos: Tensor, candidates: Sequence[Rotary], lm: LM) -> Rotary | None:
    """The candidate that turns a layer's query at position 0 into those at all others."""
    for rotary in candidates:
        off = (rotary.turned(q[:, :1].expand_as(q), pos) - q).norm() / q.norm().clamp_min(1e-30)
        if float(off) <= WITHIN.get(lm.dtype, 0.03):
            return rotary
    return None
