"""Gated delta rule row by row in plain PyTorch, and the convolution before it: the specification of gated_delta."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FUNCTIONS = {"silu": functional.silu, "sigmoid": torch.sigmoid, "softplus": functional.softplus}


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    is_normed: bool = True,
    is_captured: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the rule: q, k [N, K, Dk], v [N, H, Dv], g (log decay), beta [N, H], state [H, Dk, Dv] or None = zeros ->
    [N, H, Dv], and the state after the last row, in float32 or the dtype of `state`. `is_captured`: return the
    state as given, for `advance_`."""
    group, dtype = v.shape[1] // k.shape[1], v.dtype
    wide = torch.float32 if state is None else state.dtype
    q, k, v, g, beta = (t.to(wide) for t in (q, k, v, g, beta))
    if is_normed:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(group, dim=1) for t in (q / q.shape[-1] ** 0.5, k))
    s = v.new_zeros(*k.shape[1:], v.shape[2], dtype=wide) if state is None else state.clone()
    out = torch.empty_like(v)
    for i in range(len(v)):
        s *= g[i].exp()[:, None, None]
        delta = (v[i] - (s * k[i, :, :, None]).sum(1)) * beta[i, :, None]  # [H, Dv]
        s += k[i, :, :, None] * delta[:, None]
        out[i] = (s * q[i, :, :, None]).sum(1)
    return out.to(dtype), state if is_captured and state is not None else s


def advance_(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, count: Tensor, *, is_normed: bool = True
) -> None:
    """Update a state in place by the first `count` [1] rows; a row with neither decay nor beta leaves it as it is."""
    counts = torch.arange(len(v), device=v.device) < count
    q, k, v, g, beta = (torch.where(counts.view(-1, *[1] * (t.dim() - 1)), t, 0) for t in (q, k, v, g, beta))
    state.copy_(gated_delta(q, k, v, g, beta, state, is_normed=is_normed)[1])


def causal_conv(x: Tensor, w: Tensor, bias: Tensor | None, n: int, has_silu: bool) -> Tensor:
    """Convolve x [C, L], w [C, W], bias [C] or None -> [n, C]: the last n positions, each from its last W inputs."""
    found = functional.conv1d(x[None], w[:, None], bias, padding=w.shape[1] - 1, groups=len(w))[0, :, : x.shape[1]]
    return (functional.silu(found) if has_silu else found)[:, -n:].T
