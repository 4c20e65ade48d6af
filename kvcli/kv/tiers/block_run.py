"""A run of quantized slots: those of one KV head, or of several heads that are quantized together.

The numbers of a slot are quantized in parts: its key, its value, or both at once. If a part is quantized by slot,
evicting a slot changes no other slot. If it is quantized by block, `group` slots share codes or scales: slots wait in
full precision until they fill a block, an evicted slot becomes a hole (position -1), and a block of holes is dropped.
If less than half of a block remains, its slots are dequantized and wait until a new block is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import LANES
from kvcli.kv.formats.format import Codes
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State


class PartCodec:
    """Quantizer of a part of the numbers of slots. Codes are tensors whose first dimension is blocks, or slots if each
    slot is quantized alone."""

    of: tuple[int, ...]  # what it quantizes: 0 = keys, 1 = values
    by_block: bool  # a run has at most one such part, its first
    splits = False  # one slot of a block can be dequantized alone, by its part of those codes that are [B, g, ..]
    is_turned = False  # codes have slots last, and zeros behind them up to a multiple of LANES

    def quantize(self, given: Sequence[Tensor], pos: Tensor) -> Codes:
        """Quantize numbers [n * h, S, ..] at pos [n * h, S], S whole blocks, of n runs, to their codes in turn."""
        raise NotImplementedError

    def dequantize(self, codes: Codes, pos: Tensor) -> Sequence[Tensor]:
        """Dequantize to numbers [h, S, ..] at pos [h, S]; holes are finite too."""
        raise NotImplementedError

    def layout(self, n: int) -> Codes:
        """Return the codes of n blocks or slots as meta tensors."""
        raise NotImplementedError

    def coarse(self, codes: Codes) -> Codes:
        """Return the codes that hold the upper bits of split codes."""
        return codes

    def pick(self, codes: Codes, at: Tensor | slice) -> Codes:
        """Select blocks or slots `at`."""
        if isinstance(at, slice) or self.is_turned:
            return tuple(t[..., at] if self.is_turned else t[at] for t in codes)
        return tuple(t.index_select(0, at) for t in codes)  # several times as fast as t[at]

    def join(self, codes: Codes, n: int, more: Codes, m: int) -> Codes:
        """Return a copy of n blocks or slots of `codes` and of m more."""
        if not self.is_turned:
            return tuple(
                torch.cat([a, b if b.dtype == a.dtype else b.to(a.dtype)]) for a, b in zip(codes, more, strict=True)
            )
        made = tuple(b.new_zeros(*b.shape[:-1], -(-(n + m) // LANES) * LANES) for b in more)
        for new, a, b in zip(made, codes, more, strict=True):
            new[..., :n], new[..., n : n + m] = a[..., :n], b[..., :m]
        return made


@dataclass(frozen=True)
class RunForm:
    """Form of the runs of a layer."""

    parts: tuple[PartCodec, ...]
    dims: tuple[int, int]  # elements of a key and of a value
    group: int  # slots of a block
    dtype: torch.dtype  # of waiting and of dequantized slots
    heads: int = 1  # heads that are quantized together

    @property
    def waiting(self) -> tuple[int, ...]:
        """Numbers that wait until a block is full: 0 = keys, 1 = values."""
        return self.parts[0].of if self.parts[0].by_block else ()


class BlockRun:
    """Slots of h heads: S per head, of which some are holes and the last r wait for others in parts by block."""

    def __init__(self, form: RunForm, device: torch.device | str) -> None:
        self.form = form
        self.pos = torch.empty(form.heads, 0, dtype=torch.int32, device=device)  # [h, S], -1 = hole
        self.waits = tuple(
            torch.empty(form.heads, 0, form.dims[i], dtype=form.dtype, device=device) for i in form.waiting
        )  # [h, r, ..]
        self.codes = tuple(tuple(torch.empty_like(t, device=device) for t in part.layout(0)) for part in form.parts)
        self.has_holes = False

    @property
    def length(self) -> int:
        """Slots of each head, holes included."""
        return self.pos.shape[1]

    @property
    def full(self) -> int:
        """Slots in blocks."""
        return self.length - (self.waits[0].shape[1] if self.waits else 0)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the run."""
        return [self.pos, *self.waits, *(t for codes in self.codes for t in codes)]

    @staticmethod
    def take(runs: Sequence[BlockRun], k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store k [n * h, M, D], v [n * h, M, E] at positions pos [n * h, M], none of them -1, in n runs of one form in
        which equally many slots wait. They are quantized together, which is faster."""
        form, g, h = runs[0].form, runs[0].form.group, runs[0].form.heads
        given, codes, waits = (k, v), list[list[Codes]](), [run.waits for run in runs]
        every, first = list[Tensor](), runs[0].pos
        for run, its in zip(runs, torch.split(pos, h), strict=True):
            shares = every and run.pos.data_ptr() == first.data_ptr() and torch.equal(its, pos[:h])
            every.append(every[0] if shares else torch.cat([run.pos, its.int()], 1))
        for i, part in enumerate(form.parts):
            mine, at, n, size = [given[j] for j in part.of], pos, pos.shape[1], 1
            if part.by_block:
                before = [torch.cat(each) for each in zip(*waits, strict=True)]
                mine = [torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(before, mine, strict=True)]
                n, size = mine[0].shape[1] // g * g, g
                waits = [tuple(t[j * h : j * h + h, n:].clone() for t in mine) for j in range(len(runs))]
                at = torch.cat([its[:, run.full : run.full + n] for run, its in zip(runs, every, strict=True)])
                mine = [t[:, :n] for t in mine]
            codes.append([run.codes[i] for run in runs])
            if m := n // size:
                more = part.quantize(mine, at)
                for j, run in enumerate(runs):
                    stored = (run.full if part.by_block else run.length) // size
                    codes[i][j] = part.join(codes[i][j], stored, part.pick(more, slice(j * m, j * m + m)), m)
        # assigned together, because an allocation above may have failed
        for run, its, left, each in zip(runs, every, waits, zip(*codes, strict=True), strict=True):
            run.codes, run.waits, run.pos = each, left, its

    def evict_except(self, mask: Tensor) -> None:
        """Evict slots whose mask [h, S] is False, the same slots of all heads."""
        assert len(mask) == 1 or bool((mask == mask[:1]).all()), "heads of one block would differ in slots"
        kept, g, full, waits = mask[0], self.form.group, self.full, self.waits
        if not waits:
            at = kept.nonzero().squeeze(1)
            self.codes, self.pos, self.has_holes = self._picked(0, at), self.pos[:, at], False
            return
        left = kept[:full].view(-1, g)
        stays = left.sum(1) * 2 >= g  # [B]
        loose = left & ~stays.unsqueeze(1)  # slots that wait again
        ends = full + kept[full:].nonzero().squeeze(1)
        at = torch.cat([stays.repeat_interleave(g).nonzero().squeeze(1), loose.flatten().nonzero().squeeze(1), ends])
        pos, blocks = torch.where(mask, self.pos, -1)[:, at], stays.nonzero().squeeze(1)
        by_block = self.form.parts[0]
        touched = loose.any(1).nonzero().squeeze(1)
        moved = by_block.dequantize(by_block.pick(self.codes[0], touched), self._pos_of(touched))
        which = loose[touched].flatten()
        waits = tuple(torch.cat([a[:, which], b[:, kept[full:]]], 1) for a, b in zip(moved, waits, strict=True))
        codes, waits = self._filled(by_block.pick(self.codes[0], blocks), len(blocks) * g, waits, pos)
        self.codes, self.waits, self.pos = (codes, *self._picked(1, at)), waits, pos
        self.has_holes = not bool((pos >= 0).all())

    def numbers(self, first: int, last: int, *, coarse: bool = False) -> tuple[Tensor, Tensor]:
        """Return dequantized k, v [h, last - first, ..], holes included; `first` starts a block.

        `coarse`: from the upper bits of split codes.
        """
        g, n, made = self.form.group, min(last, self.length), dict[int, Tensor]()
        end = min(n, self.full)
        for part, codes in zip(self.form.parts, self.codes, strict=True):
            mine = part.coarse(codes) if coarse else codes
            if part.by_block:
                blocks = slice(first // g, max(first, end + g - 1) // g)
                found = part.dequantize(part.pick(mine, blocks), self.pos[:, first : blocks.stop * g])
                waits = slice(max(0, first - self.full), max(0, n - self.full))
                found = [
                    torch.cat([a[:, : max(0, end - first)], b[:, waits]], 1) if n > end else a[:, : end - first]
                    for a, b in zip(found, self.waits, strict=True)
                ]
            else:
                found = part.dequantize(part.pick(mine, slice(first, n)), self.pos[:, first:n])
            made |= zip(part.of, found, strict=True)
        return made[0], made[1]

    def numbers_at(self, head: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return k, v [m, ..] of slots `at` [m] of one head; only these, or their blocks, are dequantized."""
        g, made = self.form.group, dict[int, Tensor]()
        for part, codes in zip(self.form.parts, self.codes, strict=True):
            if not part.by_block:
                made |= zip(part.of, (t[head] for t in part.dequantize(part.pick(codes, at), at)), strict=True)
                continue
            waits = at >= self.full
            inner = at[~waits]
            blocks = inner // g
            if part.splits:
                by_slot = (t.flatten(0, 1).unsqueeze(1) if t.dim() == 3 else t for t in codes)
                mine = tuple(t.index_select(0, inner if t.dim() == 3 else blocks) for t in by_slot)
                found = [t[head] for t in part.dequantize(mine, inner)]
            else:
                blocks, inverse = torch.unique(blocks, return_inverse=True)
                read = part.dequantize(part.pick(codes, blocks), self._pos_of(blocks))
                found = [t[head].index_select(0, inverse * g + inner % g) for t in read]
            if len(inner) < len(at):
                order = waits.to(torch.uint8).argsort(stable=True).argsort()
                loose = (rest[head, at[waits] - self.full] for rest in self.waits)
                found = [torch.cat(both)[order] for both in zip(found, loose, strict=True)]
            made |= zip(part.of, found, strict=True)
        return made[0], made[1]

    def n_stable(self, n: int) -> int:
        """Return how many of the first n slots change only if some of these n are evicted: those of whole blocks."""
        return min(n, self.full) // self.form.group * self.form.group if self.waits else n

    def state(self) -> State:
        """Return a snapshot: positions, codes by part, and waiting slots."""
        codes: State = {str(i): _tree(codes) for i, codes in enumerate(self.codes)}
        return {"pos": self.pos.contiguous(), "waits": _tree(self.waits), "codes": codes}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot."""
        form, here = self.form, self.pos.device
        pos = given.positions("pos", form.heads, None, least=-1)
        part, waits = given.part("waits"), list[Tensor]()
        for n, i in enumerate(form.waiting):
            waits.append(part.tensor(str(n), form.dtype, form.heads, len(waits[0][0]) if n else None, form.dims[i]))
        full, rest = (pos.shape[1] - waits[0].shape[1], waits[0].shape[1]) if waits else (pos.shape[1], 0)
        if waits and (full % form.group or not 0 <= rest < form.group or full < 0):
            raise SnapshotMismatch("its slots do not fill blocks")
        codes = []
        for i, each in enumerate(form.parts):
            layout = each.layout(full // form.group if each.by_block else pos.shape[1])
            its = given.part("codes").part(str(i))
            codes.append(tuple(its.like(str(j), t).to(here) for j, t in enumerate(layout)))
        self.codes, self.waits = tuple(codes), tuple(t.to(here) for t in waits)
        self.pos, self.has_holes = pos.to(here), not bool((pos >= 0).all())

    def _picked(self, first: int, at: Tensor) -> tuple[Codes, ...]:
        """Return the codes of slots `at` in all parts from `first` on, none of which is by block."""
        each = zip(self.form.parts[first:], self.codes[first:], strict=True)
        found = ((part, codes, part.pick(codes, at)) for part, codes in each)
        return tuple(part.join(codes, 0, mine, len(at)) if part.is_turned else mine for part, codes, mine in found)

    def _pos_of(self, blocks: Tensor) -> Tensor:
        """Return the positions [h, b * g] of these blocks."""
        return self.pos[:, : self.full].view(len(self.pos), -1, self.form.group)[:, blocks].flatten(1)

    def _filled(
        self, codes: Codes, full: int, waits: tuple[Tensor, ...], pos: Tensor
    ) -> tuple[Codes, tuple[Tensor, ...]]:
        """Quantize the full blocks of waiting slots, which are at pos[:, full:]; return codes and what still waits."""
        g, part = self.form.group, self.form.parts[0]
        n = waits[0].shape[1] // g * g
        if not n:
            return codes, waits
        more = part.quantize([t[:, :n] for t in waits], pos[:, full : full + n])
        return part.join(codes, full // g, more, n // g), tuple(t[:, n:].clone() for t in waits)


def _tree(tensors: Iterable[Tensor]) -> State:
    return {str(i): t for i, t in enumerate(tensors)}
