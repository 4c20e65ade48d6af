"""How much attention a head keeps under each of FastGen's policies, measured on a few rows of the prompt.

For one row with attention a over tokens, keeping the set S leaves R = sum of a over S; what softmax makes of the rest
is at a total variation distance of exactly 1 - R from a, so R is all there is to measure (FastGen, Ge et al.,
arXiv 2310.01801, with that norm). Three things keep the estimate honest: a guard window that belongs to every policy,
frequent tokens chosen on other rows than those they are measured on (cross-fit), and criteria that look at the worst
rows instead of all of them. Rows go in blocks, so that memory is bounded at any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcli.kinds import END, NEWLINE, PUNCT, SPECIAL, SYSTEM, TOOLS
from kvcli.kv.slots import Slots

if TYPE_CHECKING:
    from kvcli.policies.fastgen import FastGen

Criterion = Literal["mean", "cvar10", "p05"]


@dataclass(frozen=True, slots=True)
class Sets:
    """What the words of a candidate mean for one text."""

    candidates: tuple[frozenset[str], ...]  # each a union of "punct", "local", "frequent"; or {"full"}
    sinks: int  # positions below are special
    guard: int  # newest tokens that every candidate keeps
    local: int  # tokens, never fewer than the guard
    frequent: int  # tokens
    punct: tuple[int, ...]  # kinds of tokens
    crossfit: bool
    most: int  # bytes that a block of rows may take

    @staticmethod
    def of(settings: FastGen, kinds: Tensor, n_prompt: int | None = None) -> Sets:
        """For a text of these kinds [T]; the reach of local heads is a share of its prompt (None: the whole text)."""
        n = kinds.shape[0]
        local = round(settings.local_ratio * (n if n_prompt is None else n_prompt))
        return Sets(
            candidates=tuple(frozenset(name.split("+")) - {"special"} for name in settings.candidates),
            sinks=settings.sinks,
            guard=settings.guarded,
            local=max(settings.guarded, local),
            frequent=round(settings.frequent_ratio * n),
            punct=punctuation(kinds if n_prompt is None else kinds[:n_prompt], settings.punct_cap),
            crossfit=settings.is_crossfit,
            most=int(settings.max_profile_mb * 2**20),
        )

    def having(self, word: str) -> list[bool]:
        """Which candidates have this word."""
        return [word in c for c in self.candidates]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the rows say of one layer. C candidates, K KV heads, G query heads of each, m rows, S slots."""

    mass: Tensor  # [C, K, G, m]: attention that a candidate keeps, of 1
    cost: Tensor  # [C, K] int64: tokens it keeps of those stored
    frequent: Tensor  # [K, S] bool: the frequent slots, chosen on all rows
    far: Tensor  # [K, S]: attention of rows beyond the guard, summed over rows, mean over query heads

    def value(self, criterion: Criterion, gqa: Literal["mean", "min"]) -> Tensor:
        """[C, K]: one number for each candidate of a KV head."""
        mass = self.mass.mean(2) if gqa == "mean" else self.mass.amin(2)  # [C, K, m]
        if criterion == "mean":
            return mass.mean(-1)
        worst = mass.sort(-1).values
        m = worst.shape[-1]
        if criterion == "p05":
            return worst[..., int(0.05 * (m - 1))]
        return worst[..., : -(-m // 10)].mean(-1)


def recover(
    q: Tensor,
    q_pos: Tensor,
    s: Slots,
    kinds: Tensor,
    settings: FastGen,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    *,
    sink: Tensor | None = None,
    protected: Tensor | None = None,
    n_prompt: int | None = None,
) -> Recovery:
    """Rows q [H, m, D] at rising positions q_pos [m] over the slots of one layer; kinds [T] by position.

    `sink` [H]: learned logits that take mass and are never forgotten. `protected` [K, S]: slots that stay under every
    candidate. `n_prompt`: local reach and punctuation go by this many tokens; None = all of T.
    """
    sets = Sets.of(settings, kinds, n_prompt)
    n_kv, m = s.pos.shape[0], q.shape[1]
    rows = q.reshape(n_kv, -1, m, q.shape[2]).transpose(1, 2)  # [K, m, G, D]
    sinks = None if sink is None else sink.reshape(n_kv, -1)
    always, punct = classes(s, kinds, sets)
    always = always if protected is None else always | protected
    heads = []
    for j in range(n_kv):
        look = Look(rows[j], q_pos, s.k[j], s.pos[j], scale, softcap, window, None if sinks is None else sinks[j])
        heads.append(_head(look, always[j], punct[j], sets))
    return Recovery(
        mass=torch.stack([h.mass for h in heads], 1),
        cost=torch.stack([h.cost for h in heads], 1),
        frequent=torch.stack([h.frequent for h in heads]),
        far=torch.stack([h.far for h in heads]),
    )


def classes(s: Slots, kinds: Tensor, sets: Sets) -> tuple[Tensor, Tensor]:
    """[K, S] bool each: slots kept under every candidate, and slots that are punctuation."""
    kind = kinds.to(s.pos.device)[s.pos.clamp(min=0).long()]
    stored = s.pos >= 0
    special = (kind == SPECIAL) | (kind == SYSTEM) | (kind == TOOLS) | (s.pos < sets.sinks)
    punct = torch.zeros_like(stored)
    for each in sets.punct:
        punct |= kind == each
    return special & stored, punct & stored


def punctuation(kinds: Tensor, cap: float) -> tuple[int, ...]:
    """The kinds that count as punctuation: in code it is no cheap set, and then only ends of sentences and lines do."""
    every = (PUNCT, END, NEWLINE)
    share = sum(int((kinds == each).sum()) for each in every) / max(1, kinds.shape[0])
    return every if share <= cap else (END, NEWLINE)


def top(score: Tensor, allowed: Tensor, n: int) -> Tensor:
    """[S] bool: the n highest scores among those allowed; of equal ones the first."""
    order = torch.sort(score.masked_fill(~allowed, -torch.inf), descending=True, stable=True).indices
    return torch.zeros_like(allowed).index_fill_(0, order[:n], True) & allowed


@dataclass(frozen=True, slots=True)
class Look:
    """Rows of one KV head over its slots."""

    q: Tensor  # [m, G, D]
    q_pos: Tensor  # [m]
    k: Tensor  # [S, D]
    pos: Tensor  # [S]
    scale: float
    softcap: float
    window: int | None
    sink: Tensor | None  # [G]

    @property
    def n_group(self) -> int:
        return self.q.shape[1]

    def attention(self, rows: slice) -> Tensor:
        """[r, G, S]: softmax over the slots that each row sees, and over the sink."""
        exact = torch.promote_types(self.q.dtype, torch.float32)
        p = self.q[rows].to(exact) @ self.k.to(exact).T  # [r, G, S]
        p *= self.scale
        if self.softcap > 0:
            p = p.div_(self.softcap).tanh_().mul_(self.softcap)
        far = self.distance(rows)
        hidden = (far < 0) | (self.pos < 0)
        if self.window is not None:
            hidden |= far >= self.window
        p.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        lse = p.logsumexp(-1, keepdim=True)  # [r, G, 1]
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.to(exact).view(1, -1, 1))
        return p.sub_(lse.nan_to_num(neginf=0.0)).exp_()  # a row that sees nothing has no attention to lose

    def distance(self, rows: slice) -> Tensor:
        """[r, S]: how far back each slot is from each row."""
        return self.q_pos[rows].unsqueeze(1) - self.pos

    def blocks(self, most: int) -> Iterator[slice]:
        """Rows whose buffers together stay within so many bytes, or single rows."""
        copies = 5  # of the scores: float, its product, masks; measured
        each = copies * self.n_group * self.k.shape[0] * 4
        step = max(1, most // max(1, each))
        m = self.q_pos.shape[0]
        return (slice(a, min(a + step, m)) for a in range(0, m, step))


@dataclass(frozen=True, slots=True)
class _Head:
    mass: Tensor  # [C, G, m]
    cost: Tensor  # [C]
    frequent: Tensor  # [S]
    far: Tensor  # [S]


def _head(look: Look, always: Tensor, punct: Tensor, sets: Sets) -> _Head:
    """One KV head: first what far rows look at, then what each candidate would lose."""
    blocks = list(look.blocks(sets.most))
    held = None  # one block holds all rows: then the second pass needs no attention of its own
    columns = look.pos.new_zeros(2, look.pos.shape[0], dtype=torch.promote_types(look.q.dtype, torch.float32))
    for rows in blocks:
        held = look.attention(rows)
        held.masked_fill_((look.distance(rows) < sets.guard).unsqueeze(1), 0.0)
        each = held.mean(1)  # [r, S]
        odd = torch.arange(rows.start, rows.stop, device=each.device) % 2 == 1
        columns[0] += each[~odd].sum(0)
        columns[1] += each[odd].sum(0)
    allowed = (look.pos >= 0) & ~always & ~punct
    far = columns.sum(0)
    frequent = top(far, allowed, sets.frequent)
    # rows 0, 2, 4, ... are measured with what rows 1, 3, 5, ... chose, and the other way round
    apart = sets.crossfit and look.q_pos.shape[0] > 1
    chosen = [top(columns[1 - i], allowed, sets.frequent) for i in range(2)] if apart else [frequent, frequent]
    lost = [_lost(always, punct, each, look.pos, sets) for each in chosen]  # [C, S] each
    mass = torch.cat([_kept(look, rows, held if len(blocks) == 1 else None, lost, sets) for rows in blocks], 1)
    newest = look.pos.amax() if look.pos.shape[0] else 0
    near = torch.tensor(sets.having("local"), device=look.pos.device).unsqueeze(1) & (newest - look.pos < sets.local)
    near |= newest - look.pos < sets.guard
    cost = ((look.pos >= 0) & (near | ~_lost(always, punct, frequent, look.pos, sets))).sum(1)
    return _Head(mass.permute(0, 2, 1), cost, frequent, far)


def _lost(always: Tensor, punct: Tensor, frequent: Tensor, pos: Tensor, sets: Sets) -> Tensor:
    """[C, S] bool: stored slots that a candidate does not keep for what they are, wherever they stand."""
    lost = (~always & (pos >= 0)).repeat(len(sets.candidates), 1)
    for i, words in enumerate(sets.candidates):
        if "punct" in words:
            lost[i] &= ~punct
        if "frequent" in words:
            lost[i] &= ~frequent
        if "full" in words:
            lost[i] = False
    return lost


def _kept(look: Look, rows: slice, p: Tensor | None, lost: list[Tensor], sets: Sets) -> Tensor:
    """[C, r, G]: one minus what each row would lose, near tokens being safe."""
    far = look.distance(rows)
    if p is None:
        p = look.attention(rows).masked_fill_((far < sets.guard).unsqueeze(1), 0.0)
    out = p.new_zeros(len(sets.candidates), *p.shape[:2])
    odd = (torch.arange(rows.start, rows.stop, device=p.device) % 2 == 1).view(-1, 1, 1)
    local = torch.tensor(sets.having("local"), device=p.device).view(-1, 1, 1)
    for is_local in (False, True):
        if is_local:
            p.masked_fill_((far < sets.local).unsqueeze(1), 0.0)
        even, other = (p @ each.T.to(p.dtype) for each in lost)  # [r, G, C] each
        gone = torch.where(odd, other, even).permute(2, 0, 1)
        out = torch.where(local == is_local, gone, out)
    return (1 - out).clamp(0.0, 1.0)
