"""Sampler: turns logits into tokens, with noise keyed by (seed, position), so that one seed gives one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.engine.sequence import penalties, truncation
from kvcli.engine.sequence.token_history import TokenHistory
from kvcli.kernels import argmax
from kvcli.kernels.gumbel_noise import gumbel, uniform
from kvcli.kernels.gumbel_noise.host import COIN
from kvcli.kernels.gumbel_noise.reference import signed
from kvcli.settings.schema import NO_PENALTY

STUCK = -2  # returned where a constraint allows no token
COLDEST = 1e-30  # lowest divisor of logits: smaller ones overflow, and the most likely token wins long before


class TokenFacts(NamedTuple):
    """Facts about all tokens at N rows, each [N, V] (token_history.py); None = no penalty of the sampler reads it."""

    seen: Tensor | None = None
    counts: Tensor | None = None
    repeats: Tensor | None = None

    def of(self, ids: Tensor) -> TokenFacts:
        """Return the facts about these tokens [C] alone, each [N, C]."""
        return TokenFacts(*(fact if fact is None else fact[:, ids] for fact in self))


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Settings that decide how the next token is sampled. Each acts by one function of penalties.py or truncation.py,
    in the order of the fields below; coupled noise is last.

    The order is transformers', because the settings in a model's files are meant so: penalties, temperature, then
    truncation. What transformers lacks stands where text-generation-webui has it: DRY last of the penalties,
    top-n-sigma first and XTC last of the truncations. At temperature 0 the most likely token has all the probability,
    so only bias and penalties act. A token depends on its logits, on the ids before it, on seed and position alone.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit; each id once
    repetition_penalty: float = 1.0  # > 1 makes tokens already in the text less likely
    presence_penalty: float = 0.0  # subtracted from the logits of tokens already in the answer
    frequency_penalty: float = 0.0  # subtracted for each time that a token is in the answer
    dry_multiplier: float = 0.0  # DRY, which makes tokens that continue a repetition less likely; 0 = off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens that may be repeated
    dry_range: int = 0  # tokens before a row that are searched for repetitions; 0 = all
    dry_breakers: frozenset[int] = frozenset()  # ids that no repetition contains
    temperature: float = 0.0  # 0 = greedy
    top_n_sigma: float = 0.0  # keep tokens this many standard deviations below the best logit; 0 = all
    top_k: int = 0  # keep the k most likely tokens; 0 = all
    top_p: float = 1.0  # keep the smallest set with this total probability
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    typical_p: float = 1.0  # keep the most typical tokens with this total probability
    bregman_lambda: float = 0.0  # keep the number of tokens that Bregman top-k chooses at this cost of each; 0 = all
    bregman_alpha: float = 1.5  # its divergence
    xtc_probability: float = 0.0  # XTC, which drops all likely tokens but one, acts at this share of positions
    xtc_threshold: float = 0.1  # probability of a likely token
    seed: int = 0

    @property
    def penalties(self) -> dict[str, float]:
        """Penalties that act, by profile key. They depend on earlier tokens, so each row is sampled with its path."""
        return {key: value for key, off in NO_PENALTY.items() if (value := getattr(self, key)) != off}

    @property
    def numbers(self) -> dict[str, float]:
        """Temperature, and numbers that differ from what has no effect, by profile key."""
        values = {of.name: getattr(self, of.name) for of in fields(self) if getattr(self, of.name) != of.default}
        return {"temperature": self.temperature} | {k: v for k, v in values.items() if isinstance(v, int | float)}

    @property
    def idle(self) -> dict[str, str]:
        """Settings that are set and have no effect, by profile key, each with the one that is 0."""
        needs = dict.fromkeys(("top_n_sigma", "top_k", "top_p", "min_p", "typical_p"), "temperature")
        needs |= {"bregman_lambda": "temperature", "bregman_alpha": "bregman_lambda"}
        needs |= {"xtc_probability": "temperature", "xtc_threshold": "xtc_probability"}
        needs |= dict.fromkeys(("dry_base", "dry_allowed_length", "dry_range"), "dry_multiplier")
        return {key: other for key, other in needs.items() if key in self.numbers and not getattr(self, other)}

    def facts(self, history: TokenHistory, paths: Sequence[Sequence[int]], answer_at: int) -> TokenFacts:
        """Return the facts that the penalties read, at rows behind these paths."""
        most = penalties.longest_repeat(self.dry_base, self.dry_allowed_length)
        return TokenFacts(
            history.seen(paths) if self.repetition_penalty != 1 else None,
            history.counts(paths, answer_at) if self.presence_penalty or self.frequency_penalty else None,
            history.repeats(paths, self.dry_range, self.dry_breakers, most) if self.dry_multiplier else None,
        )

    @property
    def temperature_divisor(self) -> float:
        """The divisor of the logits."""
        return max(self.temperature, COLDEST)

    def __call__(self, logits: Tensor, pos: Tensor, facts: TokenFacts | None = None) -> Tensor:
        """Sample the token after each row: logits [N, V] of rows at positions pos [N] -> ids [N].

        The id is -1 if the logits are NaN or infinite, so that a GPU reports errors with its result and the host waits
        once.
        """
        if not logits.is_cpu:
            return self.on_device(logits, pos, facts)
        ids, scores = self.scores(logits, pos, facts)
        # numpy: torch takes 30 times as long to find the largest of 150,000, and needs five calls around it
        on_host = scores.numpy()
        at = np.arange(len(on_host)), on_host.argmax(-1)  # NaN counts as the largest
        drawn = at[1] if ids is None else ids.numpy()[at]
        drawn[~np.isfinite(on_host[at])] = -1
        return torch.from_numpy(drawn)

    def on_device(
        self, logits: Tensor, pos: Tensor, facts: TokenFacts | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """Sample as above without a host synchronization. `seed` []: replaces the sampler's seed."""
        if (at_once := self.fused(logits, pos, facts, seed)) is not None:
            return at_once
        ids, scores = self.scores(logits, pos, facts, seed)
        best = scores.argmax(-1, keepdim=True)
        found = best if ids is None else ids.gather(-1, best)
        top = scores.gather(-1, best)
        return found.masked_fill(top - top != 0, -1).squeeze(-1)  # like `isfinite`, which launches six operations

    def fused(
        self, logits: Tensor, pos: Tensor, facts: TokenFacts | None = None, seed: Tensor | None = None
    ) -> Tensor | None:
        """Sample ids [N] with one kernel. None if it does not support these logits, or if candidates must be sorted.

        `seed` []: on the device; replaces the sampler's seed.
        """
        if (self.temperature and not self.keeps_all) or argmax.why_not(logits):
            return None
        logits = self.penalize(logits, facts)
        if self.temperature == 0:
            return argmax.argmax(logits)
        n, device = len(logits), logits.device
        seeds = torch.full((n,), signed(self.seed), device=device) if seed is None else seed.repeat(n)
        heat = torch.full((n,), self.temperature_divisor, dtype=torch.float32, device=device)
        return argmax.argmax(logits, argmax.Noise(seeds, pos, heat))

    @property
    def keeps_all(self) -> bool:
        """True if every token may be sampled."""
        drops = self.top_k, self.min_p, self.top_n_sigma, self.bregman_lambda, self.xtc_probability
        return not any(drops) and self.top_p == self.typical_p == 1

    def penalize(self, logits: Tensor, facts: TokenFacts | None) -> Tensor:
        """Return logits with bias and penalties, in float32; unchanged if there are none."""
        if facts is None and not self.logit_bias:
            return logits
        logits = logits.float() if logits.dtype != torch.float64 else logits
        logits = penalties.add_bias(logits, self.logit_bias) if self.logit_bias else logits
        return logits if facts is None else self.punish(logits, facts)

    def punish(self, logits: Tensor, facts: TokenFacts) -> Tensor:
        """Return logits with the penalties. Logits and facts may be those of some tokens."""
        if facts.seen is not None:
            logits = penalties.penalize_repetition(logits, facts.seen, self.repetition_penalty)
        if facts.counts is not None:
            logits = penalties.penalize_counts(logits, facts.counts, self.presence_penalty, self.frequency_penalty)
        if facts.repeats is not None:
            dry = self.dry_multiplier, self.dry_base, self.dry_allowed_length
            logits = penalties.penalize_repeats(logits, facts.repeats, *dry)
        return logits

    def scores(
        self, logits: Tensor, pos: Tensor, facts: TokenFacts | None = None, seed: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Return candidates [N, C] (None = the whole vocabulary) and their scores; the highest score is sampled."""
        key = self.seed if seed is None else seed
        logits = self.penalize(logits.float() if logits.dtype != torch.float64 else logits, facts)
        if self.temperature == 0:
            return None, logits
        if self.keeps_all:
            # no token is dropped, so no sort is needed, which took 10 of 15 ms per row of 49,152 tokens
            every = torch.arange(logits.shape[-1], device=logits.device)
            return None, (logits / self.temperature_divisor).double() + gumbel(key, pos, every)
        ids, scores = self.warp(logits)  # [N, C], -inf = dropped
        if self.xtc_probability:
            coin = uniform(key, pos, torch.tensor([COIN], device=pos.device)).squeeze(-1)
            scores = truncation.drop_top(scores, self.xtc_threshold, coin <= self.xtc_probability)
        return ids, scores + gumbel(key, pos, ids)

    def warp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates [N, C] by falling probability, and their log-probabilities, -inf where dropped.

        The softmax of the result is the distribution that this sampler samples from, where XTC does not act.
        """
        logits = logits / self.temperature_divisor
        if self.top_n_sigma:
            logits = truncation.drop_below_sigma(logits, self.top_n_sigma)
        k = min(self.top_k or logits.shape[-1], logits.shape[-1])
        scores, ids = torch.topk(logits, k, dim=-1)  # sorted, ties in torch's fixed order
        scores = torch.log_softmax(scores.double(), dim=-1)
        for drop, share, off in (
            (truncation.drop_tail, self.top_p, 1),
            (truncation.drop_unlikely, self.min_p, 0),
            (truncation.drop_atypical, self.typical_p, 1),
        ):
            if share != off:
                scores = torch.log_softmax(drop(scores, share), dim=-1)
        if self.bregman_lambda:
            scores = truncation.keep_sparse(scores, self.bregman_lambda, self.bregman_alpha)
        return ids, scores
