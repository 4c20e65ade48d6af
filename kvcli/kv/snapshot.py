"""Snapshot: a KV cache as a tree of named tensors and numbers, from which the cache can be restored.

A snapshot may come from an untrusted file. Therefore the reader states the type, shape and range of each entry and gets
exactly that or SnapshotMismatch: no size is computed from another size in the tree, and positions are below the
sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

# names contain no "/"
State: TypeAlias = "Mapping[str, Tensor | int | float | State]"
Leaf: TypeAlias = "Tensor | int | float"

DEEPEST = 16  # nested trees


class SnapshotMismatch(Exception):
    """The snapshot does not fit the object to be restored."""


class Snapshottable(Protocol):
    """State of a sequence that can be saved and restored."""

    def snapshot(self) -> State:
        """Return all state that later passes depend on. Tensors are views, valid until the sequence continues."""

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot into a new object of the same settings. Raises SnapshotMismatch, CacheFull."""


@dataclass(frozen=True, slots=True)
class SnapshotReader:
    """Checked access to a subtree of the snapshot of n tokens. Each method raises SnapshotMismatch."""

    tree: State
    n: int  # every position is below n
    where: str = ""
    lacks_empty: bool = False  # it was written when empty subtrees were left out

    def __contains__(self, name: str) -> bool:
        return name in self.tree

    def part(self, name: str) -> SnapshotReader:
        """Return a subtree, which may be empty but not missing."""
        found = self.tree.get(name, {} if self.lacks_empty else None)
        if not isinstance(found, Mapping):
            self._lacks(name)
        return SnapshotReader(found, self.n, self._named(name), self.lacks_empty)

    def parts(self, most: int) -> list[SnapshotReader]:
        """Return the subtrees "0", "1", .., at most `most`."""
        names = [str(i) for i in range(len(self.tree))]
        return [self.part(name) for name in names] if len(names) <= most else self._lacks(f"{most} parts at most")

    def tensor(self, name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
        """Return a tensor of this data type and shape; None = any size."""
        found = self.tree.get(name)
        if not isinstance(found, Tensor) or found.dtype != dtype or found.dim() != len(shape):
            self._lacks(name)
        if any(want not in (None, size) for want, size in zip(shape, found.shape, strict=True)):
            self._lacks(f"{name} of shape {[*found.shape]}")
        return found

    def floats(self, name: str, *shape: int | None) -> Tensor:
        """Return a tensor in single or double precision, as stored."""
        found = self.tree.get(name)
        dtype = found.dtype if isinstance(found, Tensor) and found.dtype == torch.float64 else torch.float32
        return self.tensor(name, dtype, *shape)

    def like(self, name: str, other: Tensor) -> Tensor:
        """Return a tensor of the data type and shape of `other`."""
        return self.tensor(name, other.dtype, *other.shape)

    def indices(self, name: str, below: int, n: int | None) -> Tensor:
        """Return int64 [n] in 0 <= x < below."""
        found = self.tensor(name, torch.int64, n)
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < below:
            self._lacks(f"{name} below {below}")
        return found

    def positions(self, name: str, *shape: int | None, least: int = 0) -> Tensor:
        """Return int32 positions from `least` (-1 = empty slots allowed) to the last token."""
        found = self.tensor(name, torch.int32, *shape)
        if found.numel() and not least <= int(found.min()) <= int(found.max()) < self.n:
            self._lacks(f"{name} within the text")
        return found

    def number(self, name: str, most: int, least: int = 0) -> int:
        """Return an integer from `least` to `most`."""
        found = self.tree.get(name)
        return int(found) if isinstance(found, int) and least <= found <= most else self._lacks(name)

    def share(self, name: str) -> float:
        """Return a number from 0 to 1."""
        found = self.tree.get(name)
        return float(found) if isinstance(found, int | float) and 0 <= found <= 1 else self._lacks(name)

    def _named(self, name: str) -> str:
        return f"{self.where}/{name}" if self.where else name

    def _lacks(self, what: str) -> NoReturn:
        raise SnapshotMismatch(f"it has no {self._named(what)} as it should be")


def leaves(state: State, where: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield all leaves of a tree with their names joined by "/"; of an empty subtree its name and "/"."""
    for name, found in state.items():
        if isinstance(found, Mapping):
            yield from leaves(found, f"{where}{name}/") if found else [(f"{where}{name}/", 0)]
        else:
            yield where + name, found


def tree_of(found: Mapping[str, Leaf]) -> State:
    """Build a tree from leaves. Raises SnapshotMismatch if a name is a leaf and a tree, or nesting exceeds DEEPEST."""
    tree: dict[str, object] = {}
    for path, leaf in found.items():
        *above, name = path.split("/")
        if len(above) > DEEPEST:
            raise SnapshotMismatch("it has trees within trees")
        at = tree
        for each in above:
            at = at.setdefault(each, {})  # type: ignore[assignment]
            if not isinstance(at, dict):
                raise SnapshotMismatch(f"{path} is in no tree")
        if name in at:
            raise SnapshotMismatch(f"{path} is there twice")
        if name:  # else an empty subtree
            at[name] = leaf
    return tree  # type: ignore[return-value]
