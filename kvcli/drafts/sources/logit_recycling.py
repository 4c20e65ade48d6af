"""Recycled logits: draft tokens from the top logits of earlier rows, which were computed anyway.

Token Recycling (Luo et al., arXiv 2408.08696) keeps the top successors of every token, newest first. STAND (Song et
al., arXiv 2506.04708) keeps probabilities by n-gram and draws its draft tokens with Gumbel noise. One class implements
both. Draft tokens for sampled text are ranked with the same noise that the sampler will add at that position (coupled
sampling, Daliri et al., arXiv 2408.07978), so the draft is the token likely to be drawn, and not just the likeliest.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log
from typing import TYPE_CHECKING, Any

from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate, RatedSource
from kvcli.kernels.gumbel_noise.host import COIN, gumbel_host, uniform_host

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvcli.engine.sequence.sampler import Sampler

TOP, WIDE = 8, 32  # successors kept per key, and successors over which probabilities are normalized
PART = 64  # rows of the table into which a vocabulary is reshaped
KEYS = 1 << 14  # maximum; the oldest keys are evicted first
KEY_BYTES = 830  # bytes of a key and its successors as Python objects; measured with tracemalloc
LENGTHS = {"token-recycling": (1, 1), "stand": (2, 4)}  # shortest and longest keys
_MEAN = 8  # updates after which a mean moves as if it had this many
# Rows: lead of the draft token over the next one (a first choice) or distance from the best (a later one), in nats.
GAPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NAMES = ("<0.25", "<0.5", "<1", "<2", "<4", "<8", "8+")
# Columns: the first choice, the second, later ones. A larger lead makes a first choice better, a larger distance a
# later choice worse.
START = (
    (0.35, 0.25, 0.15),
    (0.4, 0.25, 0.15),
    (0.5, 0.2, 0.1),
    (0.6, 0.15, 0.05),
    (0.75, 0.05, 0.02),
    (0.9, 0.01, 0.01),
    (0.95, 0.01, 0.01),
)


class Entry:
    """Successors of a key, in order of falling log-probability. Lists, because numpy is slow on eight numbers."""

    __slots__ = ("ids", "logp", "told")

    def __init__(self, ids: list[int], logp: list[float]) -> None:
        self.ids, self.logp, self.told = ids, logp, 1

    def blend(self, ids: list[int], logp: list[float]) -> None:
        """Update the running mean of the probabilities, over the tokens of either list."""
        self.told = min(self.told + 1, _MEAN)
        weight = 1 / self.told
        mean = {token: (1 - weight) * exp(lp) for token, lp in zip(self.ids, self.logp, strict=True)}
        for token, lp in zip(ids, logp, strict=True):
            mean[token] = mean.get(token, 0.0) + weight * exp(lp)
        best = sorted(mean.items(), key=lambda item: -item[1])[:TOP]
        self.ids = [token for token, _ in best]
        self.logp = [log(p + 1e-12) for _, p in best]


class RecycledLogits(RatedSource):
    """Recycled logits by the last `shortest` to `longest` tokens, with the acceptance rates of their draft tokens."""

    def __init__(self, name: str, shortest: int, longest: int) -> None:
        self.name, self.shortest, self.longest = name, shortest, longest
        self.sampler: Sampler | None = None  # sampler of the answer; None = greedy decoding
        self.rests = False  # is this source switched off for now?
        self._entries: dict[tuple[int, ...], Entry] = {}
        self._tail: list[int] = []  # the last `longest` tokens of the sequence
        self._at = 0  # position of the last of those tokens
        self._odds = AcceptanceRates(START, NAMES)

    def start(self, ids: Sequence[int]) -> None:
        """Start a sequence. Entries of earlier sequences are kept, because they are predictions of the same model."""
        self._tail, self._at = list(ids[-self.longest :]), len(ids) - 1

    def extend(self, ids: Sequence[int]) -> None:
        self._tail, self._at = [*self._tail, *ids][-self.longest :], self._at + len(ids)

    def root(self, depth: int) -> Any:
        """Return the state: the last tokens, drafted ones included."""
        return self.behind((), depth)

    def behind(self, path: Sequence[int], depth: int) -> Any:
        """Return the state of a sequence extended by `path`."""
        return None if self.rests else (*self._tail, *path)[-self.longest :]

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        entry = next(
            (e for n in range(len(state), self.shortest - 1, -1) if (e := self._entries.get(state[-n:]))), None
        )
        if entry is None:
            return ()
        ids, scores = rank_with_noise(entry.ids, entry.logp, self._at + depth, self.sampler)
        found = []
        for rank, token in enumerate(ids[:branches]):
            row, column = cell(scores, rank)
            chance = self._odds.chance(row, column)
            found.append(DraftCandidate(token, chance, (*state, token)[-self.longest :], (row, column)))
        return found

    def add(self, before: Sequence[int], ids: list[int], logp: list[float]) -> None:
        """Record the tokens with the highest log-probabilities after a sequence that ends with `before`, in order."""
        for n in range(self.shortest, min(self.longest, len(before)) + 1):
            key = tuple(before[-n:])
            entry = self._entries.pop(key, None)
            if entry is None or n == 1:  # the newest successors of a single token predict better than their mean
                entry = Entry(ids, logp)
            else:
                entry.blend(ids, logp)
            self._entries[key] = entry
        while len(self._entries) > KEYS:
            del self._entries[next(iter(self._entries))]


def learners(names: Sequence[str]) -> list[RecycledLogits]:
    """Return an empty instance per name, without duplicates."""
    return [RecycledLogits(name, *LENGTHS[name]) for name in dict.fromkeys(names)]


def learned_bytes(names: Sequence[str], n: int) -> int:
    """Return the maximum bytes that these sources hold for n tokens."""
    keys = [longest - shortest + 1 for shortest, longest in (LENGTHS[name] for name in set(names))]
    return sum(KEY_BYTES * min(KEYS, each * n) for each in keys)


def cell(scores: Sequence[float], rank: int) -> tuple[int, int]:
    """Return the cell of a choice's acceptance rate, by the scores of all choices, falling."""
    other = scores[rank] if rank else scores[1] if len(scores) > 1 else -inf
    return bisect(GAPS, scores[0] - other), min(rank, 2)


def rank_with_noise(ids: list[int], logp: list[float], at: int, s: Sampler | None) -> tuple[list[int], list[float]]:
    """Return the tokens in the order in which the sampler would prefer them after position `at`, and their scores.

    The tokens are the likeliest few, so typical-p and top-n-sigma, which depend on all others, are left out.
    """
    if s is None or s.temperature == 0:
        return ids, logp
    most = s.top_k or len(ids)
    ids, scores = ids[:most], [lp / s.temperature for lp in logp[:most]]
    if s.top_p < 1:
        mass = [exp(score - scores[0]) for score in scores]
        ahead = list(accumulate(mass, initial=0.0))
        scores = [score for score, before in zip(scores, ahead, strict=False) if before < s.top_p * ahead[-1]]
    if s.min_p > 0:
        scores = [score for score in scores if score >= scores[0] + log(s.min_p)]
    if s.xtc_probability and uniform_host(s.seed, at, COIN) <= s.xtc_probability:
        mass = [exp(score - scores[0]) for score in scores]
        n_top = sum(of >= s.xtc_threshold * sum(mass) for of in mass)
        ids, scores = ids[max(0, n_top - 1) :], scores[max(0, n_top - 1) :]
    noise = gumbel_host(s.seed, at, ids[: len(scores)])
    ranked = sorted(((score + g, token) for score, g, token in zip(scores, noise, ids, strict=False)), reverse=True)
    return [token for _, token in ranked], [score for score, _ in ranked]


def top(logits: Tensor) -> Tensor:
    """logits [n, V] -> the WIDE likeliest tokens of each row in order, as float64, followed by their logits."""
    import torch  # late: reading a profile must not import it

    vocab = logits.shape[-1]
    if vocab % PART or vocab < PART * WIDE:
        best = logits.topk(min(WIDE, vocab))
        return torch.cat((best.indices.double(), best.values), 1)
    if logits.is_cpu:
        return torch.stack([torch.from_numpy(_top(row)) for row in logits.float().numpy()])
    # the WIDE likeliest tokens are in the WIDE columns of a table whose maxima are largest
    table = logits.reshape(len(logits), PART, -1)  # [n, PART, V / PART]
    which = table.amax(1).topk(WIDE).indices  # [n, WIDE]
    best = table.gather(2, which.unsqueeze(1).expand(-1, PART, -1)).flatten(1).topk(WIDE)
    ids = best.indices // WIDE * table.shape[2] + which.gather(1, best.indices % WIDE)
    return torch.cat((ids.double(), best.values), 1)


def _top(row: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return `top` of one row on the host, where tensor calls would take longer than the work."""
    import numpy as np

    # no value below the WIDE-th largest column maximum can be among the WIDE largest of all
    least = np.partition(row.reshape(PART, -1).max(0), -WIDE)[-WIDE]
    ids = np.flatnonzero(~(row < least))  # NaN counts as the largest
    best = ids[np.argsort(-row[ids], kind="stable")[:WIDE]]
    return np.concatenate((best, row[best]), dtype=np.float64)


def likeliest(hook_output: Sequence[float]) -> tuple[list[int], list[float]]:
    """A row of `top` -> its TOP likeliest tokens and their log-probabilities among the WIDE likeliest.

    A sum over the whole vocabulary would take longer than the rest. It runs on the host, where 32 numbers take a tenth
    of a tensor's time.
    """
    wide = len(hook_output) // 2
    scores = hook_output[wide:]
    whole = scores[0] + log(sum([exp(score - scores[0]) for score in scores]))
    return [int(i) for i in hook_output[:wide][:TOP]], [score - whole for score in scores[:TOP]]
