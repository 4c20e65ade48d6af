"""Scores of tokens: log-probabilities of the model, before any sampling setting, penalty or constraint.

A score depends on its row of logits alone, to the last bit: the log of the sum of exponentials is added in a fixed
order, and tokens with equal logits are ordered by id. So a token has the same score alone, among other sequences, and
as an accepted draft token.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # rows that are scored together: one takes about 24 bytes per token of the vocabulary


def score_tokens(logits: Tensor, ids: Tensor, top: int) -> Tensor:
    """Return the scores of tokens `ids` [n], one behind each row of logits [n, V] -> [n, 1 + 2 top] float64: the
    token's log-probability, the `top` most likely ids (V at most), and their log-probabilities."""
    blocks = zip(torch.split(logits, BLOCK), torch.split(ids, BLOCK), strict=True)
    return torch.cat([_block(of, drawn, min(top, logits.shape[-1])) for of, drawn in blocks])


def _block(logits: Tensor, ids: Tensor, top: int) -> Tensor:
    wide = logits.double()
    found = ids.unsqueeze(-1)
    if top:
        found = torch.cat([found, _likeliest(logits, top)], dim=-1)
    logp = wide.gather(-1, found) - _log_sum_exp(wide)
    return torch.cat([logp[:, :1], found[:, 1:].double(), logp[:, 1:]], dim=-1)


def _likeliest(logits: Tensor, top: int) -> Tensor:
    """Return the ids of the largest logits. `topk` orders equal numbers as it likes, so the keys contain the ids."""
    bits = (logits.float() + 0.0).view(torch.int32).long()  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    vocab = logits.shape[-1]
    keys = ordered * vocab + torch.arange(vocab - 1, -1, -1, device=logits.device)
    best = torch.topk(keys, top, dim=-1).values
    return vocab - 1 - best.remainder(vocab)


def _log_sum_exp(wide: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) [n, 1]. `sum` adds in another order for another number of rows; halves never do."""
    best = wide.amax(-1, keepdim=True)
    rest = (wide - best).exp()
    while (n := rest.shape[-1]) > 1:
        half = n // 2
        added = rest[:, :half] + rest[:, half : 2 * half]
        rest = torch.cat([added, rest[:, 2 * half :]], dim=-1) if n % 2 else added
    return best + rest.log()
