"""Bytes of the weights: in their files, and in memory once loaded and quantized."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcli.kernels.linear import PANEL
from kvcli.kernels.linear_quantized import group_of, padded_outputs, why_not
from kvcli.models.checkpoint import CheckpointFormat, sizes_of
from kvcli.models.gguf import blocks

if TYPE_CHECKING:
    from kvcli.models.shape import LayerKVShape, Shape
    from kvcli.models.source import Source

BYTES = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "f16": 2,
    "f32": 4, "f64": 8,
}  # fmt: skip
_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDS = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_NOT_TEXT = re.compile(  # tensors that `models.family` does not load
    r"(^|\.)((vision|image|audio)_(tower|model|encoder)|visual|speech_encoder)\."
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_OUT_OF_EXPERT = re.compile(r"down_proj|output_linear|\.w2")
_EXPERT = re.compile(r"(^|\.)experts\.")
_ROUTER = re.compile(r"(gate|router)(\.\w+)?\.weight$")
_EXPANDS = ".kv_b_proj.weight"  # expands MLA latents: its parts are multiplied per head, in full precision
_ROUNDING = 8  # bytes per number of a matrix while it is quantized: its float32 copy and the rounded float32 copy
# bytes per weight: 4 bits, an 8-bit scale per 64 weights, a float32 per 256 scales
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]  # before quantization
    nbytes: int  # in the file
    packs: bool  # a linear layer of the decoder, which load.quant quantizes
    is_float: bool = True
    is_gguf: bool = False  # loaded from a dequantized copy, in the dtype of the run
    # by kind of device: bytes if it is kept quantized as in the file
    stays: Mapping[str, int] = field(default_factory=dict)
    layer: int | None = None  # number of its decoder layer
    embeds: bool = False  # an embedding: a pass reads only the rows of its tokens
    of_experts: bool = False  # of one expert or all experts of a layer: only int8 and int4 quantize these
    joins: str = ""  # module whose projections a GPU joins with this one

    @property
    def matrix(self) -> int:
        """Numbers that are quantized at a time: one expert's."""
        return math.prod(self.shape[-2:])

    @property
    def is_part(self) -> bool:
        """True if loading joins this tensor with others."""
        return self.of_experts and len(self.shape) == 2

    def loaded(self, number: int, keeps_on: str) -> CheckpointTensor:
        """Return the tensor as it is loaded; `keeps_on`: kind of device where tensors remain quantized, or ""."""
        count = math.prod(self.shape)
        if not self.is_gguf:
            return self
        if keeps_on in self.stays:
            return replace(self, nbytes=self.stays[keeps_on], is_float=False)
        return replace(self, nbytes=count * number)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all weights."""

    memory: int  # after loading
    files: int  # read, and mapped while loading
    loaded: int  # before quantization, if loading converts the weights: file and converted copy exist at once
    read: int  # read by a pass of one token: no embedding but that of a tied head, and a part of the experts
    active: float = 1.0  # share of the layers that a token reads; the rest are other experts
    packing: int = 0  # extra bytes while the largest tensor is quantized or joined
    embeddings: int = 0  # of `memory`; a tied head reads the same tensor
    layers: tuple[int, ...] = ()  # of `memory`, by layer; empty if tensor names give no layers
    experts: tuple[int, ...] = ()  # of `memory`, by layer: weights of experts
    largest: int = 0  # the largest linear layer in the dtype of the run, as prefill dequantizes it

    def beside(self, more: tuple[int, ...]) -> Weights:
        """Return the weights with extra bytes per layer, which a pass reads in place of other bytes."""
        layers = tuple(a + b for a, b in zip(self.layers, more, strict=True)) if self.layers else ()
        loaded = self.loaded and self.loaded + sum(more)
        return replace(self, memory=self.memory + sum(more), loaded=loaded, layers=layers)

    def with_adapters(self, nbytes: int, number: int) -> Weights:
        """Return the weights with LoRA adapters of so many bytes: read, and perhaps kept beside quantized weights."""
        merging = 3 * 4 * self.largest // number if nbytes else 0  # float32: the weight, its change, and the sum
        return replace(self, memory=self.memory + nbytes, packing=max(self.packing, merging))

    def split(self, on_card: int, is_tied: bool) -> tuple[int, int]:
        """Return the bytes on a GPU with the last layers and the head, and those on the CPU: embeddings, other layers.

        A head that is tied to the embeddings exists twice.
        """
        below = self.embeddings + sum(self.layers[: len(self.layers) - on_card])
        return self.memory - below + (self.embeddings if is_tied else 0), below


def of_files(source: Source) -> tuple[CheckpointTensor, ...]:
    """Return the text model's tensors by the file headers; none for pickles, which have no header."""
    is_tied = bool(source.text_config.get("tie_word_embeddings", source.config.get("tie_word_embeddings", False)))
    held, packing, sizes = [], CheckpointFormat.of(source.config), sizes_of(source.text_config, source.id)
    each = {name: t for file in source.files for name, t in file.tensors.items()} if source.is_gguf else {}
    stay = {kind: blocks.packed_sizes(each, kind) for kind in ("cpu", "cuda")}
    n_experts, hidden = sizes["experts"], sizes["hidden"]
    for file in source.files:
        for name, tensor in file.tensors.items():
            if _NOT_TEXT.search(name) or (is_tied and name.endswith("lm_head.weight")):
                continue
            inside, embeds = _IN_LAYER.search(name), bool(_EMBEDS.search(name))
            unpacked = packing.shape(name, tensor.dtype, tensor.shape)
            shape = tensor.shape if unpacked is None else unpacked
            packs, of_experts = (inside is not None and is_it for is_it in _packs(name, shape, n_experts))
            if of_experts and len(shape) == 3:
                shape = _by_outputs(name, shape, hidden)
            is_float = tensor.dtype in _FLOATS or source.is_gguf or unpacked is not None
            stays = {kind: found[name] for kind, found in stay.items() if name in found}
            packs = packs and source.family != "gpt2" and not name.endswith(_EXPANDS)
            layer = int(inside[1]) if inside is not None else None
            of = (source.is_gguf, stays, layer, embeds, of_experts, blocks.joined_with(name))
            held.append(CheckpointTensor(shape, tensor.nbytes, packs, is_float, *of))
    return tuple(held)


def _packs(name: str, shape: tuple[int, ...], n_experts: int) -> tuple[bool, bool]:
    """Return two flags: `load.quant` quantizes this tensor of a layer; it does so as weights of experts."""
    if name.endswith("bias"):
        return False, False
    of_experts = shape[:1] == (n_experts,) if len(shape) == 3 else len(shape) == 2 and bool(_EXPERT.search(name))
    routes = shape[:1] == (n_experts,) and bool(_ROUTER.search(name))
    return of_experts or (len(shape) == 2 and not routes), of_experts


def _by_outputs(name: str, shape: tuple[int, ...], hidden: int) -> tuple[int, ...]:
    """Return experts' weight shape [E, N, K]: some families store [E, K, N] (gpt-oss, Llama 4), found by the sizes."""
    at = 1 if _OUT_OF_EXPERT.search(name) else 2  # axis of the model's hidden size
    return (shape[0], shape[2], shape[1]) if shape[at] != hidden == shape[3 - at] else shape


def expands_packed(source: Source) -> bool:
    """True if the weight that expands MLA latents is quantized in the files."""
    named = {name: t.dtype for file in source.files for name, t in file.tensors.items() if ".kv_b_proj." in name}
    return bool(named) and not any(name.endswith(_EXPANDS) and dtype in _FLOATS for name, dtype in named.items())


def panels(shape: Shape, number: int) -> tuple[int, ...]:
    """Return by layer the bytes of both parts of the MLA latent expansion, which kernels keep per head as a copy."""

    def each(of: LayerKVShape) -> int:
        (key, value), turned = of.head, of.key - of.rank
        return of.rank and number * shape.heads * (_outputs(of.rank) * (key - turned) + _outputs(value) * of.rank)

    return tuple(each(of) for of in shape.stores)


def _outputs(n: int) -> int:
    return -(-n // PANEL) * PANEL


def packed_bytes(quantized: Mapping[str, Any]) -> float | None:
    """Return the bytes per quantized weight with its scales, by quantization_config; None if it does not say."""
    method, bits, group = (quantized.get(key) for key in ("quant_method", "bits", "group_size"))
    if quantized.get("load_in_4bit"):
        return _NF4
    if quantized.get("load_in_8bit") or method == "fp8":
        return 1.0
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        return None
    scales = (16 + bits) / group if isinstance(group, int) and group > 0 else 0  # a scale and a zero per group
    return (bits + scales) / 8


def of_shape(shape: Shape, number: int = 2, packed: float | None = None) -> tuple[CheckpointTensor, ...]:
    """Return the tensors of such a model if no file exists; `number`: bytes per number, `packed`: in linear layers."""

    def held(rows: int, cols: int, packs: bool, of_experts: bool = False) -> CheckpointTensor:
        each = packed if packed is not None and packs else number
        return CheckpointTensor((rows, cols), int(rows * cols * each), packs, of_experts=of_experts)

    def layer(of: LayerKVShape) -> Iterator[CheckpointTensor]:
        d, kv, (key, value) = shape.hidden, 0 if of.shares is not None else of.kv_heads, of.head
        for rows, cols in ((shape.heads * key, d), (kv * of.key, d), (d, shape.heads * value)):
            yield held(rows, cols, True)
        if of.rank:  # this weight keeps full precision, because its parts are multiplied per head
            yield held(shape.heads * (key - of.key + of.rank + value), of.rank, False)
        else:
            yield held(kv * of.value, d, True)
        for _ in range(max(1, shape.experts)):
            for rows, cols in ((shape.inner, d), (shape.inner, d), (d, shape.inner)):
                yield held(rows, cols, True, of_experts=bool(shape.experts))
        yield held(2, d, False)

    ends = [held(shape.vocab, shape.hidden, False)] * (1 if shape.is_tied else 2)
    layers = (replace(one, layer=i) for i, of in enumerate(shape.stores) for one in layer(of) if one.matrix)
    return (replace(ends[0], embeds=True), *ends[1:], *layers)


def weigh(
    held: tuple[CheckpointTensor, ...],
    shape: Shape,
    *,
    number: int,
    quant: str,
    device: str,
    given: bool,
    head: str = "none",
    is_whole: bool = True,
) -> Weights:
    """Add up the weights' bytes. `number`: bytes per number in memory. `given`: quantized in the checkpoint already.
    `head`: precision of the output layer, "none" or "int8"; a tied one then has a weight of its own. `is_whole`: all
    is on the device, whose kernels run."""
    served = number < BYTES["fp64"] if device == "cpu" else number == BYTES["bf16"] and is_whole
    held = tuple(h.loaded(number, device if quant == "none" and served else "") for h in held)
    sizes = [h.nbytes if given or not h.is_float else _size(h, number, quant, device) for h in held]
    plain = [h.nbytes if given or not h.is_float else math.prod(h.shape) * number for h in held]
    files = sum(h.nbytes for h in held)
    ends = (shape.vocab, shape.hidden)
    whole = sum(n for h, n in zip(held, sizes, strict=True) if h.layer is None and not h.embeds and h.shape == ends)
    memory = sum(sizes) + (shape.vocab * (shape.hidden + number) - whole if head != "none" else 0)
    is_asked = quant != "none" and not given
    packed = [h.matrix for h in held if is_asked and h.packs and h.is_float]
    share = 1.0 if not shape.experts else shape.linear_active / shape.linear
    by_layer, experts = [0] * shape.layers, [0] * shape.layers
    parts: Counter[int | None] = Counter()  # numbers of experts whose weights are separate tensors
    joined: Counter[str] = Counter()  # bytes of a joined weight, which for a moment is beside its parts
    for h, size in zip(held, sizes, strict=True):
        if h.layer is not None and h.layer < shape.layers:
            by_layer[h.layer] += size
            experts[h.layer] += size * h.of_experts
        parts[h.layer] += math.prod(h.shape) * (h.is_part and not given)
        joined[h.joins] += size if h.joins and device != "cpu" and served else 0
    embeddings = sum(size for h, size in zip(held, sizes, strict=True) if h.embeds)
    is_read = shape.is_tied and head == "none"
    # experts of 16 bits and more are quantized while loading, linear layers after all are loaded
    on_the_way = [is_asked and h.of_experts and h.nbytes >= 2 * math.prod(h.shape) for h in held]
    loaded = sum(size if early else all_of_it for size, all_of_it, early in zip(sizes, plain, on_the_way, strict=True))
    # two of three projections are joined; the joint tensor remains if it is not quantized
    put_together = number * max(parts.values(), default=0) * (4 if is_asked else 2) // 3
    return Weights(
        memory=memory, files=files, loaded=loaded if sum(plain) != files or put_together > 0 else 0,
        read=int((memory - (0 if is_read else embeddings)) * share), active=share,
        packing=max([_ROUNDING * max(packed, default=0) + put_together, *joined.values()]), embeddings=embeddings,
        layers=tuple(by_layer) if all(by_layer) else (), experts=tuple(experts),
        largest=number * max((h.matrix for h in held if h.packs), default=0),
    )  # fmt: skip


def _size(h: CheckpointTensor, number: int, quant: str, device: str) -> int:
    count = math.prod(h.shape)
    if quant == "none" or not h.packs or (h.of_experts and quant == "nf4"):
        return count * number
    n, k = h.shape[-2:]
    if device != "cpu" and quant != "int4" and not h.of_experts:
        # a float32 scale per output, or blocks of 64 whose scales are quantized too
        return count + 4 * n if quant == "int8" else int(count * _NF4)
    if why_not((n, k), 8 if quant == "int8" else 4):
        return count * number
    codes = padded_outputs(n) * k
    each = codes + n * number if quant == "int8" else codes // 2 + 2 * n * (k // group_of(k)) * number
    return count // h.matrix * each
