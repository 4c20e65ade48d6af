"""Sampler: turns logits into tokens, with noise keyed by (seed, position), so that one seed gives one text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import argmax
from kvcli.kernels.gumbel_noise import gumbel
from kvcli.kernels.gumbel_noise.reference import signed

STUCK = -2  # returned where a constraint allows no token
COLDEST = 1e-30  # lowest divisor of logits: smaller ones overflow, and the most likely token wins long before


@dataclass(frozen=True)
class Sampler:
    """Settings that decide how the next token is sampled: repetition penalty, temperature, top-k, top-p and min-p in
    this order, then coupled noise.

    The order is transformers'. Temperature 0 is greedy and uses only the penalty.
    """

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # keep the k most likely tokens; 0 = all
    top_p: float = 1.0  # keep the smallest set with this total probability
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    repetition_penalty: float = 1.0  # > 1 makes tokens already in the text less likely (CTRL, arXiv 1909.05858)
    seed: int = 0

    @property
    def needs_text(self) -> bool:
        """True if a token's probability depends on earlier tokens, so that each row is sampled with its path."""
        return self.repetition_penalty != 1.0

    @property
    def temperature_divisor(self) -> float:
        """The divisor of the logits."""
        return max(self.temperature, COLDEST)

    def __call__(self, logits: Tensor, pos: Tensor, seen: Tensor | None = None) -> Tensor:
        """Sample the token after each row: logits [N, V] of rows at positions pos [N], seen [V] or [N, V] bool -> ids
        [N].

        The id is -1 if the logits are NaN or infinite, so that a GPU reports errors with its result and the host waits
        once.
        """
        if not logits.is_cpu:
            return self.on_device(logits, pos, seen)
        ids, scores = self.scores(logits, pos, seen)
        # numpy: torch takes 30 times as long to find the largest of 150,000, and needs five calls around it
        on_host = scores.numpy()
        at = np.arange(len(on_host)), on_host.argmax(-1)  # NaN counts as the largest
        drawn = at[1] if ids is None else ids.numpy()[at]
        drawn[~np.isfinite(on_host[at])] = -1
        return torch.from_numpy(drawn)

    def on_device(self, logits: Tensor, pos: Tensor, seen: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """Sample as above without a host synchronization. `seed` []: replaces the sampler's seed."""
        if (at_once := self.fused(logits, pos, seen, seed)) is not None:
            return at_once
        ids, scores = self.scores(logits, pos, seen, seed)
        best = scores.argmax(-1, keepdim=True)
        found = best if ids is None else ids.gather(-1, best)
        top = scores.gather(-1, best)
        return found.masked_fill(top - top != 0, -1).squeeze(-1)  # like `isfinite`, which launches six operations

    def fused(
        self, logits: Tensor, pos: Tensor, seen: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor | None:
        """Sample ids [N] with one kernel. None if it does not support these logits, or if candidates must be sorted.

        `seed` []: on the device; replaces the sampler's seed.
        """
        if (self.temperature and not self.keeps_all) or argmax.why_not(logits):
            return None
        logits = self._punished(logits, seen)
        if self.temperature == 0:
            return argmax.argmax(logits)
        n, device = len(logits), logits.device
        seeds = torch.full((n,), signed(self.seed), device=device) if seed is None else seed.repeat(n)
        heat = torch.full((n,), self.temperature_divisor, dtype=torch.float32, device=device)
        return argmax.argmax(logits, argmax.Noise(seeds, pos, heat))

    @property
    def keeps_all(self) -> bool:
        """True if every token may be sampled."""
        return not self.top_k and self.top_p == 1 and not self.min_p

    def _punished(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Return logits with the repetition penalty, in float32; unchanged if no penalty applies."""
        if not self.needs_text or seen is None:
            return logits
        wide = logits.float() if logits.dtype != torch.float64 else logits
        punished = torch.where(wide > 0, wide / self.repetition_penalty, wide * self.repetition_penalty)
        return torch.where(seen, punished, wide)

    def scores(
        self, logits: Tensor, pos: Tensor, seen: Tensor | None = None, seed: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Return candidates [N, C] (None = the whole vocabulary) and their scores; the highest score is sampled."""
        key = self.seed if seed is None else seed
        logits = self._punished(logits.float() if logits.dtype != torch.float64 else logits, seen)
        if self.temperature == 0:
            return None, logits
        if self.keeps_all:
            # no token is dropped, so no sort is needed, which took 10 of 15 ms per row of 49,152 tokens
            every = torch.arange(logits.shape[-1], device=logits.device)
            return None, (logits / self.temperature_divisor).double() + gumbel(key, pos, every)
        ids, scores = self.warp(logits)  # [N, C], -inf = dropped
        return ids, scores + gumbel(key, pos, ids)

    def warp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return candidates [N, C] by falling probability, and their log-probabilities, -inf where dropped.

        The softmax of the result is the distribution that this sampler samples from.
        """
        k = min(self.top_k or logits.shape[-1], logits.shape[-1])
        scores, ids = torch.topk(logits / self.temperature_divisor, k, dim=-1)  # sorted, ties in torch's fixed order
        scores = torch.log_softmax(scores.double(), dim=-1)
        if self.top_p < 1.0:
            probability = scores.exp()
            before = probability.cumsum(-1) - probability  # probability of the candidates before each
            scores = scores.masked_fill(before >= self.top_p, -torch.inf)
        if self.min_p > 0.0:
            scores = scores.masked_fill(scores < scores[..., :1] + torch.tensor(self.min_p).log(), -torch.inf)
        return ids, torch.log_softmax(scores, dim=-1)
