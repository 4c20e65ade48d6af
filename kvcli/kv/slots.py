"""Slots: stored keys and values with their positions, per KV head."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import BLOCK, NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.snapshot import Snapshottable
from kvcli.kv.tiers.device_tables import DeviceCache, LowerLayer

POSITION = 4  # bytes of a slot's position
ON_DEMAND = 1 << 20  # bytes of a tensor from which memory is taken page by page


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of the KV that one layer stores per token."""

    n_kv_heads: int
    k_dim: int  # elements of a key
    v_dim: int  # elements of a value
    shared_from: int | None = None  # an earlier layer whose slots this layer reads; this layer then stores none
    device: torch.device | None = None  # device of the layer; None = device of the model
    rank: int = 0  # > 0: MLA; key and value are one latent of `rank` elements plus a rotary part for the key

    @property
    def numbers(self) -> int:
        """Count of key and value elements stored per token; 0 if the layer reads another layer's slots."""
        return 0 if self.shared_from is not None else self.n_kv_heads * (self.k_dim + (0 if self.rank else self.v_dim))

    @property
    def parts(self) -> tuple[int, int]:
        """Count of elements quantized as a key and as a value; of a latent, its rotary part and the rest."""
        return (self.k_dim - self.rank, self.rank) if self.rank else (self.k_dim, self.v_dim)

    def slot_bytes(self, number: int) -> int:
        """Bytes of a dense slot of all heads with its position, by those of an element; 0 if the layer stores none."""
        return self.numbers * number + POSITION if self.numbers else 0


def alike(n_layers: int, n_kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """Return n_layers equal layer shapes."""
    return (LayerShape(n_kv_heads, head_dim, head_dim),) * n_layers


def layer_groups(shapes: Sequence[LayerShape]) -> list[range]:
    """Split the layers into the shortest ranges of which none reads slots that another range stores."""
    ends = [0]
    for layer in range(1, len(shapes)):
        if all(shape.shared_from is None or shape.shared_from >= layer for shape in shapes[layer:]):
            ends.append(layer)
    return [range(a, b) for a, b in zip(ends, [*ends[1:], len(shapes)], strict=True)]


def storing_layer_of(shapes: Sequence[LayerShape]) -> list[int]:
    """Return, for each layer, the layer that stores the slots it reads."""
    return [layer if of.shared_from is None else of.shared_from for layer, of in enumerate(shapes)]


def params_of_storing_layers(
    attention_params: Sequence[AttentionParams], shapes: Sequence[LayerShape]
) -> list[AttentionParams | None]:
    """Return the attention parameters of each layer; None for a layer that reads another layer's slots."""
    return [params if of.shared_from is None else None for params, of in zip(attention_params, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class LevelSpan:
    """Adjacent columns of slots that are stored in one level of a tiered cache."""

    level: int  # 0 = the top
    n: int  # columns
    group: int  # slots of a head that a precision budget demotes together; those after the last full group singly


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of one layer of a tier. Their order is arbitrary; `pos` holds the position of each."""

    k: Tensor  # [K, S, D]
    v: Tensor  # [K, S, D]; D may differ from that of the keys. If values equal keys (MLA), `k` itself
    pos: Tensor  # [K, S] int, -1 = empty (heads may have different numbers of slots)
    levels: Sequence[LevelSpan] = field(default=(), kw_only=True)  # columns by level of a tiered cache, bottom first

    @property
    def n_slots(self) -> int:
        """Slots of the longest head."""
        return self.pos.shape[1]

    def each(self, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Apply `to` to keys and to values, only once if they are the same tensor."""
        k = to(self.k)
        return k, k if self.v is self.k else to(self.v)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention parameters of a layer (score scaling, softcap, sliding window), and what the rows of the pass are."""

    scale: float
    softcap: float = 0.0  # > 0: attention scores become softcap * tanh(score / softcap) (Gemma 2)
    window: int | None = None  # tokens: a row at position p attends to positions > p - window; None = all
    is_prompt: bool = False  # the rows are prompt tokens in prefill: they attend to all stored slots
    is_draft: bool = False  # the rows belong to a draft pass: its output is verified, so the cache may approximate


# approximation: slots were evicted, quantized, not all read (sparse), or reused from another sequence
Loss = Literal["forgotten", "rounded", "unread", "reused"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory use of one layer in one tier."""

    layer: int
    tier: str  # a device, kind of tier, or "view", "draft", "state" (recurrent), "deferred" (tokens)
    slots: int  # number of slots of the longest head
    nbytes: int  # allocated, spare capacity included
    lost: Loss | None = None  # approximation of these slots
    how: str = ""  # how rows reach these slots, in words; "" = the tier has only one way
    asked: int = 0  # offloaded slots of all heads that sparse attention selected since the sequence began
    found: int = 0  # of those, the ones already in its page cache on the device (kvcli/kv/sparse/pages.py)


# What to do with the slots of each layer:
# - None: keep all.
# - bool [K, S]: True = keep, False = evict (a tiered cache that `demotes` moves the slot one level down).
# - int8 [K, S]: the level of a tiered cache to move to; 0 = top, the number of levels = evict.
Masks = Sequence[Tensor | None]


class HasUsage(Protocol):
    """An object that reports its memory use."""

    def usage(self) -> list[Usage]:
        """Return the allocated memory, by layer; empty if the object only reads slots of another one."""


class Attendable(HasUsage, Protocol):
    """Slots that rows can attend to: a tier, a tiered cache or a cache view."""

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: one or more results per tier, the tier of the
        oldest slots first; [] if empty. The last ones include the new KV `own`, read together with slots if possible.

        Positions of rows are on the host, so that no pass synchronizes with the device.
        """


class CacheReader(Attendable, Protocol):
    """An `Attendable` that a forward pass can run over: it has a data type and device tables for captured passes."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type in which a pass reads its new KV and the stored slots."""

    @property
    def batch_variant_reason(self) -> str:
        """Reason why the bits of a row may depend on the other rows of its pass; "" if they do not."""

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return device tables by which a captured pass reads all slots, with capacity for `rows` more per head.

        If none are possible, the result has only `why_not`. It is called before a captured pass
        (engine/cuda_graphs/captured_passes.py); slots stored or evicted since the previous call are included.
        `more`: slots that may be added before slots move or the sequence ends; capacity for them grows in large steps.
        """


class Tier(Attendable, Snapshottable, Protocol):
    """A tier: one kind of storage of slots on one device."""

    @property
    def batch_variant_reason(self) -> str:
        """Name of the setting that makes attention over this tier batch variant; "" if it is batch invariant."""

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store accepted rows: k, v [K, M, D] at positions start, start + 1, ..."""

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots with positions of their own, which may differ by head: demoted or moved ones, rows with gaps."""

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head."""

    def slots(self, layer: int) -> Slots:
        """Return the stored slots of a layer; the tensors must not be written to.

        If the tier does not store them in this layout, they are a copy (heads of unequal length are padded to the
        longest). Because of the copy, call this at compression points, not in every pass.
        """

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last, in the order of storing."""

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False and return those. Heads may keep different numbers of slots."""

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later: rewind the sequence, which is no eviction."""


class LowerTier(Tier, Protocol):
    """A tier that can be below the top of a tiered cache."""

    def device_layer(self, layer: int) -> LowerLayer | str:
        """Return the device tables by which a captured pass reads this layer; or the reason why there are none."""


class KVCache(Tier, CacheReader, Protocol):
    """The KV cache of a sequence: one tier, a tiered cache, or a full and a compressed cache side by side."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of newly committed rows; a pass also reads its new KV in it."""

    @property
    def changes(self) -> int:
        """Counter of evictions and moves of slots. Copies made at a lower count are stale. Appending does not count."""

    @property
    def forgets(self) -> bool:
        """True if slots that masks do not keep are evicted; False if their KV stays stored, outside of `slots`."""

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity for n slots per head in these layers (None = all), so that growth copies nothing."""

    def reaches(self, n: int) -> bool:
        """True if, after `crop(n)`, a row at position n finds every slot inside its sliding windows.

        False if such a slot is missing. Slots of layers without a sliding window are not looked at.
        """

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Run a compression point of these layers (None = all): evict or demote slots as `masks` say (() = keep all).

        Returns True if masks evicted or demoted a slot. Slots that windows hide from all rows at `end` and later are
        evicted too, which changes no result.
        """


def attend_new_only(q: Tensor, params: AttentionParams, own: NewRows | None) -> list[PartialAttention]:
    """Return partial attention of rows over the new KV alone, for tiers that cannot merge it with stored slots."""
    return [] if own is None else own.parts(q, params.scale, params.softcap)


def nbytes(*objects: HasUsage | None) -> dict[str, int]:
    """Return allocated bytes by kind of tier."""
    total: dict[str, int] = {}
    for each in objects:
        for use in each.usage() if each is not None else ():
            total[use.tier] = total.get(use.tier, 0) + use.nbytes
    return total


def hit_rate(objects: Iterable[HasUsage | None]) -> float | None:
    """Return the share of slots selected by sparse attention that its page cache held already; None = none selected."""
    uses = [use for each in objects if each is not None for use in each.usage()]
    asked = sum(use.asked for use in uses)
    return sum(use.found for use in uses) / asked if asked else None


def empty(of: LayerShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return empty keys and values [K, 0, ..]."""
    k, v = (torch.empty(of.n_kv_heads, 0, dim, dtype=dtype, device=device) for dim in (of.k_dim, of.v_dim))
    return k, k if of.rank else v


def zeros_on_demand(like: Tensor, *shape: int) -> Tensor:
    """Return zeros [shape]. A large tensor in host memory gets each page when that is first written, so that room for
    a long prompt takes no time in which other sequences wait."""
    nbytes = math.prod(shape) * like.dtype.itemsize
    if not like.is_cpu or nbytes < ON_DEMAND:
        return like.new_zeros(shape)
    # private: a process that forks must not write into the memory of the other; Windows has no such flag
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, nbytes, **private), dtype=like.dtype).view(shape)


def empty_like(s: Slots) -> Slots:
    """Return zero slots of the data types of `s`."""
    return Slots(*s.each(lambda t: t[:, :0]), s.pos[:, :0])


def last(s: Slots, n: int) -> Slots:
    """Return the n slots that each head stored last, from slots in the order of storing."""
    first = max(0, s.n_slots - n)
    if bool((s.pos[:, first:] < 0).any()):  # shorter heads are padded at the end
        is_stored = s.pos >= 0
        return compact(s, is_stored.sum(1, keepdim=True) - is_stored.cumsum(1) < n)
    return Slots(*s.each(lambda t: t[:, first:]), s.pos[:, first:])


def picked(s: Slots, index: Tensor) -> Slots:
    """Copy slots index [K, M] of each head, head by head; -1 = empty (its key and value are arbitrary)."""
    at = index.clamp(min=0)

    def of(t: Tensor) -> Tensor:
        out = t.new_empty(*index.shape, t.shape[2])
        for j in range(index.shape[0]):
            torch.index_select(t[j], 0, at[j], out=out[j])
        return out

    return Slots(*s.each(of), s.pos.gather(1, at).masked_fill(index < 0, -1))


def concat_slots(parts: Sequence[Slots]) -> Slots:
    """Concatenate slots in the data type and on the device of the last ones."""
    nonempty = [s for s in parts[:-1] if s.n_slots]
    end = parts[-1]
    if not nonempty:
        return end
    k = torch.cat([*(s.k.to(end.k) for s in nonempty), end.k], 1)
    v = k if end.v is end.k else torch.cat([*(s.v.to(end.v) for s in nonempty), end.v], 1)
    return Slots(k, v, torch.cat([*(s.pos.to(end.pos) for s in nonempty), end.pos], 1))


def compact(s: Slots, mask: Tensor) -> Slots:
    """Return the slots whose mask [K, S] is True, in their order, padded to the longest head with pos = -1.

    Mask and positions may be on the host for slots of any device; the device is then not synchronized.
    """
    mask = mask & (s.pos >= 0)
    count = mask.sum(1)  # [K]
    longest = int(count.max()) if count.numel() else 0
    order = torch.argsort(~mask, dim=1, stable=True)[:, :longest]  # [K, longest], kept ones first
    pick = order.to(s.k.device).unsqueeze(-1)
    pos = s.pos.gather(1, order).masked_fill(~mask.gather(1, order), -1)
    return Slots(*s.each(lambda t: t.gather(1, pick.expand(-1, -1, t.shape[2]))), pos)


def on_host(of: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy tensors of one data type to the host with a single device synchronization."""
    if not of:
        return {}
    flat = torch.cat([t.flatten() for t in of.values()]).cpu()
    parts = torch.split(flat, [t.numel() for t in of.values()])
    return {key: part.view_as(t) for (key, t), part in zip(of.items(), parts, strict=True)}


def visible(pos: Tensor, rows: Sequence[int], window: int | None) -> Tensor | None:
    """Return which slots [K, S] are visible to rows at positions [N]: [K, N, S] bool, or None if all are.

    All slots are older than all rows (only `PositionMaskedCache` serves older rows), so only a window or -1 hides one.
    """
    hidden = pos < 0
    shown = None if not bool(hidden.any()) else ~hidden.unsqueeze(1)
    if window is not None:
        near = pos.unsqueeze(1) > window_start(rows, window, pos.device)
        shown = near if shown is None else near & shown
    return shown if shown is None else shown.expand(-1, len(rows), -1)


def window_start(rows: Sequence[int], window: int, device: torch.device) -> Tensor:
    """Return [N, 1]: the last position that a sliding window hides from each row."""
    return torch.tensor([row - window for row in rows], dtype=torch.int32, device=device).unsqueeze(1)


def run_of(start: int, n: int, heads: int, device: torch.device) -> Tensor:
    """Return [K, n]: n positions from `start`, the same in all heads."""
    return torch.arange(start, start + n, dtype=torch.int32, device=device).expand(heads, -1)


# Sliding windows: eviction, at compression points, of slots that no later row attends to.
#
# A slot outside the window of every later row is hidden from them all, so evicting it changes no result. A sequence
# that is rewound further is prefilled again, because the evicted slots are missing.


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window of a layer, and the margin kept before it."""

    size: int  # tokens: a row at position p sees positions > p - size
    back: int = 192  # tokens kept before the window, also in saved caches, so that the last question can be replaced

    def window_start(self, end: int) -> int:
        """Return the position below which slots can be evicted if every later row is at `end` or after it."""
        return max(0, (end - self.size - self.back) // self.step * self.step)

    def most(self, answer: int, chunk: int) -> int:
        """Return the most slots per head for prefill chunks of `chunk` tokens and an answer of `answer` tokens."""
        return max(self.size + self.back + self.step + answer, chunk + BLOCK)

    @property
    def step(self) -> int:
        """Slots evicted together, at most one kernel block."""
        return min(self.back, BLOCK)


class Windows:
    """Sliding windows of the layers of a KV cache, and the position below which each layer has evicted its slots."""

    def __init__(self, of: Mapping[int, Window]) -> None:
        self._of = dict(of)  # by layer; other layers keep all slots
        self._evicted_below: dict[int, int] = {}  # by layer: position below which its slots were evicted

    def __contains__(self, layer: int) -> bool:
        return layer in self._of

    def eviction_bound(self, layer: int, end: int) -> int:
        """Return the position below which the caller must now evict slots, if later rows start at `end`; 0 = none."""
        low = self._of[layer].window_start(end) if layer in self._of else 0
        if low <= self._evicted_below.get(layer, 0):
            return 0
        self._evicted_below[layer] = low  # counts as done: a bound is returned only once
        return low

    def came(self, layer: int, start: int) -> None:
        """Note that slots from `start` on were stored. The first slots of a long chunk may already be hidden."""
        if start < self._evicted_below.get(layer, 0):
            del self._evicted_below[layer]

    def reaches(self, n: int, stored: Callable[[int], Iterable[Tensor]]) -> bool:
        """True if all slots in the windows of a row at n exist; `stored`: positions [K, S] of a layer, by tier."""

        def has_all(layer: int, first: int) -> bool:
            found = sum(((pos >= first) & (pos < n)).sum(1) for pos in stored(layer))
            return bool(torch.as_tensor(found == n - first).all())

        return all(has_all(layer, max(0, n - window.size + 1)) for layer, window in self._of.items())

    def clear(self) -> None:
        """Reset after `crop`, because slots stored again must be evicted again."""
        self._evicted_below.clear()


def windows_of(shapes: Sequence[LayerShape], attention_params: Sequence[AttentionParams]) -> dict[int, Window]:
    """Return the largest window of each storing layer; layers with full attention are left out."""
    size: dict[int, int | None] = {}
    for layer, (shape, params) in enumerate(zip(shapes, attention_params, strict=True)):
        holder = layer if shape.shared_from is None else shape.shared_from
        of, here = size.get(holder, 0), params.window
        size[holder] = None if of is None or here is None else max(of, here)
    return {layer: Window(n) for layer, n in size.items() if n is not None}
