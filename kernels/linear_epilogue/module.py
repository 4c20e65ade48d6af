"""Linear layers of a model as one product, whose memory they share afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from kvcli.kernels.linear_epilogue import MergedLinear
from kvcli.kernels.linear_skinny import Weight


def merged(layers: Sequence[nn.Module]) -> MergedLinear | None:
    """Return layers of the same inputs as one product, with copies of their weights if there are several; None if they
    cannot be one."""
    skinny: list[Any] = [*layers]
    weights = [w for layer in layers if isinstance(w := getattr(layer, "as_weight", None), Weight)]
    if len(weights) < len(layers):
        return None
    weight = weights[0] if len(weights) == 1 else Weight.merged(weights)
    if weight is None:
        return None
    if all(layer.bias is None for layer in skinny):
        return MergedLinear(weight, None)
    like = next(layer.bias for layer in skinny if layer.bias is not None)
    sizes = [one.shape[0] for one in weights]
    biases = [like.new_zeros(n) if layer.bias is None else layer.bias for layer, n in zip(skinny, sizes, strict=True)]
    return MergedLinear(weight, torch.cat([bias.detach() for bias in biases]))


def share_(layers: Sequence[Any], product: MergedLinear) -> None:
    """Free the weights of these layers, which from now on compute with those of their product."""
    ends = [0, *accumulate(layer.out_features for layer in layers)]
    for layer, a, b in zip(layers, ends, ends[1:], strict=False):
        layer.be_part_of(product.weight, product.bias, slice(a, b))
