"""Multi-head latent attention (arXiv 2405.04434): one latent vector is stored per token, as key and value of all heads.

A head's key is [W_k c, r] and its value W_v c, from the token's latent c [R] and a rotated part r [T] that heads share.
So a query [q, q_r] has the same score as [q W_k, q_r] with the key [c, r], and W_v is applied after the weighted sum.
In effect there is one KV head whose value is the first R numbers of its key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.kernels.linear import linear, pack, why_not

# relative error of keys and values
WITHIN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.04}


class LatentProjection(nn.Linear):
    """A replacement of the linear layer that expands latents [.., R] to keys and values of all heads [.., H * (P + E)].
    It also multiplies with the parts of that weight per head. It is never quantized."""

    # W_k and W_v in panels [H, panels, S, 64], if native products support them
    panels: tuple[Tensor, Tensor] | None = None

    def __init__(self, expands: nn.Linear, heads: int, plain: int, turned: int) -> None:
        """`plain`: P, the numbers of a key that are not rotated; `turned`: T."""
        super().__init__(expands.in_features, expands.out_features, bias=False, device="meta")
        self.weight, self.heads, self.plain, self.turned = expands.weight, heads, plain, turned
        self.train(expands.training)

    @property
    def rank(self) -> int:
        """Size of a latent, R."""
        return self.in_features

    @property
    def expand_threshold(self) -> float:
        """Number of prompt rows from which expanding latents is less work than attending to them directly."""
        a_head = self.out_features / self.heads  # P + E
        saved = 2 * self.rank + self.turned - a_head  # products per row and pair
        return 2 * self.rank * a_head / saved if saved > 0 else torch.inf

    def queries(self, q: Tensor) -> Tensor:
        """Return queries that score latents: q [H, N, P + T] -> [H, N, R + T]."""
        plain, turned = q[..., : self.plain], q[..., self.plain :]
        if self.panels is None:
            return torch.cat((torch.bmm(plain, self._by_head[:, : self.plain]), turned), 2)
        return torch.cat((_each(plain, self.panels[0], self.rank), turned), 2)

    def values(self, out: Tensor) -> Tensor:
        """Convert weighted sums of latents [H, N, R + T] to weighted sums of values [H, N, E]."""
        out, n = out[..., : self.rank].to(self.weight.dtype), self.out_features // self.heads - self.plain
        if self.panels is None:
            return torch.bmm(out, self._by_head[:, self.plain :].transpose(1, 2))
        return _each(out, self.panels[1], n)

    def nothing(self, latent: Tensor) -> Tensor:
        """Return one placeholder row for latents [.., N, R] that are not to be expanded; `forward` returns another such
        row."""
        return latent.new_zeros(()).expand(*latent.shape[:-2], 1, self.rank)

    def forward(self, latent: Tensor) -> Tensor:
        """Expand latents, as the replaced layer does."""
        if not latent.stride(-1):
            return latent[..., :1].expand(*latent.shape[:-1], self.out_features)
        return super().forward(latent)

    def install_kernels(self) -> None:
        """Use native products, row by row, if they support the weights."""
        parts = self._by_head[:, : self.plain].transpose(1, 2), self._by_head[:, self.plain :]
        if not any(why_not(part[0]) for part in parts):
            self.panels = tuple(torch.stack([pack(one) for one in part]) for part in parts)  # type: ignore[assignment]

    def expands(self, latent: Tensor, turned: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if keys k [H, N, P + T] and values v [H, N, E] follow from latents [N, R] and these rotated parts [N,
        T]."""
        made, at = torch.einsum("nr,hdr->hnd", latent, self._by_head), self.plain
        pairs = [(k[..., :at], made[..., :at]), (k[..., at:], turned.expand_as(k[..., at:])), (v, made[..., at:])]
        within = WITHIN.get(k.dtype, 0.04)
        return all(float((a - b).double().norm()) <= within * float(b.double().norm()) for a, b in pairs)

    @property
    def _by_head(self) -> Tensor:
        """The weight by head, [H, P + E, R]."""
        return self.weight.view(self.heads, -1, self.rank)


@dataclass(frozen=True, slots=True)
class Expanded:
    """The projection that expands a layer's latents, or the reason why there is none. Both are empty if the layer
    stores plain keys and values."""

    latent: LatentProjection | None = None
    why_not: str = ""  # the stored tensors are not known to be latents


def latent_of(module: nn.Module, noted: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> Expanded:
    """Return the latent projection of a layer that computed keys k and values v [1, H, N, ..] from tensors `noted` in
    its cache."""
    if noted is None or noted[0].shape[1:] == k.shape[1:]:
        return Expanded()
    latent, turned = noted
    expands = getattr(module, "kv_b_proj", None)
    if latent.shape[1] != 1 or turned.shape[1] != 1 or expands is None:
        return Expanded(why_not="its latents are expanded in an unknown way")
    if type(expands) not in (nn.Linear, LatentProjection):
        return Expanded(why_not=f"the weights that expand them are quantized ({type(expands).__name__})")
    heads, plain = k.shape[1], k.shape[3] - turned.shape[3]
    if expands.bias is not None or expands.weight.shape != (heads * (plain + v.shape[3]), latent.shape[3]):
        return Expanded(why_not="the weights that expand them have another shape")
    made = LatentProjection(expands, heads, plain, turned.shape[3])
    same = v.shape[1] == heads and made.expands(latent[0, 0], turned[0, 0], k[0], v[0])
    return Expanded(made) if same else Expanded(why_not="its keys and values are not the product of these weights")


def _each(x: Tensor, panels: Tensor, n: int) -> Tensor:
    """Multiply x [H, N, K] -> [H, N, n], with one weight per head."""
    return torch.stack([linear(one, weight, None, n) for one, weight in zip(x, panels, strict=True)])
