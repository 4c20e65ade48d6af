"""Quantized slots of one KV head, read by slot if the layout allows it, else by group.

Values of any width and 8-bit keys have a scale per slot, so evicting a slot changes no other slot. 4- and 2-bit keys
share scales among `group` slots of one channel: an evicted slot becomes a hole (position -1), and a group of holes is
dropped. If less than half of a group remains, its slots are dequantized and stored in full precision, with the newest
keys, until a group is full again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvcli.kernels.attend_quantized import PackedHead
from kvcli.kernels.quantize_kv import LANES, Rounded, pack_keys, pack_values, transposed, unpack_keys, unpack_values
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State


@dataclass(frozen=True, slots=True)
class Precision:
    """Storage precision of quantized heads."""

    dtype: torch.dtype  # data type of keys in incomplete groups, 16-bit elements and dequantized slots
    k_bits: int
    v_bits: int
    group: int  # slots that share the scale of a channel in keys, channels that share one in values
    halves: bool = False  # codes split into 4 upper and 4 lower bits

    @property
    def is_grouped(self) -> bool:
        """True if keys share scales."""
        return self.k_bits < 8

    def keys(self, k: Tensor) -> Rounded:
        """Quantize keys [S, D]."""
        return pack_keys(k, self.k_bits, self.group, halves=self.halves)

    def values(self, v: Tensor) -> Rounded:
        """Quantize values [S, D]."""
        return pack_values(v, self.v_bits, self.group, halves=self.halves)


@lru_cache(64)  # most heads of a cache are alike, and meta tensors are slow
def _layouts(form: Precision, n_keys: int, n_values: int, k_dim: int, v_dim: int) -> tuple[Rounded, Rounded]:
    """Return the layouts of n quantized keys and values as meta tensors."""
    keys, values = (torch.empty(*of, dtype=form.dtype, device="meta") for of in ((n_keys, k_dim), (n_values, v_dim)))
    return form.keys(keys), form.values(values)


class QuantizedHead:
    """Quantized keys [S, D] and values [S, E] at positions [S], some of them holes."""

    def __init__(self, form: Precision, k_dim: int, v_dim: int, device: torch.device | str) -> None:
        none = torch.empty(0, k_dim, dtype=form.dtype, device=device)
        self._form, self._v_dim = form, v_dim
        self.pos = torch.empty(0, dtype=torch.int32, device=device)  # -1 = hole
        self.keys = form.keys(none)
        self.rest = none  # [r, D] keys of an incomplete group, in full precision
        self.values = form.values(none.new_empty(0, v_dim))
        self.has_holes = False

    @property
    def length(self) -> int:
        """Number of slots, holes included."""
        return self.pos.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the head."""
        return [self.pos, self.rest, *self.keys.tensors, *self.values.tensors]

    def state(self) -> State:
        """Return a snapshot: positions, codes, scales and unquantized keys."""
        return {"pos": self.pos, "rest": self.rest, "keys": _state(self.keys), "values": _state(self.values)}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot."""
        form, dim = self._form, self.rest.shape[1]
        pos = given.positions("pos", None, least=-1)
        rest = given.tensor("rest", form.dtype, None, dim)
        full = len(pos) - len(rest)
        if full % form.group or not 0 <= len(rest) < form.group if form.is_grouped else len(rest):
            raise SnapshotMismatch("its keys do not fill groups")
        keys_like, values_like = _layouts(form, full, len(pos), dim, self._v_dim)
        keys = _made(given.part("keys"), keys_like, self.rest)
        values = _made(given.part("values"), values_like, self.rest)
        self.pos, self.rest = pos.to(self.pos.device), rest.to(self.rest.device)
        self.keys, self.values, self.has_holes = keys, values, not bool((pos >= 0).all())

    def take(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store k, v [M, D] at positions pos [M], none of them -1."""
        form = self._form
        keys, rest = self._packed(self.keys, self.rest, k)
        v = v.to(form.dtype, copy=True) if form.v_bits == 16 else v
        values = _join(self.values, form.values(v), self.length, pos.shape[0])
        pos = torch.cat([self.pos, pos.to(self.pos)])
        # assigned together, because an allocation above may have failed
        self.keys, self.rest, self.values, self.pos = keys, rest, values, pos

    def evict_except(self, mask: Tensor) -> None:
        """Evict slots whose mask [S] is False."""
        if not self._form.is_grouped:
            at = mask.nonzero().squeeze(1)
            keys, rest, values, pos = _pick(self.keys, at), self.rest, _pick_values(self.values, at), self.pos[at]
        else:
            keys, rest, values, pos = self._regrouped(mask)
        self.keys, self.rest, self.values, self.pos = keys, rest, values, pos
        self.has_holes = not bool((pos >= 0).all())

    def numbers(self, *, coarse: bool = False) -> tuple[Tensor, Tensor]:
        """Return dequantized k, v [S, D], holes included; `coarse`: from the upper bits only."""
        like, codes = self.rest, self.since(0, coarse=coarse)
        k = torch.cat([unpack_keys(codes.keys, like), like]) if like.shape[0] else unpack_keys(codes.keys, like)
        return k, unpack_values(codes.values, like, self.length)

    def numbers_at(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return k, v [m, D] of slots `at` [m]; only these are dequantized."""
        full = self.length - self.rest.shape[0]
        waits = at >= full
        k = self.rest.new_empty(at.shape[0], self.rest.shape[1])
        k[~waits], k[waits] = unpack_keys(self._keys_at(at[~waits]), self.rest), self.rest[at[waits] - full]
        return k, unpack_values(_pick_values(self.values, at), self.rest, at.shape[0])

    def since(self, first: int, *, coarse: bool = False) -> PackedHead:
        """Return the slots from the start of the group of `first` on, still quantized.

        `coarse`: only the upper bits of their codes.
        """
        keys, rest, values = self.keys, self.rest, self.values
        if coarse:
            keys, values = keys.coarse, values.coarse
        if first == 0:
            return PackedHead(keys, rest, values, self.length)
        at = torch.arange(first, self.length, device=self.pos.device)
        full = self.length - rest.shape[0]
        if self._form.is_grouped:
            keys = _pick(keys, torch.arange(min(first, full) // self._form.group, self._groups, device=at.device), True)
            rest = rest[max(0, first - full) :]
        else:
            keys = Rounded(keys.bits, *(t[first:] for t in keys.tensors))
        return PackedHead(keys, rest, _pick_values(values, at), self.length - first)

    def aligned(self, first: int) -> int:
        """Return the last slot up to `first` at which `since` can begin."""
        step = self._form.group if self._form.is_grouped else 1
        return min(first, self.length - self.rest.shape[0]) // step * step if step > 1 else first

    def final(self, n: int) -> int:
        """Return how many of the first n slots change only if some of these n are evicted: whole groups of keys.

        Keys of incomplete groups are quantized later; keys of a group that is split up are quantized again.
        """
        if not self._form.is_grouped:
            return n
        return min(n, self.length - self.rest.shape[0]) // self._form.group * self._form.group

    @property
    def _groups(self) -> int:
        return (self.length - self.rest.shape[0]) // self._form.group

    def _keys_at(self, at: Tensor) -> Rounded:
        """Return quantized keys `at` [m]; if slots share scales, each gets a copy of its group's."""
        if not self._form.is_grouped:
            return _pick(self.keys, at)
        keys, group = self.keys, at // self._form.group
        assert keys.scale is not None
        assert keys.zero is not None
        fine = None if keys.fine is None else keys.fine[at]
        return Rounded(keys.bits, keys.codes[at], keys.scale[group], keys.zero[group], fine)

    def _packed(self, keys: Rounded, rest: Tensor, k: Tensor) -> tuple[Rounded, Tensor]:
        """Append k [M, D] to keys and rest, and quantize full groups."""
        form = self._form
        if not form.is_grouped:
            k = k.to(form.dtype, copy=True) if form.k_bits == 16 else k
            return _stack([keys, form.keys(k)]), rest
        rest = torch.cat([rest, k.to(rest.dtype)])
        full = rest.shape[0] // form.group * form.group
        if full:
            keys, rest = _stack([keys, form.keys(rest[:full])]), rest[full:].clone()
        return keys, rest

    def _regrouped(self, mask: Tensor) -> tuple[Rounded, Tensor, Rounded, Tensor]:
        """Return keys, unquantized keys, values and positions after slots outside of mask [S] are evicted."""
        group, full = self._form.group, self.length - self.rest.shape[0]
        left = mask[:full].view(self._groups, group)
        stays = left.sum(1) * 2 >= group  # [groups]
        loose = (left & ~stays.unsqueeze(1)).flatten()  # slots that move
        kept = stays.repeat_interleave(group)
        ends = full + mask[full:].nonzero().squeeze(1)
        at = torch.cat([kept.nonzero().squeeze(1), loose.nonzero().squeeze(1), ends])
        moved = self._unpacked(loose.view(self._groups, group))
        keys = _pick(self.keys, stays.nonzero().squeeze(1), grouped=True)
        keys, rest = self._packed(keys, moved, self.rest[mask[full:]])
        return keys, rest, _pick_values(self.values, at), torch.where(mask, self.pos, -1)[at]

    def _unpacked(self, mask: Tensor) -> Tensor:
        """Return keys [n, D] of the slots in mask [groups, g]; only their groups are dequantized."""
        touched = mask.any(1).nonzero().squeeze(1)
        of = _pick(self.keys, touched, grouped=True)
        return unpack_keys(of, self.rest)[mask[touched].flatten()]


def _state(r: Rounded) -> State:
    return {str(i): t for i, t in enumerate(r.tensors)}


def _made(given: SnapshotReader, like: Rounded, here: Tensor) -> Rounded:
    """Restore the tensors of `_state` in the layout of `like` on the device of `here`."""
    return Rounded(like.bits, *(given.like(str(i), t).to(here.device) for i, t in enumerate(like.tensors)))


def _stack(found: Sequence[Rounded]) -> Rounded:
    """Concatenate keys, or values that are not transposed."""
    nonempty = [r for r in found if r.codes.shape[0]] or [found[0]]
    if len(nonempty) == 1:
        return nonempty[0]
    tensors = zip(*(r.tensors for r in nonempty), strict=True)
    return Rounded(nonempty[0].bits, *(torch.cat(list(ts)) for ts in tensors))


def _join(a: Rounded, b: Rounded, n: int, m: int) -> Rounded:
    """Concatenate the n values of `a` and the m values of `b`."""
    if a.bits != 8:
        return _stack([a, b])
    assert a.scale is not None
    assert b.scale is not None
    room = -(-(n + m) // LANES) * LANES
    codes, scale = a.codes.new_zeros(a.codes.shape[0], room), a.scale.new_zeros(room)
    codes[:, :n], codes[:, n : n + m] = a.codes[:, :n], b.codes[:, :m]
    scale[:n], scale[n : n + m] = a.scale[:n], b.scale[:m]
    return Rounded(8, codes, scale)


def _pick(r: Rounded, at: Tensor, grouped: bool = False) -> Rounded:
    """Select slots `at`, or groups `at` if slots share scales."""
    if not grouped:
        return Rounded(r.bits, *(t[at] for t in r.tensors))
    assert r.scale is not None
    assert r.zero is not None
    groups = r.scale.shape[0]
    shape = groups, r.codes.shape[0] // max(1, groups), r.codes.shape[1]
    fine = None if r.fine is None else r.fine.view(shape)[at].flatten(0, 1)
    return Rounded(r.bits, r.codes.view(shape)[at].flatten(0, 1), r.scale[at], r.zero[at], fine)


def _pick_values(r: Rounded, at: Tensor) -> Rounded:
    """Select the values of slots `at`, without quantizing again."""
    if r.bits != 8:
        return _pick(r, at)
    assert r.scale is not None
    return transposed(r.codes.T[at], r.scale[at])
