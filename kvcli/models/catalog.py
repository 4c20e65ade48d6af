"""The one list of real models in several sizes: what to type, where each comes from, its licence, and what it takes.

Designs that the tests build. What a model needs is reckoned from its sizes alone: this is asked before torch is
imported. `kvcli fit` plans no more, and at most a fifth less (tests/fit/test_catalog.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcli.models.pip_packages import GEMMA, GEMMA_TERMS, SMOLLM2, PackagedFile
from kvcli.models.shape import Shape
from kvcli.models.sizes import sizes_of

TOKENS = 8192  # of a text, which what is named has room for
PROGRAM = 640 << 20  # bytes of the program and its libraries
PASSES = 0.6  # bytes that a pass computes with, for each byte of keys and values: both grow with heads and tokens
PACKED = {"none": 2.0, "int8": 1.0, "int4": 0.6}  # bytes of a weight of a linear layer, with its scales
TOGETHER = 9  # bytes of each number of one projection of a layer's experts, at most
PENALTY = {"repetition_penalty": 1.1}  # SmolLM2-135M: by its card it goes round in loops over documents
SHARES = (1 / 4, 1 / 2, 1)  # of the memory: quick, comfortable, the most


@dataclass(frozen=True, slots=True)
class Terms:
    """What has to be accepted before a model is fetched."""

    title: str
    address: str
    text: PackagedFile


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model of the list."""

    name: str  # to type
    id: str  # of the hub
    parameters: int
    about: str
    shape: Shape
    licence: str = "Apache-2.0"
    package: PackagedFile | None = None  # a GGUF file, which comes instead of what the hub has
    terms: Terms | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)  # that its card recommends, if its files state none

    @property
    def download(self) -> int:
        """Bytes to fetch."""
        return self.package.download if self.package else self.weights()

    def weights(self, quant: str = "none") -> int:
        """Bytes in memory, 16-bit numbers where nothing packs them or has packed them."""
        linear = self.shape.linear
        each = self.package.each if self.package and quant == "none" else PACKED[quant]
        return int(2 * (self.parameters - linear) + each * linear)

    def needs(self, quant: str = "none", tokens: int = TOKENS) -> int:
        """Bytes of a run over so many tokens, and of loading: a layer's experts are put together, then packed, and what
        else is packed is once all is there."""
        weights, shape = self.weights(quant), self.shape
        of_layer = shape.hidden * shape.inner * shape.experts
        others = shape.linear - 3 * shape.layers * of_layer if quant != "none" and shape.experts else 0
        loading = PROGRAM + weights + TOGETHER * of_layer + int((2 - PACKED[quant]) * others)
        return max(needs(weights, shape, tokens), loading)

    def room(self, usable: int, quant: str = "none") -> int:
        """Tokens that fit into so many bytes, at most its window."""
        each = needs(0, self.shape, 1) - PROGRAM
        return max(0, min(self.shape.limit, (usable - PROGRAM - self.weights(quant)) // each))


def needs(weights: int, shape: Shape, tokens: int = TOKENS) -> int:
    """Bytes of a run of a model whose weights take so many, over so many tokens."""
    return PROGRAM + weights + int((1 + PASSES) * 2 * shape.kv_per_token * min(tokens, shape.limit))


def _known(
    name: str, id: str, parameters: int, about: str, *sizes: int, tied: bool = True, experts: tuple[int, int] = (0, 0),
    window: tuple[int, int] = (0, 1), **more: Any,
) -> CatalogModel:  # fmt: skip
    """`window`: tokens that most layers see, and how many layers go to one that sees all."""
    layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit = sizes
    windows = tuple(None if (i + 1) % window[1] == 0 else window[0] for i in range(layers))
    shape = Shape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit, windows, tied, *experts)
    return CatalogModel(name, id, parameters, about, shape, **more)


_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
_GEMMA = Terms("the Gemma Terms of Use, with the uses that they prohibit", "ai.google.dev/gemma/terms", GEMMA_TERMS)

CATALOG = (  # layers, hidden, heads, KV heads, numbers of a head, inner, vocabulary, limit
    _known("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, "to try things out, English",
           30, 576, 9, 3, 64, 1536, 49152, 8192, package=SMOLLM2, sampling=PENALTY),
    _known("gemma-3-270m", "google/gemma-3-270m", 268_098_176, "goes on with a text, follows no instructions",
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
           "the largest; a token takes 3B of it", 48, 2048, 32, 4, 128, 768, 151936, 262144,
           tied=False, experts=(128, 8)),
)  # fmt: skip
BY_NAME = {known.name: known for known in CATALOG}
# what cards recommend for all models of a family, or for those of it with such a vocabulary
_OF_FAMILY: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("gemma3_text", 0): {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ("llama", 128256): {"temperature": 0.6, "top_p": 0.9},  # Llama 3
    ("qwen2", 0): {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    ("qwen3", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("qwen3_moe", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("smollm3", 0): {"temperature": 0.6, "top_p": 0.95},
}


def recommended(config: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """The sampling for a model whose files state none: of the model of the list with its sizes, else of its family."""
    sizes, family = sizes_of(config, name), str(config.get("model_type"))
    keys = ("layers", "hidden", "heads", "inner", "vocab")
    alike = [k.sampling for k in CATALOG if k.sampling and all(getattr(k.shape, key) == sizes[key] for key in keys)]
    return next(iter(alike), _OF_FAMILY.get((family, sizes["vocab"]), _OF_FAMILY.get((family, 0), {})))


def choices(usable: int, quants: Sequence[str] = ("none", "int8")) -> list[tuple[CatalogModel, str]]:
    """For a quick answer, in comfort, and the largest that `usable` bytes hold; packed weights where more then fits.

    What has terms to accept is not among them.
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
