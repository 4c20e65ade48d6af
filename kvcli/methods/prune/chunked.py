"""A prompt pruned chunk by chunk as it comes in, each judged by its own end: nobody has to wait for the question.

Group-wise reading that prunes as it goes (QuickVideo, arXiv 2505.16175), with LazyLLM's schedule inside a chunk. Peak
memory is that of a chunk and of what is kept; what only the question asks for may stay behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvcli.methods.prune.lazy import LazyLLM
from kvcli.settings.schema import Range


@dataclass(frozen=True)
class Chunked(LazyLLM):
    """Leave tokens of each chunk behind, by what its own end looks at (after QuickVideo, arXiv 2505.16175)."""

    min_prompt: Annotated[int, Range(1)] = 256  # tokens of a chunk below which all go on

    def group_size(self, n: int, chunk: int) -> int:
        """A chunk."""
        return min(n, chunk)
