"""Catalog of real models: the name to type, source, licence and memory need of each.

The architectures are those that the tests build. The memory need is computed from the sizes alone, because it is asked
for before torch is imported. `kvcli fit` plans no more, and at most a fifth less (tests/fit/test_catalog.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcli.models.pip_packages import GEMMA, GEMMA_TERMS, SMOLLM2, PackagedFile
from kvcli.models.shape import Shape
from kvcli.models.sizes import sizes_of

TOKENS = 8192  # tokens of context for which a suggested model must have memory
PROGRAM = 640 << 20  # bytes of the Python process and its libraries
PASSES = 0.6  # bytes of activations of a forward pass per byte of KV: both grow with heads and tokens
PACKED = {"none": 2.0, "int8": 1.0, "int4": 0.6}  # bytes per weight of a linear layer, scales included
TOGETHER = 9  # bytes per weight of one projection of a layer's experts while they are stacked, at most
PENALTY = {"repetition_penalty": 1.1}  # SmolLM2-135M: its model card reports repetition loops over documents
SHARES = (1 / 4, 1 / 2, 1)  # shares of the memory: fast, medium and largest model


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a user has to accept before a model is downloaded."""

    title: str
    address: str
    text: PackagedFile


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model of the catalog."""

    name: str  # the name to type
    id: str  # hub id
    parameters: int
    about: str
    shape: Shape
    licence: str = "Apache-2.0"
    package: PackagedFile | None = None  # a GGUF file, downloaded instead of the files on the hub
    terms: Terms | None = None
    # sampling settings of its model card, where its files state none
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def download(self) -> int:
        """Bytes to download."""
        return self.package.download if self.package else self.weights()

    def weights(self, quant: str = "none") -> int:
        """Bytes in memory. Weights that are not quantized count 16 bits each."""
        linear = self.shape.linear
        each = self.package.each if self.package and quant == "none" else PACKED[quant]
        return int(2 * (self.parameters - linear) + each * linear)

    def needs(self, quant: str = "none", tokens: int = TOKENS) -> int:
        """Bytes of a run over `tokens` tokens, loading included. While loading, a layer's experts are stacked before
        they are quantized, and the other linear layers are quantized after all weights are read."""
        weights, shape = self.weights(quant), self.shape
        of_layer = shape.hidden * shape.inner * shape.experts
        others = shape.linear - 3 * shape.layers * of_layer if quant != "none" and shape.experts else 0
        loading = PROGRAM + weights + TOGETHER * of_layer + int((2 - PACKED[quant]) * others)
        return max(needs(weights, shape, tokens), loading)

    def room(self, usable: int, quant: str = "none") -> int:
        """Tokens that fit into `usable` bytes, at most the context window."""
        each = needs(0, self.shape, 1) - PROGRAM
        return max(0, min(self.shape.limit, (usable - PROGRAM - self.weights(quant)) // each))


def needs(weights: int, shape: Shape, tokens: int = TOKENS) -> int:
    """Bytes of a run over `tokens` tokens of a model whose weights take `weights` bytes."""
    return PROGRAM + weights + int((1 + PASSES) * 2 * shape.kv_per_token * min(tokens, shape.limit))


def _known(
    name: str, id: str, parameters: int, about: str, *sizes: int, tied: bool = True, experts: tuple[int, int] = (0, 0),
    window: tuple[int, int] = (0, 1), **more: Any,
) -> CatalogModel:  # fmt: skip
    """Build a catalog entry. `window`: sliding window of most layers in tokens, and layers per full-attention layer."""
    layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit = sizes
    windows = tuple(None if (i + 1) % window[1] == 0 else window[0] for i in range(layers))
    shape = Shape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit, windows, tied, *experts)
    return CatalogModel(name, id, parameters, about, shape, **more)


_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
_GEMMA = Terms("the Gemma Terms of Use, with the uses that they prohibit", "ai.google.dev/gemma/terms", GEMMA_TERMS)

CATALOG = (  # columns: layers, hidden size, heads, KV heads, head size, inner size, vocabulary, context window
    _known("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, "to try things out, English",
           30, 576, 9, 3, 64, 1536, 49152, 8192, package=SMOLLM2, sampling=PENALTY),
    _known("gemma-3-270m", "google/gemma-3-270m", 268_098_176, "continues a text, follows no instructions",
           18, 640, 4, 1, 256, 2048, 262144, 32768, window=(512, 6), licence="Gemma", package=GEMMA, terms=_GEMMA),
    _known("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, "short answers, English",
           32, 960, 15, 5, 64, 2560, 49152, 8192, sampling=_SMOLLM2),
    _known("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, "short answers, many languages",
           28, 1024, 16, 8, 128, 3072, 151936, 40960),
    _known("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, "questions about a few pages, English",
           24, 2048, 32, 32, 64, 8192, 49152, 8192, sampling=_SMOLLM2),
    _known("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, "questions about a few pages, many languages",
           28, 2048, 16, 8, 128, 6144, 151936, 40960),
    _known("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, "long documents, for its size",
           40, 2048, 32, 8, 64, 8192, 49159, 131072),
    _known("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3_075_098_624, "summaries, six European languages",
           36, 2048, 16, 4, 128, 11008, 128256, 65536),
    _known("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3_836_021_760, "reasoning about long documents",
           32, 3072, 24, 8, 128, 8192, 200064, 131072, licence="MIT"),
    _known("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, "summaries of long documents, many languages",
           36, 2560, 32, 8, 128, 9728, 151936, 262144),
    _known("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", 8_170_864_640, "summaries of long documents",
           40, 4096, 32, 8, 128, 12800, 49159, 131072),
    _known("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, "careful answers, many languages",
           36, 4096, 32, 8, 128, 12288, 151936, 40960, tied=False),
    _known("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624,
           "the largest; 3B parameters per token", 48, 2048, 32, 4, 128, 768, 151936, 262144,
           tied=False, experts=(128, 8)),
)  # fmt: skip
BY_NAME = {known.name: known for known in CATALOG}
# sampling that model cards recommend for a family, or for models of a family with this vocabulary size
_OF_FAMILY: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("gemma3_text", 0): {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ("llama", 128256): {"temperature": 0.6, "top_p": 0.9},  # Llama 3
    ("qwen2", 0): {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    ("qwen3", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("qwen3_moe", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("smollm3", 0): {"temperature": 0.6, "top_p": 0.95},
}


def recommended(config: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """Return the sampling for a model whose files state none: of the catalog model of its sizes, else of its family."""
    sizes, family = sizes_of(config, name), str(config.get("model_type"))
    keys = ("layers", "hidden", "heads", "inner", "vocab")
    alike = [k.sampling for k in CATALOG if k.sampling and all(getattr(k.shape, key) == sizes[key] for key in keys)]
    return next(iter(alike), _OF_FAMILY.get((family, sizes["vocab"]), _OF_FAMILY.get((family, 0), {})))


def choices(usable: int, quants: Sequence[str] = ("none", "int8")) -> list[tuple[CatalogModel, str]]:
    """Suggest models for `usable` bytes: a fast, a medium and the largest one, quantized where a larger one then fits.

    Models with terms to accept are left out.
    """
    found: dict[str, tuple[CatalogModel, str]] = {}
    free = [known for known in CATALOG if not known.terms]
    for share in SHARES:
        packings = quants if share == 1 else quants[:1]
        fitting = [(known, quant) for known in free for quant in packings if known.needs(quant) <= share * usable]
        if fitting:
            known, quant = max(fitting, key=lambda one: (one[0].parameters, one[1] == "none"))
            found.setdefault(known.id, (known, quant))
    return list(found.values())
