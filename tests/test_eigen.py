"""Directions exist of numbers alone."""

from __future__ import annotations

import pytest
import torch

from kvcli.errors import BadModel
from kvcli.kv.formats.format import eigenvectors


@pytest.mark.parametrize("size", [2, 3, 16, 64, 128])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_named_at_every_size(size: int, odd: float) -> None:
    x = torch.eye(size, dtype=torch.float64).expand(2, -1, -1).clone()
    assert torch.equal(eigenvectors(x).abs(), x)
    x[1, size // 2, size // 2] = odd
    with pytest.raises(BadModel) as found:
        eigenvectors(x)
    assert found.value.code == "bad_slots"
