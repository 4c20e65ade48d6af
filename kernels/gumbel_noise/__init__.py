"""Gumbel noise as a pure function of (seed, position, token), so that no drafter changes the sampled text.

argmax(logp + gumbel) samples from softmax(logp) (the Gumbel-max trick). The noise of a token at a position does not
depend on the computation before it. One seed therefore gives one text with any drafter, any batch of rows and any order
of evaluation (coupled noise: arXiv 2408.07978).
"""

from __future__ import annotations

from kvcli.kernels.gumbel_noise.reference import gumbel, uniform

__all__ = ["gumbel", "uniform"]
