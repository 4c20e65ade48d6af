"""Phi-decoding: sample several next steps, look ahead behind each, and take one by the foresight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp
from statistics import fmean, pstdev
from typing import Annotated, ClassVar

from kvcli.engine.forward_request import Passes
from kvcli.kernels.gumbel_noise.host import uniform_host
from kvcli.methods.decode.fork_writer import Decoding
from kvcli.methods.decode.forks import Fork, Forks
from kvcli.settings.schema import Range

ALIKE = 0.5  # shared share of the different tokens of two foresights from which on they are in one cluster
CHOICE = -2  # token whose noise draws the step; no token of a model has this id


@dataclass(frozen=True)
class PhiDecoding(Decoding):
    """Phi-decoding (2025, arXiv 2503.13288): takes the step whose foresight is likeliest.

    Four forks take 2.04 times the seconds of greedy decoding (measurements/lab-log.md).

    Of the paper it lacks several beams and the early end of looking ahead. It compares foresights by their tokens.
    """

    step: Annotated[int, Range(1, 256)] = 24  # most tokens of a step, which ends with a line before that
    ahead: Annotated[int, Range(1, 256)] = 16  # tokens of a foresight
    tau: Annotated[float, Range(above=0, most=10)] = 0.6  # temperature at which foresights are weighed

    notice: ClassVar[str] = ""

    def write(self, forks: Forks) -> Passes[Fork]:
        """Write one step: those of `forks` seeds, without those whose likelihood is below mean - deviation, each with a
        foresight. Its weight sums the softmax of foresight log-probability and that of its cluster's share."""
        tried = [Fork(seed=i) for i in range(self.forks)]
        lines = forks.session.lm.tokens_with(("\n",))
        yield from forks.run(
            tried,
            lambda one: self.sampled(forks, one),
            lambda one: forks.is_over(one) or len(one.ids) >= self.step or (bool(one.ids) and one.ids[-1] in lines),
        )
        sure = [one.logp / len(one.ids) for one in tried]
        least = fmean(sure) - pstdev(sure) - 1e-12
        steps = [one for one, its in zip(tried, sure, strict=True) if its >= least]
        seen = [replace(one, ids=[*one.ids], logp=0.0) for one in steps]
        ends = {one.seed: len(one.ids) for one in steps}
        yield from forks.run(
            seen,
            lambda one: self.sampled(forks, one),
            lambda one: forks.is_over(one) or len(one.ids) >= ends[one.seed] + self.ahead,
        )
        later = [one.ids[ends[one.seed] :] for one in seen]
        weights = self.weights([one.logp / max(1, len(ids)) for one, ids in zip(seen, later, strict=True)], later)
        noise = uniform_host(forks.session.sampler.seed, len(forks.session.ids), CHOICE) * sum(weights)
        return next((one for one, upto in zip(steps, accumulate(weights), strict=True) if noise < upto), steps[-1])

    def weights(self, foresight: list[float], later: list[list[int]]) -> list[float]:
        """Return the weight of each step, from mean log-probability and tokens of its foresight."""
        share = [fmean(alike(one, other) for other in later) for one in later]
        sides = ([exp((x - max(of)) / self.tau) for x in of] for of in (foresight, share))
        total = [sum(pair) for pair in zip(*([x / sum(of) for x in of] for of in sides), strict=True)]
        return [exp(x / self.tau) for x in total]

    def sampled(self, forks: Forks, fork: Fork) -> int:
        """Sample the next token of a fork, and add its log-probability."""
        token = forks.sample(fork)
        fork.logp += forks.logp(fork, token)
        return token


def alike(one: list[int], other: list[int]) -> bool:
    """True if two foresights share enough tokens."""
    both = {*one} | {*other}
    return not both or len({*one} & {*other}) >= ALIKE * len(both)
