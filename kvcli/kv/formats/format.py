"""Forms: how slots lie that came down from full numbers, which is what a method of the table `[kv_format]` says."""

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
    """What a form may know of the model whose slots it holds."""

    shapes: Sequence[LayerShape]  # by layer; one that shares another's slots has none here
    dtype: torch.dtype  # numbers that come in, and that rows read
    sights: Sequence[AttentionParams]  # by layer
    turns: Callable[[], Sequence[Rotary | None]]  # of keys, by layer; raises BadModel where no fixed table says it


class KVFormat(Protocol):
    """A frozen dataclass whose fields are the keys of `[kv_format]`."""

    def is_active(self, kv: Kv) -> bool:
        """Do slots come down to it under these keys?"""

    def unsupported_keys(self, kv: Kv) -> Mapping[str, str]:
        """Key of `[kv]` -> why this form cannot keep what it says; what a model does not allow `tier` refuses."""

    @property
    def is_joint(self) -> bool:
        """Are slots of several heads rounded together, which therefore must hold the same ones?"""

    def tier(self, of: FormatContext, device: torch.device, kv: Kv) -> PageTier:
        """An empty one. Raises BadConfig, BadModel where this model does not suit it."""

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """Of a slot of all heads of a layer that stores, its position included; `number`: bytes of one as it came."""


Codes: TypeAlias = tuple[Tensor, ...]  # [B, ..] each: B blocks, whose sizes depend on the settings and the model alone


class BlockFunctions(Protocol):
    """The pair of functions by which `BlockTier` writes and reads blocks of slots."""

    @property
    def rope(self) -> Literal["after", "before"]:
        """Whether keys are stored after or before the rotary embedding."""

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        """k [B, h, g, D], v [B, h, g, E] in float32 or wider -> codes."""

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        """The inverse, up to rounding: k [B, h, g, D] and v [B, h, g, E] of type `exact`, for `dims` (D, E)."""

    def heads(self, n: int) -> int:
        """Of n KV heads, the number that is quantized together."""

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        """Raise BadConfig for slots of a shape that the format cannot hold."""
