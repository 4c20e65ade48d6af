"""Settings that every drafter with a tree and a clock has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.settings.schema import Range
from kvcli.settings.values import WrongValue, check, keys_of

if TYPE_CHECKING:
    from kvcli.settings.schema import DraftModelRef


@dataclass(frozen=True)
class DraftSettings:
    """Keys of every method that drafts as much as pays."""

    checks: ClassVar[bool] = False  # may a whole past check what this guesses over a smaller one?

    # with 15 guesses a pass has 16 rows, a whole block for most kernels
    max: Annotated[int, Range(1, 256)] = 15  # rows verified beside the pending one, at most
    branches: Annotated[int, Range(1, 64)] = 3  # different tokens tried at one place, at most
    adaptive: bool = True  # draft as much as the measured pass times justify; false = always, as much as there is
    require_batch_invariance: bool = False  # draft only where a token has the same bits guessed or written alone
    min_speedup: Annotated[float, Range(0, 1)] = 0.98  # pause when slower than this multiple of plain decoding
    baseline_interval: Annotated[int, Range(8, 4096)] = 64  # passes between two plain passes timed as the yardstick

    @property
    def rows(self) -> int:
        """Of a pass, at most: the pending token and guesses."""
        return 1 + self.max

    @property
    def second(self) -> DraftModelRef | None:
        """The model that drafts, if there is one."""
        return None

    def ignored_keys(self) -> dict[str, str]:
        """Keys that nothing reads as the others are: key -> the one in whose way it is."""
        return {} if self.adaptive else dict.fromkeys(("min_speedup", "baseline_interval"), "adaptive")

    def draft_slots(self, n: int, device: str = "cpu") -> int:
        """Of n tokens, those whose keys and values layers beside the model's have there."""
        return 0

    def view_slots(self, n: int) -> int:
        """How many of n slots a head a view keeps a copy of: none, without scouts."""
        return 0

    def __post_init__(self) -> None:
        """What a profile would refuse is refused here, too; defaults are right, and checking one may import a lot."""
        method: type = type(self)
        for key in keys_of(method).values():
            value = getattr(self, key.name)
            try:
                if value is not key.default:
                    check(key.hint, value)
            except WrongValue as wrong:
                raise ValueError(f"{key.name} = {wrong.message}: {wrong.hint}") from wrong
