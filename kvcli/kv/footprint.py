"""Footprint of a method: all that memory planning and time estimates know of it. And sizes that tiers share."""

from __future__ import annotations

from dataclasses import astuple, dataclass

STEP = 64  # slots by which the top of a tiered cache grows: it is short, or memory is scarce
FIRST = 256  # slots of the first extent of a layer, in a file or on the host


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model on a device that footprints depend on. With the defaults, a footprint counts slots and rows."""

    heads: int = 0  # query heads per layer
    hidden: int = 0  # numbers of a hidden state
    number: int = 2  # bytes per number of the model's dtype
    last_slot: int = 0  # bytes of a dense slot of the last layer that stores KV
    token: int = 0  # bytes of a token's KV in all layers, in full precision
    state: int = 0  # bytes of one recurrent state
    device: str = "cpu"  # type of the device


NO_SIZES = ModelSizes()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Footprint of a method for a sequence of n tokens. Footprints add."""

    slots: int = 0  # KV slots that a head keeps at a compression point, averaged over heads
    peak: int = 0  # most slots of a head during prefill, not counting the chunk that is computed
    beside: int = 0  # bytes on the device, besides these slots
    host: int = 0  # bytes of host memory
    again: int = 0  # rows that run again after prefill; each attends to all slots stored by then
    scratch: int = 0  # bytes while tokens of one layer are scored, besides those of a pass
    chunk: int = 0  # of a draft model: most rows of a prefill pass
    rows: int = 0  # of a draft model: most rows of a pass with logits
    captured: tuple[int, ...] = ()  # rows of each pass that a GPU captures, besides those that verify
    says: str = ""  # which tokens of a long sequence are kept, in words; "" = all
    is_uneven: bool = False  # heads may keep different numbers of slots

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class IndexBytes:
    """Device bytes of a sparse attention index, for one KV head."""

    slot: float = 0.0  # per slot
    head: float = 0.0  # whatever the number of slots is
    near: float = 0.0  # page cache, per offloaded slot
