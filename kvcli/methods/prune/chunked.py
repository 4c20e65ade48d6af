"""Chunk-wise token pruning: each chunk is scored by its own last tokens, so prefill can start before the question.

Group-wise prefill with pruning (QuickVideo, arXiv 2505.16175), with LazyLLM's schedule inside a chunk. Peak memory is
that of one chunk and of the kept KV. Tokens that only the question needs may be pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvcli.methods.prune.lazy import LazyLLM
from kvcli.settings.schema import Range


@dataclass(frozen=True)
class Chunked(LazyLLM):
    """Chunk-wise LazyLLM (after QuickVideo, 2025, arXiv 2505.16175): prunes each chunk by attention from its end.

    Prefill of the demo model is 1.29 times as fast, and lookups lose 0 points of accuracy (measurements/lab-log.md).
    """

    min_prompt: Annotated[int, Range(1)] = 256  # chunks with fewer tokens are not pruned

    def group_size(self, n: int, chunk: int) -> int:
        """Return the tokens of one chunk."""
        return min(n, chunk)
