"""What `memory.budget` is spent on: rungs of fewer and fewer bits, and the bytes that slots take on each.

At fixed bytes more tokens in fewer bits beat fewer tokens in full (More Tokens, Lower Precision, arXiv 2412.12706): so
there are rungs between staying whole and being gone, and a policy says which slot lies on which. One of them may be a
file or host memory, in which recall finds slots again by an index of a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kernels.quantize_kv import LANES, width_of
from kvcli.kv.footprint import POSITION, STEP, far_slot_bytes
from kvcli.kv.slots import storing
from kvcli.kv.tiers.dense_ragged import room_of
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from kvcli.kv.slots import AttentionParams, LayerShape
    from kvcli.kv.sparse.settings import SparseMethod
    from kvcli.settings.schema import Kv, Memory

SCALE = 2  # bytes of a scale, and of a zero beside it
NOTED = 24  # bytes that a head of its own length is found by
WORTH = 8  # bytes that are remembered of a token of a head, gone or not: what its score and its worth are
PLACED = 10  # and that its worth, its rung and their order take beside these while slots are placed
FINDS = ", where recall finds them again"
TINY = 1e-6  # of a token, which rounding may cost


@dataclass(frozen=True)
class PrecisionBudget:
    """Rung 0 is the top, i the i-th of `bits`, then comes another place where there is one, and the last is nowhere."""

    asked: str  # memory.budget
    free: int  # bytes that "fit" means, with what is remembered of tokens
    shapes: Sequence[LayerShape]
    number: int  # bytes of one as it comes
    bits: Sequence[int]  # of the rungs below the top
    group: int  # keys that share scales below 8 bits, and numbers of a value that do
    beyond: Sequence[float]  # by layer: bytes of the device beside a slot of one head that lies elsewhere
    apart: Sequence[float] = ()  # by layer: those beside a head, whatever lies there; () = there is no other place
    is_read: bool = False  # is all of that place read? else recall finds what lies there
    holds: int | None = None  # slots a head that have room there, None = all
    lose: float = 0.0  # share of a text's worth that may be lost, for as few bytes as that takes; 0 = bytes alone say

    @property
    def is_share(self) -> bool:
        """Of what the text would take in full, instead of bytes?"""
        return self.asked.endswith("%")

    @property
    def share(self) -> float:
        """Of what the text would take in full; where nothing is asked, all of it."""
        return float(self.asked[:-1]) / 100 if self.is_share else 1.0

    @property
    def is_late(self) -> bool:
        """Are the bytes known only when a text has been read, as of a share, or of a quality?"""
        return self.is_share or not self.asked

    @property
    def last(self) -> int:
        """The rung of what is gone."""
        return len(self.bits) + (2 if self.has_place else 1)

    @property
    def has_place(self) -> bool:
        """Is the rung behind those of bits another place, as a file is?"""
        return bool(self.apart)

    def most(self, n: int) -> int:
        """Bytes that a text of n tokens may take."""
        if self.asked == "fit":
            return max(0, self.free - WORTH * self.heads * n)
        if not self.is_late:
            return size_of(self.asked)
        return int(self.share * n * self.of_token)

    @property
    def of_token(self) -> int:
        """Bytes of a token in full."""
        return sum(self.whole(layer) for layer in range(len(self.shapes)))

    @property
    def heads(self) -> int:
        """Of all layers, those that store."""
        return sum(of.n_kv_heads for of in self.shapes if of.numbers)

    def whole(self, layer: int) -> int:
        """Bytes of a token of all heads in full."""
        shape = self.shapes[layer]
        return shape.numbers * self.number + POSITION if shape.numbers else 0

    def each(self, layer: int) -> list[float]:
        """Bytes of a slot of one head, by rung."""
        k, v = self.shapes[layer].parts
        found: list[float] = [self._full(layer)]
        for bits in self.bits:
            scales = 2 * SCALE if bits == 8 else 2 * SCALE * (k / self.group + _groups(v, self.group))
            found.append(POSITION + (k * keys_in(bits) + v * bits) / 8 + scales)
        return [*found, self.beyond[layer], *([0.0] if self.has_place else [])]

    @property
    def by_rung(self) -> list[float]:
        """Bytes of a token of all heads and layers, by rung."""
        each = [(of.n_kv_heads, self.each(i)) for i, of in enumerate(self.shapes) if of.numbers]
        return [sum(n * costs[rung] for n, costs in each) for rung in range(self.last + 1)]

    @property
    def describe(self) -> str:
        """The plan in a line: how many tokens there is room for, were all of them on one rung, or what may be lost."""
        loses = f"memory.max_loss = {self.lose}: as few bytes as leave {1 - self.lose:.1%} of what a text is worth"
        if not self.asked:
            return f"{loses}, known once it has been read"
        rungs = self.by_rung[: self.last]
        lies = ["in full", *(f"in {bits} bits" for bits in self.bits), "elsewhere" + FINDS * (not self.is_read)]
        ways = ", ".join(
            f"{self._room(one, self.share * rungs[0])} {how}" for one, how in zip(rungs, lies, strict=False)
        )
        if self.has_place and self.holds is not None:
            ways += f" (no more than {self.holds:,})"
        return (
            f"memory.budget = {self.asked}: room for so many tokens{' of a text' * self.is_share}: {ways}, or a mixture"
            + (f"; {loses}, at most these" if self.lose else "")
        )

    def nbytes(self, layer: int, counts: Sequence[Sequence[int]]) -> float:
        """counts[rung][head] -> bytes that these slots take at most, with room to grow and keys that wait for their
        group."""
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
        """Whole tokens, of so many bytes one, for which there is room; or of a text how many in a hundred, where there
        are `each` for one."""
        if self.is_share:
            return f"{min(100, int(100 * each / max(one, TINY) + TINY))}%"
        return f"{int(self.most(0) / max(one, TINY) + TINY):,}"

    def _full(self, layer: int) -> int:
        shape = self.shapes[layer]
        return shape.numbers // shape.n_kv_heads * self.number + POSITION


def spending(
    memory: Memory,
    kv: Kv,
    recall: SparseMethod,
    sights: Sequence[AttentionParams],
    shapes: Sequence[LayerShape],
    number: int,
    *,
    kind: str,
    free: int,
    has_more: bool,
    holds: int | None,
) -> PrecisionBudget:
    """What `memory.budget` is spent on, on a device of such a kind; `has_more`: there is a place beside it, which
    `holds` so many slots a head."""
    read = recall.layers(storing(sights, shapes)) if has_more else ()
    index, apart = far_slot_bytes(recall, has_more, shapes, read, number, kind)
    of_kv = shapes, number, memory.bits, kv.group, index, apart, not recall.describe_read
    return PrecisionBudget(memory.budget.replace(" %", "%"), free, *of_kv, holds, memory.max_loss)


def keys_in(bits: int) -> int:
    """Bits of keys on a rung of so many: in two, slots do more harm than left out (tests/bench/rounding.py)."""
    return max(bits, 4)


def unit(bits: int, group: int) -> int:
    """Slots of a head that go down from so many bits together, as their keys share scales."""
    return group if bits < 8 else 1


def _groups(v_dim: int, group: int) -> int:
    """Scales of a value."""
    return v_dim // width_of(v_dim, group)
