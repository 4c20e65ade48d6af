"""A decoding loop of a Llama as small programs have it: one static cache, torch's own int4 product, no more.

What `torch.compile` with CUDA graphs makes of it is the speed that a user without kvcli can have from torch alone, on
the same weights. The int4 product (`_weight_int4pack_mm`) has groups of 128 with a scale and a zero each, as ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUP, TILES = 128, 8


class Int4(nn.Module):
    """A linear layer in int4, by torch's kernel of this device."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        n, k = weight.shape
        group = min(GROUP, k & -k)
        blocks = weight.float().view(n, k // group, group)
        low, high = blocks.amin(2), blocks.amax(2)
        scale = ((high - low) / 15).clamp_min(1e-6)
        codes = ((blocks - low[..., None]) / scale[..., None]).round().clamp(0, 15).int().view(n, k)
        zero = low + 8 * scale  # of (code - 8) * scale + zero
        self.scales = nn.Buffer(torch.stack([scale, zero], 2).transpose(0, 1).contiguous().to(weight.dtype))
        self.n, self.group, self.is_cpu = n, group, weight.device.type == "cpu"
        if self.is_cpu:
            data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        else:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            data = torch.ops.aten._convert_weight_to_int4pack(pairs, TILES)
        self.data = nn.Buffer(data)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu if self.is_cpu else torch.ops.aten._weight_int4pack_mm
        found: Tensor = product(x.view(-1, x.shape[-1]), self.data, self.group, self.scales)
        return found.view(*x.shape[:-1], self.n)


class StaticLoop(nn.Module):
    """The decoder of a transformers Llama, one row a call, over a cache of fixed length."""

    def __init__(self, model: Any, room: int, *, is_packed: bool) -> None:
        super().__init__()
        config, device = model.config, model.device
        self.heads, self.kv, self.d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps = config.rms_norm_eps

        def linear(*layers: nn.Linear) -> nn.Module:
            weight = torch.cat([layer.weight.detach() for layer in layers])
            if is_packed:
                return Int4(weight)
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            made.weight = nn.Parameter(weight, requires_grad=False)
            return made

        self.embedding, self.head, self.norm = model.model.embed_tokens, model.lm_head, model.model.norm.weight
        self.layers = nn.ModuleList()
        for layer in model.model.layers:
            attends, mlp = layer.self_attn, layer.mlp
            made = nn.Module()
            made.qkv, made.o = linear(attends.q_proj, attends.k_proj, attends.v_proj), linear(attends.o_proj)
            made.up, made.down = linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj)
            made.first, made.second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            made.cache = nn.Buffer(torch.zeros(2, 1, self.kv, room, self.d, dtype=model.dtype, device=device))
            self.layers.append(made)
        freq = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, self.d, 2, device=device) / self.d)
        self.freq, self.at = nn.Buffer(freq), nn.Buffer(torch.arange(room, device=device))

    def forward(self, token: Tensor, pos: Tensor) -> Tensor:
        """The next token [1, 1] behind the one at `pos` [1]."""
        x = self.embedding(token)  # [1, 1, E]
        angles = (pos.float() * self.freq).repeat(2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        sees = (self.at <= pos)[None, None, None]
        for layer in self.layers:
            h = functional.rms_norm(x, x.shape[-1:], layer.first, self.eps)
            q, k, v = layer.qkv(h).view(1, -1, 1, self.d).split([self.heads, self.kv, self.kv], 1)
            q, k = (t * cos + torch.cat([-t[..., self.d // 2 :], t[..., : self.d // 2]], -1) * sin for t in (q, k))
            layer.cache.index_copy_(3, pos, torch.stack([k, v]))
            keys, values = layer.cache.unbind(0)
            out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=sees, enable_gqa=True)
            x = x + layer.o(out.view(1, 1, -1))
            gate, up = layer.up(functional.rms_norm(x, x.shape[-1:], layer.second, self.eps)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        x = functional.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        return self.head(x).argmax(-1)
