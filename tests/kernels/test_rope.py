"""Keys turn as transformers turns them, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kernels.rope.reference import BLOCK

K, D = 3, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def table(dims: int = D, scaling: float = 1.0, interleaved: bool = False) -> Rotary:
    return Rotary(100.0 ** (-torch.arange(0, dims, 2) / dims), scaling, interleaved)


def keys(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(K, n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("start", [0, 97, 100_003])
def test_it_is_the_rotation_of_transformers(start: int, scaling: float, interleaved: bool) -> None:
    k, pos = keys(7, torch.float32), torch.arange(start, start + 7)
    angle = pos.float().unsqueeze(1) * table().inv_freq
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    cos, sin = (angle.cos() * scaling).unsqueeze(0), (angle.sin() * scaling).unsqueeze(0)
    _, want = (neighbours if interleaved else halves)(k.unsqueeze(0), k.unsqueeze(0), cos, sin)
    torch.testing.assert_close(rotate(k, pos, table(D, scaling, interleaved)), want[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [2, 10, D])
@pytest.mark.parametrize("n", [1, 5, BLOCK + 3])
def test_back_and_forth_is_where_it_was(n: int, dims: int, interleaved: bool, dtype: torch.dtype) -> None:
    k, rotary = keys(n, dtype), table(dims, 1.3, interleaved)
    pos = torch.randint(0, 50_000, (K, n), generator=torch.Generator().manual_seed(1))
    turned = rotate(k, pos, rotary)
    assert turned.dtype == dtype
    torch.testing.assert_close(turned[..., dims:], k[..., dims:], atol=0, rtol=0)
    assert not torch.allclose(turned[..., :dims], k[..., :dims], atol=0.1)
    torch.testing.assert_close(unrotate(turned, pos, rotary), k, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


def test_each_head_has_its_own_positions() -> None:
    k, rotary = keys(5), table()
    pos = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [7, 7, 7, -1, -1]])
    turned = rotate(k, pos, rotary)
    for head in range(K):
        torch.testing.assert_close(turned[head], rotate(k[head], pos[head], rotary))
    torch.testing.assert_close(rotate(k, pos[:1], rotary)[2], rotate(k[2], pos[0], rotary))


def test_turning_by_a_difference_moves_a_key() -> None:
    k, rotary = keys(5), table()
    here, there = torch.arange(5), torch.arange(5) + 40
    torch.testing.assert_close(
        rotate(rotate(k, here, rotary), there - here, rotary), rotate(k, there, rotary), atol=1e-5, rtol=1e-5
    )


def test_what_is_given_stays_as_it_is() -> None:
    k = keys(5)
    before = k.clone()
    rotate(k, torch.arange(5), table())
    unrotate(k.transpose(0, 1).contiguous().transpose(0, 1), torch.arange(5), table())
    assert torch.equal(k, before)
