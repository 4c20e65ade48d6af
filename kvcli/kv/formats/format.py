"""KV format protocol: how old slots are stored, chosen by `kv_format.method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvcli.kernels.rope import Rotary
from kvcli.kv.slots import AttentionParams, LayerShape

if TYPE_CHECKING:
    from kvcli.kv.sparse.page_source import PageTier
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class FormatContext:
    """Properties of the model that a KV format may use."""

    shapes: Sequence[LayerShape]  # by layer; a layer that reads another layer's slots stores none
    dtype: torch.dtype  # data type of given slots and of dequantized slots
    attention_params: Sequence[AttentionParams]  # by layer
    # rotary embeddings by layer; raises BadModel if they are not a fixed table
    turns: Callable[[], Sequence[Rotary | None]]


class KVFormat(Protocol):
    """A KV format: a frozen dataclass whose fields are the keys of `[kv_format]`."""

    def is_active(self, kv: Kv) -> bool:
        """True if these settings store slots in this format."""

    def unsupported_keys(self, kv: Kv) -> Mapping[str, str]:
        """Return keys of `[kv]` that the format does not support, with reasons. `tier` checks the model."""

    def tier(self, of: FormatContext, device: torch.device, kv: Kv) -> PageTier:
        """Return an empty tier. Raises BadConfig or BadModel if the model is not supported."""

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """Return bytes of a slot of all heads with its position; `number`: bytes of an element in full precision."""


Codes: TypeAlias = tuple[Tensor, ...]  # [B, ..] each: B blocks, whose sizes depend on the settings and the model alone


class BlockFunctions(Protocol):
    """The pair of functions by which `BlockTier` writes and reads blocks of slots."""

    @property
    def rope(self) -> Literal["after", "before"]:
        """Stage at which keys are quantized: after or before the rotary embedding."""

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        """Quantize k [B, h, g, D] and v [B, h, g, E], in float32 or wider."""

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dequantize to k [B, h, g, D] and v [B, h, g, E] of type `exact`, for `dims` (D, E)."""

    def heads(self, n: int) -> int:
        """Return how many of n KV heads are quantized together."""

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        """Raise BadConfig for slots of a shape that the format cannot hold."""
