"""A small Llama for training on a CPU; parameter names and maths are those of transformers."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Letters: N rows, T tokens, D model width, H query heads, K key heads, d head width.


@dataclass(frozen=True)
class Shape:
    """The size of the network."""

    vocabulary: int = 1_888
    width: int = 320
    layers: int = 6
    heads: int = 4
    key_heads: int = 2
    head_width: int = 64
    ffn: int = 512
    # so large that more than half of the rotations stand still over 8k tokens: matching by content ignores distance
    rope_theta: float = 1e9
    norm_eps: float = 1e-5
    max_positions: int = 8_192


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.key_heads * shape.head_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.key_heads * shape.head_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        n, t, _ = x.shape
        q = rotate(self.q_proj(x).view(n, t, s.heads, s.head_width), cos, sin).transpose(1, 2)  # [N, H, T, d]
        k = rotate(self.k_proj(x).view(n, t, s.key_heads, s.head_width), cos, sin).transpose(1, 2)  # [N, K, T, d]
        v = self.v_proj(x).view(n, t, s.key_heads, s.head_width).transpose(1, 2)
        group = s.heads // s.key_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(n, t, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.norm_eps)

    def blocks(self) -> list[Layer]:
        """The layers, by their own type."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


@dataclass(frozen=True)
class Score:
    """The weighted loss of one batch, with every learned token's own loss, hit and weight."""

    loss: Tensor  # scalar
    losses: Tensor  # [tokens]
    hits: Tensor  # [tokens] bool
    weights: Tensor  # [tokens]


class Network(nn.Module):
    """Llama with tied embeddings, run in `dtype` over float32 weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Body(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.05
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * shape.layers)
                nn.init.normal_(parameter, 0, std)

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def rope(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Tables [T, 1, d]; the angles are taken in float32, since bfloat16 cannot count to 8,192."""
        d = self.shape.head_width
        frequency = self.shape.rope_theta ** (-torch.arange(0, d, 2).float() / d)
        angle = torch.outer(torch.arange(n_tokens).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)[:, None, :]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def hidden(self, ids: Tensor) -> Tensor:
        """[N, T] ids to [N, T, D] states behind the last norm."""
        with self._precision():
            cos, sin = self.rope(ids.shape[1])
            x = self.model.embed_tokens(ids).to(self.dtype)
            for layer in self.model.layers:
                x = layer(x, cos, sin)
            out: Tensor = self.model.norm(x)
            return out

    def logits(self, hidden: Tensor) -> Tensor:
        with self._precision():
            return F.linear(hidden, self.model.embed_tokens.weight).float()

    def score(self, ids: Tensor, weights: Tensor) -> Score:
        """Weighted next-token loss; only tokens of positive weight pass through the output layer."""
        learned = weights[:, 1:] > 0
        logits = self.logits(self.hidden(ids)[:, :-1][learned])
        target, weight = ids[:, 1:][learned], weights[:, 1:][learned]
        losses = F.cross_entropy(logits, target, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        return Score(loss, losses.detach(), logits.detach().argmax(-1) == target, weight)
