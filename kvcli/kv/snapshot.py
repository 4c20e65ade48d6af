"""State: a past as a named tree of tensors and numbers, which a store gives out and is made from again.

A tree may come from a file that somebody else wrote. Who takes from it says what each thing must be, and is given that
or nothing: no size is computed from another one that the tree claims, and no position lies behind the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

# names have no "/" in them
State: TypeAlias = "Mapping[str, Tensor | int | float | State]"
Leaf: TypeAlias = "Tensor | int | float"

DEEPEST = 16  # trees within trees


class SnapshotMismatch(Exception):
    """The tree is not of what was to be made from it."""


class Snapshottable(Protocol):
    """What a text goes on from."""

    def snapshot(self) -> State:
        """All that what comes next depends on. Its tensors are views: use them before the text goes on."""

    def restore(self, given: SnapshotReader) -> None:
        """Become what gave this, in something just made under the same settings. Raises SnapshotMismatch, Shortage."""


@dataclass(frozen=True, slots=True)
class SnapshotReader:
    """A part of a tree of a text of n tokens, which is taken from by name. Each method raises SnapshotMismatch."""

    tree: State
    n: int  # every position is below
    where: str = ""

    def __contains__(self, name: str) -> bool:
        return name in self.tree

    def part(self, name: str) -> SnapshotReader:
        """A smaller tree; an empty one where there is none, as a file knows no empty trees."""
        found = self.tree.get(name, {})
        return SnapshotReader(found, self.n, self._named(name)) if isinstance(found, Mapping) else self._lacks(name)

    def parts(self, most: int) -> list[SnapshotReader]:
        """Smaller trees "0", "1", .. and no more than so many."""
        names = [str(i) for i in range(len(self.tree))]
        return [self.part(name) for name in names] if len(names) <= most else self._lacks(f"{most} parts at most")

    def tensor(self, name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
        """Of this type and shape; None = any size."""
        found = self.tree.get(name)
        if not isinstance(found, Tensor) or found.dtype != dtype or found.dim() != len(shape):
            self._lacks(name)
        if any(want not in (None, size) for want, size in zip(shape, found.shape, strict=True)):
            self._lacks(f"{name} of shape {[*found.shape]}")
        return found

    def floats(self, name: str, *shape: int | None) -> Tensor:
        """Single or double precision, as measured."""
        found = self.tree.get(name)
        dtype = found.dtype if isinstance(found, Tensor) and found.dtype == torch.float64 else torch.float32
        return self.tensor(name, dtype, *shape)

    def like(self, name: str, other: Tensor) -> Tensor:
        """Of the type and the shape of another."""
        return self.tensor(name, other.dtype, *other.shape)

    def indices(self, name: str, below: int, n: int | None) -> Tensor:
        """int64 [n], from 0 on."""
        found = self.tensor(name, torch.int64, n)
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < below:
            self._lacks(f"{name} below {below}")
        return found

    def positions(self, name: str, *shape: int | None, least: int = 0) -> Tensor:
        """int32, from `least` (-1 = empty slots may be among them) to the last token."""
        found = self.tensor(name, torch.int32, *shape)
        if found.numel() and not least <= int(found.min()) <= int(found.max()) < self.n:
            self._lacks(f"{name} within the text")
        return found

    def number(self, name: str, most: int, least: int = 0) -> int:
        """A whole one."""
        found = self.tree.get(name)
        return int(found) if isinstance(found, int) and least <= found <= most else self._lacks(name)

    def share(self, name: str) -> float:
        """From 0 to 1."""
        found = self.tree.get(name)
        return float(found) if isinstance(found, int | float) and 0 <= found <= 1 else self._lacks(name)

    def _named(self, name: str) -> str:
        return f"{self.where}/{name}" if self.where else name

    def _lacks(self, what: str) -> NoReturn:
        raise SnapshotMismatch(f"it has no {self._named(what)} as it should be")


def leaves(state: State, where: str = "") -> Iterator[tuple[str, Leaf]]:
    """All of a tree, each by its names joined by "/"."""
    for name, found in state.items():
        if isinstance(found, Mapping):
            yield from leaves(found, f"{where}{name}/")
        else:
            yield where + name, found


def tree_of(found: Mapping[str, Leaf]) -> State:
    """The inverse of `leaves`. Raises SnapshotMismatch where a name is a leaf and a tree, or trees lie in trees beyond
    reason."""
    tree: dict[str, object] = {}
    for path, leaf in found.items():
        *above, name = path.split("/")
        if len(above) > DEEPEST:
            raise SnapshotMismatch("it has trees within trees")
        at = tree
        for each in above:
            at = at.setdefault(each, {})  # type: ignore[assignment]
            if not isinstance(at, dict):
                raise SnapshotMismatch(f"{path} lies in no tree")
        if name in at:
            raise SnapshotMismatch(f"{path} is there twice")
        at[name] = leaf
    return tree  # type: ignore[return-value]
