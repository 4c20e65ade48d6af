"""Recovery: the share of attention a head keeps under each FastGen candidate, measured on a few prompt rows.

For one row with attention a over tokens, keeping the set S leaves R = sum of a over S. The renormalised softmax over S
is at a total variation distance of exactly 1 - R from a, so R is all there is to measure (FastGen, Ge et al.,
arXiv 2310.01801, with that norm). Three measures prevent a biased estimate: a guard window in every candidate, frequent
tokens chosen on other rows than those they are measured on (cross-fit), and criteria on the worst rows instead of all
rows. Rows are processed in blocks, so that memory is bounded at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcli.engine.sequence.state import END, NEWLINE, PUNCT, SPECIAL, SYSTEM, TOOLS
from kvcli.kv.slots import Slots
from kvcli.methods.policies.fastgen.recovery_attention import NEVER, Block, RowAttention, times

if TYPE_CHECKING:
    from kvcli.methods.policies.fastgen.settings import FastGenSettings

Criterion = Literal["mean", "cvar10", "p05"]


@dataclass(frozen=True, slots=True)
class CandidateSets:
    """Token sets that the words of a candidate ("punct", "local", "frequent") mean for one sequence."""

    candidates: tuple[frozenset[str], ...]  # each a union of "punct", "local", "frequent"; or {"full"}
    sinks: int  # positions below are special
    guard: int  # newest tokens that every candidate keeps
    local: int  # newest tokens of a local head, never fewer than the guard
    frequent: int  # number of frequent tokens
    punct: tuple[int, ...]  # token kinds that count as punctuation
    crossfit: bool
    most: int  # most bytes of attention in memory

    @staticmethod
    def of(settings: FastGenSettings, kinds: Tensor, n_prompt: int | None = None) -> CandidateSets:
        """Build the sets for token kinds [T]; the local window is a share of the prompt (None: of all T tokens)."""
        n = kinds.shape[0]
        local = round(settings.reach * (n if n_prompt is None else n_prompt))
        return CandidateSets(
            candidates=tuple(frozenset(name.split("+")) - {"special"} for name in settings.candidates),
            sinks=settings.sinks,
            guard=settings.guarded,
            local=max(settings.guarded, local),
            frequent=round(settings.most * n),
            punct=punctuation(kinds if n_prompt is None else kinds[:n_prompt], settings.punct_cap),
            crossfit=settings.is_crossfit,
            most=int(settings.max_profile_mb * 2**20),
        )

    def having(self, word: str) -> list[bool]:
        """Return for each candidate whether it has this word."""
        return [word in c for c in self.candidates]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery measured for one layer. C candidates, K KV heads, G query heads per KV head, m rows, S slots."""

    mass: Tensor  # [C, K, G, m]: share of attention that a candidate keeps
    cost: Tensor  # [C, K] int64: stored tokens that a candidate keeps
    frequent: Tensor  # [K, S] bool: frequent slots, chosen on all rows
    far: Tensor  # [K, S]: attention of rows beyond the guard, summed over rows, mean over query heads

    def value(self, criterion: Criterion, gqa: Literal["mean", "min"]) -> Tensor:
        """Reduce the recovery to one number per candidate and KV head [C, K]."""
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
    settings: FastGenSettings,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    *,
    sink: Tensor | None = None,
    protected: Tensor | None = None,
    n_prompt: int | None = None,
) -> Recovery:
    """Measure the recovery of one layer with rows q [H, m, D] at rising positions q_pos [m]; kinds [T] by position.

    `sink` [H]: learned attention sink logits, which are never evicted. `protected` [K, S]: slots kept under every
    candidate. `n_prompt`: tokens that set the local window and punctuation; None = all of T.
    """
    sets = CandidateSets.of(settings, kinds, n_prompt)
    always, punct = classes(s, kinds, sets)
    always = always if protected is None else always | protected
    n_kv, m = s.pos.shape[0], q.shape[1]
    rows = q.reshape(n_kv, -1, m, q.shape[2]).transpose(1, 2)  # [K, m, G, D]
    sinks = None if sink is None else sink.reshape(n_kv, -1)
    each = s.k.element_size() * q.shape[0] // n_kv * m * s.n_slots  # bytes of one head's attention
    step = max(1, min(n_kv, sets.most // max(1, each)))
    parts = []
    for a in range(0, n_kv, step):
        at = slice(a, a + step)
        some = Slots(s.k[at], s.v[at], s.pos[at])
        look = RowAttention.of(rows[at], q_pos, some, scale, softcap, window, None if sinks is None else sinks[at])
        parts.append(_heads(look, look.sorted(always[at]), look.sorted(punct[at]), sets))
    mass, cost, frequent, far = zip(*parts, strict=True)
    return Recovery(torch.cat(mass, 1), torch.cat(cost, 1), torch.cat(frequent), torch.cat(far))


def classes(s: Slots, kinds: Tensor, sets: CandidateSets) -> tuple[Tensor, Tensor]:
    """Return two masks [K, S]: slots kept under every candidate, and punctuation slots."""
    kind = kinds.to(s.pos.device)[s.pos.clamp(min=0).long()]
    stored = s.pos >= 0
    special = (kind == SPECIAL) | (kind == SYSTEM) | (kind == TOOLS) | (s.pos < sets.sinks)
    punct = torch.zeros_like(stored)
    for each in sets.punct:
        punct |= kind == each
    return special & stored, punct & stored


def punctuation(kinds: Tensor, cap: float) -> tuple[int, ...]:
    """Return the token kinds that count as punctuation.

    Above the share `cap`, as in code, keeping all punctuation is not cheap, so only ends of sentences and lines count.
    """
    every = (PUNCT, END, NEWLINE)
    share = sum(int((kinds == each).sum()) for each in every) / max(1, kinds.shape[0])
    return every if share <= cap else (END, NEWLINE)


def top(score: Tensor, allowed: Tensor, n: int) -> Tensor:
    """Select the n highest scores of each head among the allowed slots -> bool [K, S]."""
    n = min(n, score.shape[-1])
    best = score.masked_fill(~allowed, -torch.inf).topk(n, dim=-1, sorted=False).indices
    return torch.zeros_like(allowed).scatter_(-1, best, True) & allowed


def _heads(
    look: RowAttention, always: Tensor, punct: Tensor, sets: CandidateSets
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mass [C, B, G, m], cost [C, B], frequent [B, S] and far [B, S]: first attention sums, then losses."""
    b, m, g, _ = look.q.shape
    wide = torch.promote_types(look.q.dtype, torch.float32)
    blocks = look.blocks(sets.most)
    # two loops: the second reuses the attention of the first, if it fits in memory
    held: list[Tensor] | None = [] if b * m * look.each <= sets.most else None
    columns = look.q.new_zeros(b, 2, look.k.shape[1], dtype=wide)
    for at in blocks:
        p = look.attention(at, sets.guard)
        odd = torch.arange(at.rows.start, at.rows.stop, device=p.device).repeat_interleave(g) % 2
        both = torch.stack((1 - odd, odd)).to(p.dtype)
        columns[at.heads, :, : p.shape[-1]] += both @ (p[0].flatten(0, 1) if p.shape[0] == 1 else p.flatten(1, 2))
        if held is not None:
            held.append(p)
    columns /= g
    stored = (look.pos < NEVER).expand_as(always)
    allowed = stored & ~always & ~punct
    far = columns.sum(1)
    frequent = top(far, allowed, sets.frequent)
    # rows 0, 2, 4, ... are measured with the slots that rows 1, 3, 5, ... chose, and vice versa
    apart = sets.crossfit and m > 1
    chosen = [top(columns[:, 1 - i], allowed, sets.frequent) for i in range(2)] if apart else [frequent]
    lost = torch.stack([_lost(stored & ~always, punct, each, sets) for each in chosen], 1)  # [B, 1 or 2, C, S]
    ours = [[i for i, has in enumerate(sets.having("local")) if has == is_local] for is_local in (False, True)]
    parts = [(which, lost[:, :, which].to(look.k.dtype)) for which in ours]  # without and with the local window
    del lost
    gone = look.q.new_zeros(b, m, g, len(sets.candidates), dtype=wide)
    for i, at in enumerate(blocks):
        gone[at.heads, at.rows] = _gone(look, at, held[i] if held else None, parts, sets)
    newest = look.pos.masked_fill(look.pos == NEVER, -1).amax(1, keepdim=True) if look.pos.shape[1] else look.pos
    local = torch.tensor(sets.having("local"), device=always.device).view(1, -1, 1)
    age = (newest - look.pos).unsqueeze(1)  # [B, 1, S]
    near = (age < sets.guard) | (local & (age < sets.local))
    cost = (stored.unsqueeze(1) & (near | ~_lost(stored & ~always, punct, frequent, sets))).sum(-1)  # [B, C]
    return 1 - gone.permute(3, 0, 2, 1), cost.T, look.unsorted(frequent), look.unsorted(far)


def _lost(loose: Tensor, punct: Tensor, frequent: Tensor, sets: CandidateSets) -> Tensor:
    """Return the evictable slots [B, C, S] that a candidate keeps neither as punctuation nor as frequent tokens."""
    lost = loose.unsqueeze(1).repeat(1, len(sets.candidates), 1)
    for i, words in enumerate(sets.candidates):
        if "punct" in words:
            lost[:, i] &= ~punct
        if "frequent" in words:
            lost[:, i] &= ~frequent
        if "full" in words:
            lost[:, i] = False
    return lost


def _gone(
    look: RowAttention, at: Block, p: Tensor | None, parts: list[tuple[list[int], Tensor]], sets: CandidateSets
) -> Tensor:
    """Return the attention [b, r, G, C] that each row loses beyond the near tokens; parts: without and with "local"."""
    if p is None:
        p = look.attention(at, sets.guard)
    b, r, g, _ = p.shape
    out = p.new_zeros(b, r, g, len(sets.candidates))
    odd = (torch.arange(at.rows.start, at.rows.stop, device=p.device) % 2).view(1, -1, 1, 1) == 1
    for is_local, (which, lost) in enumerate(parts):
        if not which:
            continue
        if is_local:
            p = look.beyond(p, at, sets.local)
        sums = times(p.flatten(1, 2), lost[at.heads, ..., : p.shape[-1]].flatten(1, 2))
        sums = sums.view(b, r, g, lost.shape[1], len(which))
        out[..., which] = torch.where(odd, sums[..., -1, :], sums[..., 0, :])
    return out
