"""Precision budget: `memory.budget` is divided among slots at fewer and fewer bits, each with its bytes per slot.

At fixed bytes more tokens in fewer bits beat fewer tokens in full (More Tokens, Lower Precision, arXiv 2412.12706).
Therefore levels of fewer bits lie between full precision and eviction, and a policy assigns each slot to a level. One
level may be a file or host memory, where sparse attention finds slots by an index of a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.kernels.quantize_kv import LANES, width_of
from kvcli.kv.footprint import STEP
from kvcli.kv.slots import POSITION, LayerShape
from kvcli.kv.tiers.dense_layer import room_of
from kvcli.settings.schema import size_of

SCALE = 2  # bytes of a scale; a zero point takes as many
NOTED = 24  # bytes of the tables that locate one head
WORTH = 8  # bytes per token and head for the two stored scores, evicted tokens included
PLACED = 10  # more bytes per token and head for score, level and order while slots are assigned to levels
FINDS = ", read by sparse attention"
TINY = 1e-6  # share of a token; absorbs floating-point error


@dataclass(frozen=True)
class PrecisionBudget:
    """Precision budget. Level 0 is the top, level i the i-th of `bits`, then offload (if any), and last eviction."""

    asked: str  # memory.budget
    free: int  # bytes that "fit" stands for, stored scores included
    shapes: Sequence[LayerShape]
    number: int  # bytes of an element in full precision
    bits: Sequence[int]  # bits of the levels below the top
    group: int  # keys (and elements of a value) that share a scale below 8 bits
    beyond: Sequence[float]  # by layer: device bytes per offloaded slot of one head
    apart: Sequence[float] = ()  # by layer: constant device bytes per head for offloading; () = no offload
    is_read: bool = False  # True: all offloaded slots are read; False: sparse attention selects them
    holds: int | None = None  # offload capacity in slots per head, None = all
    lose: float = 0.0  # share of the total score that may be lost to save bytes; 0 = only bytes limit

    @property
    def is_share(self) -> bool:
        """True if the budget is a share of the full KV cache, not a number of bytes."""
        return self.asked.endswith("%")

    @property
    def share(self) -> float:
        """Return the share of the full KV cache; 1.0 if no share is set."""
        return float(self.asked[:-1]) / 100 if self.is_share else 1.0

    @property
    def is_late(self) -> bool:
        """True if the bytes are known only after prefill, because a share or `memory.max_loss` sets them."""
        return self.is_share or not self.asked

    @property
    def last(self) -> int:
        """Level of evicted slots."""
        return len(self.bits) + (2 if self.has_place else 1)

    @property
    def has_place(self) -> bool:
        """True if the level after those of `bits` is offloaded (host memory or a file)."""
        return bool(self.apart)

    def most(self, n: int) -> int:
        """Return the bytes that the KV cache of n tokens may take."""
        if self.asked == "fit":
            return max(0, self.free - WORTH * self.heads * n)
        if not self.is_late:
            return size_of(self.asked)
        return int(self.share * n * self.of_token)

    @property
    def of_token(self) -> int:
        """Bytes of a token in full precision."""
        return sum(self.whole(layer) for layer in range(len(self.shapes)))

    @property
    def heads(self) -> int:
        """Number of KV heads of all storing layers."""
        return sum(of.n_kv_heads for of in self.shapes if of.numbers)

    def whole(self, layer: int) -> int:
        """Return the bytes of a token in one layer, all heads, full precision."""
        return self.shapes[layer].slot_bytes(self.number)

    def each(self, layer: int) -> list[float]:
        """Return the bytes of a slot of one head, by level."""
        k, v = self.shapes[layer].parts
        found: list[float] = [self._full(layer)]
        for bits in self.bits:
            scales = 2 * SCALE if bits == 8 else 2 * SCALE * (k / self.group + _groups(v, self.group))
            found.append(POSITION + (k * keys_in(bits) + v * bits) / 8 + scales)
        return [*found, self.beyond[layer], *([0.0] if self.has_place else [])]

    @property
    def by_level(self) -> list[float]:
        """Bytes of a token of all heads and layers, by level."""
        each = [(of.n_kv_heads, self.each(i)) for i, of in enumerate(self.shapes) if of.numbers]
        return [sum(n * costs[level] for n, costs in each) for level in range(self.last + 1)]

    @property
    def describe(self) -> str:
        """Line for the user: the tokens that fit if all were at one level, or the loss allowed."""
        loses = f"memory.max_loss = {self.lose}: as few bytes as keep {1 - self.lose:.1%} of the score"
        if not self.asked:
            return f"{loses}, known once it has been read"
        levels = self.by_level[: self.last]
        phrases = ["in full", *(f"in {bits} bits" for bits in self.bits), "elsewhere" + FINDS * (not self.is_read)]
        ways = ", ".join(
            f"{self._room(one, self.share * levels[0])} {how}" for one, how in zip(levels, phrases, strict=False)
        )
        if self.has_place and self.holds is not None:
            ways += f" (no more than {self.holds:,})"
        return f"memory.budget = {self.asked}: tokens that fit{' of a text' * self.is_share}: {ways}, or a mixture" + (
            f"; {loses}, at most these" if self.lose else ""
        )

    def nbytes(self, layer: int, counts: Sequence[Sequence[int]]) -> float:
        """Return the most bytes that counts[level][head] slots take, with spare capacity and keys of incomplete
        groups in full precision."""
        k, v = self.shapes[layer].parts
        total: float = sum(room_of(n, STEP) * self._full(layer) + NOTED for n in counts[0])
        for bits, each in zip(self.bits, counts[1:], strict=False):
            for n in each:
                total += n * POSITION
                if bits == 8:
                    total += n * (k + SCALE) + -(-n // LANES) * LANES * (v + SCALE)
                    continue
                packed = n // self.group * self.group
                total += (
                    packed * k * keys_in(bits) / 8
                    + packed // self.group * k * 2 * SCALE
                    + (n - packed) * k * self.number
                )
                total += n * (v * bits / 8 + _groups(v, self.group) * 2 * SCALE)
        apart = self.apart[layer] * len(counts[0]) if self.has_place else 0.0
        return total + self.beyond[layer] * sum(counts[len(self.bits) + 1]) + apart

    def _room(self, one: float, each: float) -> str:
        """Return the number of tokens of `one` bytes that fit; for a share, the percentage of tokens, given
        `each` bytes per token."""
        if self.is_share:
            return f"{min(100, int(100 * each / max(one, TINY) + TINY))}%"
        return f"{int(self.most(0) / max(one, TINY) + TINY):,}"

    def _full(self, layer: int) -> int:
        shape = self.shapes[layer]
        return shape.numbers // shape.n_kv_heads * self.number + POSITION


def keys_in(bits: int) -> int:
    """Return the bits of keys: at least 4, as 2-bit keys hurt more than eviction (tests/bench/rounding.py)."""
    return max(bits, 4)


def unit(bits: int, group: int) -> int:
    """Return how many slots of a head are demoted together from a level of `bits`, because their keys share scales."""
    return group if bits < 8 else 1


def _groups(v_dim: int, group: int) -> int:
    """Return the number of scales of a value."""
    return v_dim // width_of(v_dim, group)
