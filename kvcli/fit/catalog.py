"""Real models in several sizes to name to somebody who has named none, with licences and the memory that each takes.

Designs that the tests build, weights that nobody has to ask for. What a model needs is reckoned from its sizes alone:
this is asked before torch is imported. `kvcli fit` plans no more, and at most a fifth less (tests/fit/test_catalog.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.fit.shape import Shape

TOKENS = 8192  # of a text, which what is named has room for
PROGRAM = 640 << 20  # bytes of the program and its libraries
PASSES = 0.6  # bytes that a pass computes with, for each byte of keys and values: both grow with heads and tokens
PACKED = {"none": 2.0, "int8": 1.0, "int4": 0.6}  # bytes of a weight of a linear layer, with its scales
SHARES = (1 / 4, 1 / 2, 1)  # of the memory: quick, comfortable, the most


@dataclass(frozen=True, slots=True)
class Known:
    """A model of the hub."""

    id: str
    parameters: int
    licence: str
    shape: Shape

    def weights(self, quant: str = "none") -> int:
        """Bytes in memory, 16-bit numbers where nothing packs them."""
        linear = self.shape.linear
        return int(2 * (self.parameters - linear) + PACKED[quant] * linear)

    def needs(self, quant: str = "none", tokens: int = TOKENS) -> int:
        """Bytes of a run over so many tokens."""
        return needs(self.weights(quant), self.shape, tokens)


def needs(weights: int, shape: Shape, tokens: int = TOKENS) -> int:
    """Bytes of a run of a model whose weights take so many, over so many tokens."""
    return PROGRAM + weights + int((1 + PASSES) * 2 * shape.kv_per_token * min(tokens, shape.limit))


def _known(id: str, parameters: int, *sizes: int, licence: str = "Apache-2.0", tied: bool = True) -> Known:
    layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit = sizes
    shape = Shape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit, (None,) * layers, tied)
    return Known(id, parameters, licence, shape)


CATALOG = (  # layers, hidden, heads, KV heads, numbers of a head, inner, vocabulary, limit
    _known("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 30, 576, 9, 3, 64, 1536, 49152, 8192),
    _known("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 32, 960, 15, 5, 64, 2560, 49152, 8192),
    _known("Qwen/Qwen3-0.6B", 596_049_920, 28, 1024, 16, 8, 128, 3072, 151936, 40960),
    _known("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, 24, 2048, 32, 32, 64, 8192, 49152, 8192),
    _known("Qwen/Qwen3-1.7B", 1_720_574_976, 28, 2048, 16, 8, 128, 6144, 151936, 40960),
    _known("ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, 40, 2048, 32, 8, 64, 8192, 49159, 131072),
    _known("HuggingFaceTB/SmolLM3-3B", 3_075_098_624, 36, 2048, 16, 4, 128, 11008, 128256, 65536),
    _known("microsoft/Phi-4-mini-instruct", 3_836_021_760, 32, 3072, 24, 8, 128, 8192, 200064, 131072, licence="MIT"),
    _known("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, 36, 2560, 32, 8, 128, 9728, 151936, 262144),
    _known("ibm-granite/granite-3.3-8b-instruct", 8_170_864_640, 40, 4096, 32, 8, 128, 12800, 49159, 131072),
    _known("Qwen/Qwen3-8B", 8_190_735_360, 36, 4096, 32, 8, 128, 12288, 151936, 40960, tied=False),
)  # fmt: skip


def choices(usable: int, quants: Sequence[str] = ("none", "int8")) -> list[tuple[Known, str]]:
    """For a quick answer, in comfort, and the largest that `usable` bytes hold; packed weights where more then fits."""
    found: dict[str, tuple[Known, str]] = {}
    for share in SHARES:
        packings = quants if share == 1 else quants[:1]
        fitting = [(known, quant) for known in CATALOG for quant in packings if known.needs(quant) <= share * usable]
        if fitting:
            known, quant = max(fitting, key=lambda one: (one[0].parameters, one[1] == "none"))
            found.setdefault(known.id, (known, quant))
    return list(found.values())
