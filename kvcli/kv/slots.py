"""Slots: stored keys and values with their positions, per KV head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.snapshot import Snapshottable
from kvcli.kv.tiers.device_tables import DeviceCache


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores of a token."""

    n_kv_heads: int
    k_dim: int  # numbers of a key
    v_dim: int  # of a value
    shared_from: int | None = None  # an earlier layer, whose slots this one reads: it stores none of its own
    device: torch.device | None = None  # where it computes; None = where the model does
    rank: int = 0  # > 0: a key is a latent with a turned part behind it, and the value too, of which so many count

    @property
    def numbers(self) -> int:
        """Of keys and values that it stores of a token: none where they are another layer's."""
        return 0 if self.shared_from is not None else self.n_kv_heads * (self.k_dim + (0 if self.rank else self.v_dim))

    @property
    def parts(self) -> tuple[int, int]:
        """Numbers that are rounded as a key and as a value: of a latent its turned part, and the others."""
        return (self.k_dim - self.rank, self.rank) if self.rank else (self.k_dim, self.v_dim)


def alike(n_layers: int, n_kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """Layers that all store the same."""
    return (LayerShape(n_kv_heads, head_dim, head_dim),) * n_layers


def spans(shapes: Sequence[LayerShape]) -> list[range]:
    """The layers of a model in runs that share no slots with others, each as short as that allows."""
    ends = [0]
    for layer in range(1, len(shapes)):
        if all(shape.shared_from is None or shape.shared_from >= layer for shape in shapes[layer:]):
            ends.append(layer)
    return [range(a, b) for a, b in zip(ends, [*ends[1:], len(shapes)], strict=True)]


def storing_layer_of(shapes: Sequence[LayerShape]) -> list[int]:
    """By layer: which one stores the slots that it reads."""
    return [layer if of.shared_from is None else of.shared_from for layer, of in enumerate(shapes)]


def storing(sights: Sequence[AttentionParams], shapes: Sequence[LayerShape]) -> list[AttentionParams | None]:
    """How each layer looks at slots of its own; None where it reads another's."""
    return [sight if of.shared_from is None else None for sight, of in zip(sights, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class LevelSpan:
    """Columns of slots side by side that lie on one rung of a ladder."""

    rung: int  # 0 = the top
    n: int  # columns
    unit: int  # slots of a head in a row that go down together; those behind its last whole one go one by one


@dataclass(frozen=True, slots=True)
class Slots:
    """What one layer of a tier holds. Slot order means nothing; position means everything."""

    k: Tensor  # [K, S, D]
    v: Tensor  # [K, S, D], of a size of their own where a layer's values have one; where keys are values, `k` itself
    pos: Tensor  # [K, S] int, -1 = empty (heads may hold different numbers of slots)
    spans: Sequence[LevelSpan] = field(default=(), kw_only=True)  # of what a ladder shows, the lowest rung first

    @property
    def n_slots(self) -> int:
        """Slots of the longest head."""
        return self.pos.shape[1]

    def each(self, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What `to` makes of keys and of values: once where they are the same."""
        k = to(self.k)
        return k, k if self.v is self.k else to(self.v)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer looks at slots: what its attention does to scores, and how far back it sees."""

    scale: float
    softcap: float = 0.0  # > 0: scores are bent by softcap * tanh(score / softcap) (Gemma 2)
    window: int | None = None  # tokens: a row at position p sees positions > p - window; None = all
    is_prompt: bool = False  # the rows are of a text being read: nothing stored is left out for them
    is_guess: bool = False  # what they find is checked later: a store may show them a cheaper account of itself


# what an answer may miss: slots were let go, are kept in fewer bits, are not all read, or know of another text
Loss = Literal["forgotten", "rounded", "unread", "reused"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one layer takes in one tier."""

    layer: int
    tier: str  # where: cpu, cuda, ...
    slots: int  # of the longest head
    nbytes: int  # allocated, spare room included
    lost: Loss | None = None  # of these slots
    how: str = ""  # rows reach them, in words, where there are several ways
    asked: int = 0  # slots that rows wanted of those kept near, of all heads, since the text began
    found: int = 0  # of them, how many were there


# by layer: which of its slots stay, bool [K, S]; or on which rung of a ladder each is to lie, int8 [K, S]: 0 = the top,
# one more than the lowest = nowhere; None = all stay
Masks = Sequence[Tensor | None]


class HasUsage(Protocol):
    """Something that takes memory."""

    def usage(self) -> list[Usage]:
        """What is allocated, by layer; nothing where it only reads what another one holds."""


class Attendable(HasUsage, Protocol):
    """Something rows can attend to: a tier, a ladder, a view."""

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> parts over what is stored, the oldest first; none if nothing is.

        With `own`, over what their pass made of them too: in one part with the newest slots where these can be read so.
        Positions of rows are the host's: no pass waits for the device to say where it is.
        """


class CacheReader(Attendable, Protocol):
    """What rows of a pass attend to: a store, or a way to read one."""

    @property
    def dtype(self) -> torch.dtype:
        """Numbers that a pass reads its own fresh rows in, as it does those stored."""

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Where a device finds all of it by itself, with room for `rows` slots a head; or why it cannot.

        Asked before a pass that is recorded once (engine/cuda_graphs/captured_pass.py); what is stored or forgotten in
        between it tells. `more`: slots that may come before anything of it moves or the text ends, for which room is
        made in large steps.
        """


class Tier(Attendable, Snapshottable, Protocol):
    """One kind of storage on one device."""

    @property
    def batch_variant_reason(self) -> str:
        """Which setting has rows read it by kernels whose bits depend on who shares the pass; "" = none has."""

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store accepted rows: k, v [K, M, D] at positions start, start + 1, ..."""

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots that another tier let go, after rotary embedding; heads may bring different numbers."""

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head."""

    def slots(self, layer: int) -> Slots:
        """What is stored; the tensors must not be written to.

        They are the tier's own where it has them in this form, else a copy of one layer (heads of unequal length are
        padded to the longest): ask at boundaries, not in every pass.
        """

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last, in the order of storing: what joined since somebody looked."""

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False; returns what fell out. Heads may keep different numbers."""


class KVCache(Tier, CacheReader, Protocol):
    """The whole past: a ladder of tiers or a bare one."""

    @property
    def dtype(self) -> torch.dtype:
        """Numbers that newly accepted rows are stored in; a pass reads its own fresh rows in them too."""

    @property
    def changes(self) -> int:
        """How often slots were forgotten or moved: a copy made before is stale. Appending is no change."""

    @property
    def forgets(self) -> bool:
        """Is what masks let go gone, or some of it? Else it only moves down, out of what `slots` shows."""

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Make room for n slots a head in these layers, None = all, so that growing moves nothing."""

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later: an undo, not an eviction."""

    def reaches(self, n: int) -> bool:
        """Whether a row at position n finds all that it sees, once `crop(n)` has made it the next one.

        Not where a layer gave back what its window hid from the rows behind n. Of what masks let go it knows nothing.
        """

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """A boundary of these layers, None = all: of what `slots` shows, the masks let some go; () = nothing. True if
        they did.

        What windows hide from every row at position `end` and later goes too, and is no loss.
        """


class CacheView(Attendable, Protocol):
    """A view: a part of a store, chosen by a policy."""

    def rebind(self, store: KVCache) -> CacheView:
        """The same choice from another store, with nothing held yet."""


def attend_new_only(q: Tensor, sight: AttentionParams, own: NewRows | None) -> list[PartialAttention]:
    """Rows over their pass alone: the last parts of a store whose slots are not read in one sequence with it."""
    return [] if own is None else own.parts(q, sight.scale, sight.softcap)


def nbytes(*held: HasUsage | None) -> dict[str, int]:
    """Bytes allocated, by kind of tier."""
    total: dict[str, int] = {}
    for holder in held:
        for use in holder.usage() if holder is not None else ():
            total[use.tier] = total.get(use.tier, 0) + use.nbytes
    return total


def hit_rate(held: Iterable[HasUsage | None]) -> float | None:
    """Of the slots that rows wanted of tiers far away, the share that was near already; None = they wanted none."""
    uses = [use for holder in held if holder is not None for use in holder.usage()]
    asked = sum(use.asked for use in uses)
    return sum(use.found for use in uses) / asked if asked else None


def empty(of: LayerShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Keys and values [K, 0, ..] of no slots."""
    k, v = (torch.empty(of.n_kv_heads, 0, dim, dtype=dtype, device=device) for dim in (of.k_dim, of.v_dim))
    return k, k if of.rank else v


def empty_like(s: Slots) -> Slots:
    """No slots, in the types of `s`."""
    return Slots(*s.each(lambda t: t[:, :0]), s.pos[:, :0])


def last(s: Slots, n: int) -> Slots:
    """`newest` from `slots` that lie in the order of storing: the n that each head stored last."""
    first = max(0, s.n_slots - n)
    if bool((s.pos[:, first:] < 0).any()):  # shorter heads end earlier
        held = s.pos >= 0
        return compact(s, held.sum(1, keepdim=True) - held.cumsum(1) < n)
    return Slots(*s.each(lambda t: t[:, first:]), s.pos[:, first:])


def picked(s: Slots, index: Tensor) -> Slots:
    """Slots index [K, M] of each head, -1 = none (its numbers are any slot's): copied head by head, rows as a whole."""
    at = index.clamp(min=0)

    def of(t: Tensor) -> Tensor:
        out = t.new_empty(*index.shape, t.shape[2])
        for j in range(index.shape[0]):
            torch.index_select(t[j], 0, at[j], out=out[j])
        return out

    return Slots(*s.each(of), s.pos.gather(1, at).masked_fill(index < 0, -1))


def concat_slots(found: Sequence[Slots]) -> Slots:
    """Slots side by side, in the numbers and on the device of the last ones."""
    held = [s for s in found[:-1] if s.n_slots]
    end = found[-1]
    if not held:
        return end
    k = torch.cat([*(s.k.to(end.k) for s in held), end.k], 1)
    v = k if end.v is end.k else torch.cat([*(s.v.to(end.v) for s in held), end.v], 1)
    return Slots(k, v, torch.cat([*(s.pos.to(end.pos) for s in held), end.pos], 1))


def compact(s: Slots, mask: Tensor) -> Slots:
    """The slots whose mask [K, S] is True, in their order, padded to the longest head with pos = -1.

    Mask and positions may lie on the host, for slots of any device: then nothing is asked of it.
    """
    mask = mask & (s.pos >= 0)
    count = mask.sum(1)  # [K]
    longest = int(count.max()) if count.numel() else 0
    order = torch.argsort(~mask, dim=1, stable=True)[:, :longest]  # [K, longest], kept ones first
    pick = order.to(s.k.device).unsqueeze(-1)
    pos = s.pos.gather(1, order).masked_fill(~mask.gather(1, order), -1)
    return Slots(*s.each(lambda t: t.gather(1, pick.expand(-1, -1, t.shape[2]))), pos)


def on_host(of: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """These tensors of one type on the host, for which the device is waited for once."""
    if not of:
        return {}
    flat = torch.cat([t.flatten() for t in of.values()]).cpu()
    parts = torch.split(flat, [t.numel() for t in of.values()])
    return {key: part.view_as(t) for (key, t), part in zip(of.items(), parts, strict=True)}


def visible(pos: Tensor, rows: Sequence[int], window: int | None) -> Tensor | None:
    """Which slots [K, S] rows at positions [N] may see: [K, N, S] bool, or None when all of them.

    Slots are older than rows by construction, so only empty slots and a sliding window hide anything.
    """
    hidden = pos < 0
    shown = None if not bool(hidden.any()) else ~hidden.unsqueeze(1)
    if window is not None:
        near = pos.unsqueeze(1) > window_start(rows, window, pos.device)
        shown = near if shown is None else near & shown
    return shown if shown is None else shown.expand(-1, len(rows), -1)


def window_start(rows: Sequence[int], window: int, device: torch.device) -> Tensor:
    """[N, 1]: the last position that a sliding window hides from each row."""
    return torch.tensor([row - window for row in rows], dtype=torch.int32, device=device).unsqueeze(1)


def run_of(start: int, n: int, heads: int, device: torch.device) -> Tensor:
    """[K, n]: positions from start on, the same in all heads."""
    return torch.arange(start, start + n, dtype=torch.int32, device=device).expand(heads, -1)
