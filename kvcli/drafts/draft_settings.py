"""Settings shared by all drafters that build a draft tree and measure pass times."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.settings.schema import Range
from kvcli.settings.values import WrongValue, check, keys_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcli.engine.drafting.drafter import ModelPair


def clock_of(pair: ModelPair | None) -> Callable[[], float]:
    """Return the clock by which a drafter decides, in seconds: the target model's, which all its ranks read alike."""
    return perf_counter if pair is None else pair.target.clock


@dataclass(frozen=True)
class DraftSettings:
    """Settings of every drafting method that adapts the draft size to measured pass times."""

    checks: ClassVar[bool] = False  # True if a full KV cache may verify tokens drafted over a smaller one

    # 15 draft tokens make a pass of 16 rows, a whole block for most kernels
    max: Annotated[int, Range(1, 256)] = 15  # draft tokens verified per pass, at most
    branches: Annotated[int, Range(1, 64)] = 3  # alternative draft tokens at one position, at most
    adaptive: bool = True  # draft size by measured pass times; false = always all available draft tokens
    require_batch_invariance: bool = False  # draft only if the model is batch invariant (same bits in any batch)
    min_speedup: Annotated[float, Range(0, 1)] = 0.98  # pause drafting below this multiple of plain decoding speed
    baseline_interval: Annotated[int, Range(8, 4096)] = 64  # passes between two plain passes that measure plain speed

    @property
    def rows(self) -> int:
        """Maximum rows of a pass: the pending token and the draft tokens."""
        return 1 + self.max

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect under the present settings: key -> the key that disables it."""
        return {} if self.adaptive else dict.fromkeys(("min_speedup", "baseline_interval"), "adaptive")

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the memory for n tokens of the drafter's index, and of layers that are not the target model's. Slots
        that a cache view copies, and a separate draft model, are not counted."""
        return Footprint()

    def view_slots(self, n: int) -> int:
        """Return how many of n slots per head a cache view copies: 0 without lookahead."""
        return 0

    def __post_init__(self) -> None:
        """Raise ValueError for values that a profile would refuse. Defaults are skipped: checking may import a lot."""
        method: type = type(self)
        for key in keys_of(method).values():
            value = getattr(self, key.name)
            try:
                if value is not key.default:
                    check(key.hint, value)
            except WrongValue as wrong:
                raise ValueError(f"{key.name} = {wrong.message}: {wrong.hint}") from wrong
