"""The tables of a profile: frozen dataclasses whose fields are the TOML keys, each with its default and its unit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import tomli

# Registry of methods by table and name: entry points of the group `kvcli.methods`, of kvcli and of other packages.
#
# `"policy.mine" = "my_package:Mine"` in another package's `[project.entry-points."kvcli.methods"]` makes `policy.name =
# "mine"` a method whose table is the frozen dataclass `Mine`. A method is imported only when a profile names it, and no
# package can replace a method of kvcli.

Registries = Mapping[str, Mapping[str, str]]  # table -> name of a method -> "module:Class"
GROUP = "kvcli.methods"


@cache
def registries() -> Registries:
    """Installed methods: kvcli's, the default of each table first, then those of other packages."""
    found: dict[str, dict[str, str]] = {table: {} for table in METHOD_TABLES}
    usual = [(f"{table}.{name}", _ours()[f"{table}.{name}"]) for table, (_, name) in METHOD_TABLES.items()]
    for dotted, target in (*usual, *sorted(_ours().items()), *sorted((point.name, point.value) for point in _others())):
        table, _, name = dotted.partition(".")
        found.setdefault(table, {}).setdefault(name, target)
    return found


@cache
def foreign() -> Mapping[str, str]:
    """Methods of other packages: "module:Class" -> the package and its version."""
    # excludes another name for a kvcli method
    points = [point for point in _others() if point.value not in _ours().values()]
    return {point.value: f"{point.dist.name} {point.dist.version}" for point in points if point.dist is not None}


@cache
def _ours() -> Mapping[str, str]:
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():  # the checkout is newer than its installed metadata, and there may be none installed
        project = tomli.loads(checkout.read_text(encoding="utf-8"))["project"]
        if project["name"] == "kvcli":
            points: Mapping[str, str] = project["entry-points"][GROUP]
            return points
    return {point.name: point.value for point in metadata.distribution("kvcli").entry_points.select(group=GROUP)}


@cache
def _others() -> list[metadata.EntryPoint]:
    found = metadata.entry_points(group=GROUP)
    return [point for point in found if point.dist is not None and point.dist.name != "kvcli"]


Exactness = Literal["exact", "certified", "approx"]
Order = Literal["chunks", "layers"]
ThinkingMode = Literal["auto", "on", "off", "low", "medium", "high"]
Quant = Literal["none", "int8", "int4", "nf4"]
Purpose = Literal["your own", "same text", "less memory", "long texts", "comparison"]  # in the order of lists


LARGEST = 2**31 - 1  # whole number of a setting or an option that names no limit of its own


@dataclass(frozen=True, slots=True)
class Range:
    """Range of allowed numbers, for `Annotated[int, Range(0)]`. Infinity and NaN are never allowed, nor, without
    `most`, a whole number above LARGEST."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, value: float) -> bool:
        return (
            abs(value) < float("inf")
            and (self.least is None or value >= self.least)
            and value <= (self.most if self.most is not None else LARGEST if isinstance(value, int) else value)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        is_open = self.above is not None or self.below is not None
        most = "at most" if is_open else "to"
        limits = (("from", self.least), ("above", self.above), (most, self.most), ("below", self.below))
        return (" and " if is_open else " ").join(f"{word} {limit}" for word, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Allowed text, for `Annotated[str, Pattern(...)]`: a regular expression, and words that explain it."""

    pattern: str
    words: str


DEVICE = Pattern(r"auto|cpu|cuda(:\d+)?|mps|xpu(:\d+)?", '"auto", "cpu", "cuda", "cuda:N" or "mps"')
_SIZE = r"\d+(\.\d+)? ?[KMGT]iB"
SIZE = Pattern(_SIZE, 'a size with its unit, such as "6GiB" or "512MiB"')
BUDGET = Pattern(
    rf"(fit|(?!0*(\.0*)? ?[KMGT%])({_SIZE}|(100|\d{{1,2}}(\.\d+)?) ?%))?",
    '"fit", a size such as "6GiB", a share such as "25%", or ""',
)
AUTO_SIZE = Pattern(f"auto|{_SIZE}", '"auto" or a size with its unit, such as "6GiB"')
STEPS = Pattern(  # settings that can change while an answer is generated
    r"kv\.[kv]_bits=[842]|kv\.residual=\d+|prefill\.chunk=(\d+|-\d\d?%)|context\.limit=(\d+|-\d\d?%)"
    rf"|memory\.(host|disk)={_SIZE}",
    'a list of steps such as "kv.v_bits=2", "kv.residual=64", "prefill.chunk=-50%", '
    '"context.limit=-25%" or "memory.disk=8GiB"',
)


def stepped(now: int, value: str) -> int:
    """Return a number after a fallback step to this value, a number or a share such as "-25%"."""
    return max(1, int(now * (1 + int(value[:-1]) / 100))) if value.endswith("%") else int(value)


def size_of(text: str) -> int:
    """Return a size such as 6GiB in bytes."""
    return int(float(text[:-3]) * 1024 ** ("KMGT".index(text[-3]) + 1))


def texts_of(value: str | Sequence[str]) -> Sequence[str]:
    """Return the texts of a key that takes one text or several."""
    return (value,) if isinstance(value, str) else value


def tokens_of(text: str) -> int:
    """Return a number of tokens such as 4096, 4k or 1.5k; 0 if the text is no number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().replace("_", ""), re.IGNORECASE)
    n = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0.0
    return int(n) if n == int(n) else 0


@dataclass(frozen=True)
class Load:
    """Loading: weights, data type and device."""

    quant: Quant = "none"  # precision of the weights; if not set, int4 on a GPU without memory for more
    adapters: tuple[str, ...] = ()  # LoRA adapters: "PATH" or "PATH:WEIGHT" each; folders, or ids in the local cache
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"  # data type of computation; auto = the model's own
    device: Annotated[str, DEVICE] = "auto"  # device that runs the model; cuda:N = GPU N
    layers_on_gpu: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # layers on the GPU; auto = all, or all that fit
    experts_on_gpu: Literal["auto"] | Annotated[int, Range(0)] = "auto"  # layers whose experts are not in host memory
    embeddings: Literal["device", "host"] = "device"  # table of embeddings; if not set, host on a GPU without memory
    head: Literal["none", "int8"] = "none"  # precision of the output layer; if not set, int8 on a GPU without memory
    threads: Annotated[int, Range(0)] = 0  # number of CPU threads; 0 = all cores
    allow_pickle: bool = False  # load weights from pickle files, which can run code of their author
    trust_remote_code: bool = False  # run Python code from the model's repository
    verify: bool = True  # after loading, compare a few tokens with the original transformers model
    graphs: Literal["auto", "off"] = "auto"  # CUDA graphs: capture forward passes and replay them; auto = if possible

    lossy: ClassVar = ("quant", "head", "dtype")  # keys whose other values change the text


@dataclass(frozen=True)
class Prefill:
    """Prefill: how the KV of the prompt is computed."""

    chunk: Annotated[int, Range(1)] = 2048  # tokens per prefill pass; if not set on a GPU, as many as fit
    order: Literal["auto"] | Order = "auto"  # chunk by chunk, or layer by layer; auto = what fits


@dataclass(frozen=True)
class Kv:
    """Precision of stored keys and values."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # data type of stored keys and values; auto = the model's
    k_bits: Literal[16, 8, 4, 2] = 16  # bits per key element of tokens older than `residual`; 16 = as `dtype`
    v_bits: Literal[16, 8, 4, 2] = 16  # bits per value element of tokens older than `residual`; 16 = as `dtype`
    group: Annotated[int, Range(1)] = 64  # elements that share a scale, and number of tokens quantized at a time
    residual: Annotated[int, Range(0)] = 128  # newest tokens, kept in full precision when older ones are quantized
    sinks: Annotated[int, Range(0)] = 4  # first tokens, which are never quantized or offloaded
    split_codes: bool = False  # store 8-bit codes as two 4-bit halves; self-drafting reads only the upper half
    rotate: Literal["none", "hadamard"] = "none"  # Hadamard rotation before quantization; it spreads outliers

    lossy: ClassVar = ("dtype",)  # beside the effects of `[kv]` (profile.py)


@dataclass(frozen=True)
class Memory:
    """Storage of the KV cache, and fallbacks when memory runs out. KV in host memory or on disk is read in place."""

    device: Annotated[str, AUTO_SIZE] = "auto"  # KV cache size on the compute device; auto = free memory
    host: Annotated[str, AUTO_SIZE] = "0GiB"  # host memory for old tokens of a GPU; auto = free memory, none on a CPU
    host_access: Literal["auto", "zero-copy", "cpu", "stream"] = "auto"  # how a GPU reads host memory; auto = fastest
    disk: Annotated[str, SIZE] = "0GiB"  # size of a private temporary file for the oldest tokens; 0GiB = none
    disk_writes: Annotated[str, SIZE] = "256GiB"  # maximum bytes written to that file, because writing wears disks
    budget: Annotated[str, BUDGET] = ""  # of policy "budget": size, share of the full KV cache, or fit = free memory
    max_loss: Annotated[float, Range(0, below=1)] = 0.0  # score share that may be lost, within `budget`; 0 = off
    sequences: Annotated[int, Range(1)] = 1  # maximum sequences of a model at a time, which share budget = "fit"
    bits: tuple[Literal[8, 4, 2], ...] = (8, 4)  # bits used by a budget, beside full; 2 = 4-bit keys, 2-bit values
    evicted: Literal["drop", "demote"] = "drop"  # drop tokens that the policy evicts, or demote them to a lower tier
    on_oom: Literal["degrade", "fail"] = "degrade"  # out of memory: apply `fallbacks` in turn, or stop with an error
    fallbacks: Annotated[tuple[str, ...], STEPS] = ()  # settings changed when memory runs out, in this order, each once
    checkpoints: Annotated[int, Range(1, 256)] = 8  # saved recurrent states to rewind to, at most, per sequence

    @property
    def spends(self) -> bool:
        """True if the policy chooses the number of bits of each token."""
        return bool(self.budget or self.max_loss)

    @property
    def demotes(self) -> bool:
        """True if the policy, not age, chooses the tokens to demote."""
        return self.evicted == "demote"

    @property
    def drops(self) -> bool:
        """True if demoted tokens are dropped when the tiers are full, because no other fallback is set."""
        return self.demotes and self.on_oom == "degrade" and not self.fallbacks


Text = Annotated[str | tuple[str, ...], Pattern("(?s).+", "text that is not empty, or a list of such texts")]
BIAS = Pattern(
    r"\d+([+-]\d{1,9}(\.\d+)?|-inf)", 'a token id and a number, as in "15043+1.5" or "15043-inf", or a list of these'
)
# settings that make earlier tokens less likely, with the values that turn them off
NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0}


@dataclass(frozen=True)
class Sample:
    """Sampling of the next token. A key that is absent follows the model's generation_config. The settings act in this
    order: logit bias, penalties, temperature, top-n-sigma, top-k, top-p, min-p, typical-p, Bregman top-k, XTC."""

    temperature: Annotated[float, Range(0)] | None = None  # 0 = always the most likely token
    top_k: Annotated[int, Range(0)] | None = None  # sample from this many most likely tokens; 0 = all
    top_p: Annotated[float, Range(above=0, most=1)] | None = None  # total probability to sample from; 1 = all
    min_p: Annotated[float, Range(0, below=1)] | None = None  # drop tokens below this share of the best; 0 = none
    typical_p: Annotated[float, Range(above=0, most=1)] | None = None  # total probability of typical tokens; 1 = all
    top_n_sigma: Annotated[float, Range(0)] | None = None  # deviations below the best logit to sample from; 0 = all
    bregman_lambda: Annotated[float, Range(0, 1)] | None = None  # cost of a token in Bregman top-k; 0 = off
    bregman_alpha: Annotated[float, Range(1.1, 2)] = 1.5  # its divergence; 2 adds as much to each token that is kept
    xtc_probability: Annotated[float, Range(0, 1)] | None = None  # how often XTC drops all likely tokens but one
    xtc_threshold: Annotated[float, Range(above=0, most=0.5)] | None = None  # probability of a likely token (XTC)
    repetition_penalty: Annotated[float, Range(above=0)] | None = None  # above 1 = fewer repetitions; 1 = off
    presence_penalty: Annotated[float, Range()] | None = None  # lowers tokens that the answer contains; 0 = off
    frequency_penalty: Annotated[float, Range()] | None = None  # lowers them by each occurrence; 0 = off
    dry_multiplier: Annotated[float, Range(0)] | None = None  # lowers tokens that continue a repetition; 0 = off
    dry_base: Annotated[float, Range(1)] = 1.75  # growth of that penalty with each repeated token
    dry_allowed_length: Annotated[int, Range(1, 1024)] = 2  # repeated tokens without that penalty
    dry_range: Annotated[int, Range(0)] = 0  # last tokens that are searched for repetitions; 0 = all
    dry_sequence_breakers: Text = ("\n", ":", '"', "*")  # no repetition contains a token with one of these texts
    logit_bias: Annotated[str | tuple[str, ...], BIAS] = ()  # TOKEN+N or TOKEN-N: adds a number to a token's logit
    stop: Text = ()  # texts that end the answer where one begins
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0  # random seed; the same seed gives the same text
    max_new_tokens: Annotated[int, Range(1)] = 1024  # maximum tokens of one answer
    stop_loops: Annotated[int, Range(0)] = 320  # end an answer after this many tokens of repetition; 0 = never


@dataclass(frozen=True)
class Thinking:
    """Thinking aloud before an answer, by models whose chat template knows it."""

    mode: ThinkingMode = "auto"  # auto = as the chat template does; low to high = its levels
    max_tokens: Annotated[int, Range(0)] = 0  # most tokens of a thought, whose end is then forced; 0 = what fits


@dataclass(frozen=True)
class Context:
    """Length of a chat."""

    limit: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # maximum tokens; auto = the model's limit, or what fits
    reserve: Annotated[int, Range(1)] = 1024  # tokens reserved for the answer
    on_overflow: Literal["error", "drop", "summarize", "compress"] = "error"  # refuse longer chats, or shorten them


@dataclass(frozen=True, slots=True)
class DraftModelRef:
    """Reference to a second model beside the target model. The table of a method names it (`Profile.second`)."""

    model: str  # model id, folder or name, as after -m
    quant: Quant  # precision of its weights
    head: str = ""  # the `spec.method` whose draft head it is (refusals.head_method); "" = a complete model
    load: Callable[..., Any] | None = None  # loads that head: target model, its files and `Load` settings -> LM


@dataclass(frozen=True)
class Model:
    """`[models.NAME]`: definition of a short model name."""

    path: str = ""  # model id, folder, or "demo"; empty = the table's name
    revision: str = ""  # commit, tag or branch of the model id; empty = main branch
    profile: str = ""  # profile used with this model unless another is requested
    trust_remote_code: bool = False  # run Python code from this model's repository


@dataclass(frozen=True)
class Top:
    """Keys of a config file outside of tables."""

    schema: Literal[1] = 1  # version of this file format
    default_model: str = "demo"  # model used if none is named: as after -m, or a name below [models]
    default_profile: str = "ngram"  # profile used if none is named
    keep_chats: bool = True  # save chats after each turn; --no-save disables it for one chat
    prefix_cache_size: Annotated[str, SIZE] = "8GiB"  # disk for the prefix cache; if not set, at most 10% of free space


@dataclass(frozen=True)
class Header:
    """Keys of a profile outside of tables."""

    description: str = ""  # one line for `profiles list`
    extends: str | tuple[str, ...] = ()  # a profile, or a list of profiles; later ones take precedence
    purpose: Purpose = "your own"  # purpose of the profile; `profiles list` is sorted by it
    exactness: Exactness = "exact"  # allowed change of the text, drafting aside: none, bounded error, any


class MethodTable(NamedTuple):
    """A table whose further keys are defined by its method."""

    key: str  # key that names the method
    default: str  # method if none is named


SECTIONS: Mapping[str, type | MethodTable] = {  # tables of a profile, as shown and documented
    "load": Load,
    "prefill": Prefill,
    "prune": MethodTable("method", "none"),
    "reuse": MethodTable("method", "none"),
    "kv": Kv,
    "kv_format": MethodTable("method", "kivi"),
    "memory": Memory,
    "prefix_cache": MethodTable("codec", "none"),
    "policy": MethodTable("name", "none"),
    "sparse": MethodTable("method", "none"),
    "spec": MethodTable("method", "off"),
    "reasoning_steps": MethodTable("method", "none"),
    "decode": MethodTable("method", "none"),
    "sample": Sample,
    "thinking": Thinking,
    "context": Context,
}
ORDER = tuple(SECTIONS)
TABLES = {name: table for name, table in SECTIONS.items() if not isinstance(table, MethodTable)}
METHOD_TABLES = {name: table for name, table in SECTIONS.items() if isinstance(table, MethodTable)}
NUMBERS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}  # of `dtype` -> torch's name


def plain_value(dotted: str) -> object:
    """Return the built-in default of a key of a table, or of the key that names a method."""
    table, _, key = dotted.rpartition(".")
    return METHOD_TABLES[table].default if table in METHOD_TABLES else getattr(TABLES.get(table, Header), key)
