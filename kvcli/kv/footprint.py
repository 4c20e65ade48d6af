"""Sizes of KV slots that tiers, KV formats and memory planning share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.kv.slots import LayerShape

STEP = 64  # slots by which the top of a tiered cache grows: it is short, or memory is scarce
POSITION = 4  # bytes
FIRST = 256  # slots of the first extent of a layer, in a file or on the host


def full_bytes(shape: LayerShape, number: int) -> int:
    """Return the bytes of a dense slot of all heads of a layer; 0 if it reads another layer's slots."""
    return shape.numbers * number + POSITION if shape.numbers else 0
