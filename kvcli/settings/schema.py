"""The tables of a profile: frozen dataclasses whose fields are the TOML keys, each with its default and its unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

Exactness = Literal["exact", "certified", "approx"]
Order = Literal["chunks", "layers"]
Quant = Literal["none", "int8", "int4", "nf4"]
Purpose = Literal["your own", "same text", "less memory", "long texts", "comparison"]  # in the order of lists


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers allowed, for `Annotated[int, Range(0)]`. Infinity and nan never are."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, value: float) -> bool:
        return (
            abs(value) < float("inf")
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        is_open = self.above is not None or self.below is not None
        most = "at most" if is_open else "to"
        limits = (("from", self.least), ("above", self.above), (most, self.most), ("below", self.below))
        return (" and " if is_open else " ").join(f"{word} {limit}" for word, limit in limits if limit is not None)


class DraftModelCost(Protocol):
    """What a second model takes: a method that names one says it, and memory is planned with it."""

    @property
    def second_rows(self) -> tuple[int, int]:
        """Rows of its passes, at most: of one that reads, and of one all of whose rows have logits."""

    @property
    def states(self) -> int:
        """Of layers of it that keep one, at most: of its text, of guesses, and of a pass."""

    def draft_slots(self, n: int, device: str = "cpu") -> int:
        """Of n tokens, those whose keys and values it has there, at most."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text allowed, for `Annotated[str, Pattern(...)]`: a pattern, and the words that explain it."""

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
STEPS = Pattern(  # settings that can change under a text that is being written
    r"kv\.[kv]_bits=[842]|kv\.residual=\d+|prefill\.chunk=(\d+|-\d\d?%)|context\.limit=(\d+|-\d\d?%)"
    rf"|memory\.(host|disk)={_SIZE}",
    'a list of steps such as "kv.v_bits=2", "kv.residual=64", "prefill.chunk=-50%", '
    '"context.limit=-25%" or "memory.disk=8GiB"',
)


def size_of(text: str) -> int:
    """A size such as 6GiB in bytes."""
    return int(float(text[:-3]) * 1024 ** ("KMGT".index(text[-3]) + 1))


def tokens_of(text: str) -> int:
    """A number of tokens such as 4096, 4k or 1.5k; 0 for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().replace("_", ""), re.IGNORECASE)
    n = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0.0
    return int(n) if n == int(n) else 0


@dataclass(frozen=True)
class Load:
    """What is loaded, and where to."""

    quant: Quant = "none"  # precision of the weights; where nobody says it, int4 on a GPU that has no room for more
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"  # numbers the model computes in; auto = its own
    device: Annotated[str, DEVICE] = "auto"  # where it runs; cuda:N = that GPU
    layers_on_gpu: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # layers on a GPU; auto = all, or what fits
    threads: Annotated[int, Range(0)] = 0  # CPU threads; 0 = all
    allow_pickle: bool = False  # load weights from pickle files, which can run code of whoever wrote them
    trust_remote_code: bool = False  # run Python code that comes with the model
    verify: bool = True  # compare a few tokens with the stock model after loading
    graphs: Literal["auto", "off"] = "auto"  # passes that a GPU records once and replays; auto = where it can

    lossy: ClassVar = ("quant", "dtype")  # keys whose other values change the text


@dataclass(frozen=True)
class Prefill:
    """How the prompt is read."""

    chunk: Annotated[int, Range(1)] = 2048  # tokens read in one pass; on a GPU, where nobody says, what fits
    order: Literal["auto"] | Order = "auto"  # what is finished first: a chunk, or a layer; auto = what fits


@dataclass(frozen=True)
class Kv:
    """How keys and values are kept."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # numbers they are stored in; auto = the model's
    k_bits: Literal[16, 8, 4, 2] = 16  # bits of a number in older keys; 16 = as dtype says
    v_bits: Literal[16, 8, 4, 2] = 16  # bits of a number in older values; 16 = as dtype says
    group: Annotated[int, Range(1)] = 64  # numbers that share a scale, and tokens that are packed at once
    residual: Annotated[int, Range(0)] = 128  # newest tokens kept as dtype says, where older ones are packed
    sinks: Annotated[int, Range(0)] = 4  # first tokens, never packed nor moved off the device
    split_codes: bool = (
        False  # codes of 8 bits lie as twice four: guesses of the model itself read the upper half alone
    )
    rotate: Literal["none", "hadamard"] = "none"  # keys and values turned before packing, which spreads outliers

    lossy: ClassVar = ("dtype",)  # beside the effects of `[kv]` (effects.py)


@dataclass(frozen=True)
class Memory:
    """Where keys and values lie, and what happens when there is no more room. Host and disk are read where they are."""

    device: Annotated[str, AUTO_SIZE] = "auto"  # bytes on the device that computes; auto = what is free
    host: Annotated[str, AUTO_SIZE] = "0GiB"  # host memory for old tokens of a GPU; auto = what is free, none on a CPU
    host_access: Literal["auto", "zero-copy", "cpu", "stream"] = (
        "auto"  # who reads host memory for a GPU; auto = the fastest
    )
    disk: Annotated[str, SIZE] = "0GiB"  # bytes of a private temporary file for what is older still; 0GiB = none
    disk_writes: Annotated[str, SIZE] = "256GiB"  # bytes written to that file at most, as disks wear
    budget: Annotated[str, BUDGET] = ""  # for policy "budget": bytes, share of a full past, or fit = what is free
    max_loss: Annotated[float, Range(0, below=1)] = (
        0.0  # share of worth that may go; a budget is then the most. 0 = off
    )
    sequences: Annotated[int, Range(1)] = 1  # over one model at a time, among which budget = "fit" is divided
    bits: tuple[Literal[8, 4, 2], ...] = (8, 4)  # of rungs on which a budget is spent, beside full; 2 = keys in 4
    evicted: Literal["drop", "demote"] = "drop"  # what a policy lets go is forgotten, or moves down a tier
    on_oom: Literal["degrade", "fail"] = "degrade"  # take the steps of `fallbacks` in turn, or end with an error
    fallbacks: Annotated[tuple[str, ...], STEPS] = ()  # steps taken in this order when memory runs out, each once
    checkpoints: Annotated[int, Range(1, 256)] = 8  # of states, where layers keep one: points to go back to, at most

    @property
    def spends(self) -> bool:
        """Does a policy say who lies in how many bits?"""
        return bool(self.budget or self.max_loss)

    @property
    def demotes(self) -> bool:
        """Does a policy say what goes down, instead of age?"""
        return self.evicted == "demote"

    @property
    def drops(self) -> bool:
        """Is what a policy moved down forgotten where tiers are full, as nothing else was asked for?"""
        return self.demotes and self.on_oom == "degrade" and not self.fallbacks


@dataclass(frozen=True)
class Sample:
    """How the next token is drawn. A key that is absent follows the model's generation_config."""

    temperature: Annotated[float, Range(0)] | None = None  # 0 = always the likeliest token
    top_k: Annotated[int, Range(0)] | None = None  # tokens to draw from; 0 = all
    top_p: Annotated[float, Range(above=0, most=1)] | None = None  # probability mass to draw from; 1 = all
    min_p: Annotated[float, Range(0, below=1)] | None = None  # least probability, as a share of the likeliest one's
    repetition_penalty: Annotated[float, Range(above=0)] | None = None  # above 1 = fewer repeats; 1 = none
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0  # same seed, same text
    max_new_tokens: Annotated[int, Range(1)] = 1024  # tokens of one answer at most
    stop_loops: Annotated[int, Range(0)] = 320  # tokens of one cycle after which an answer ends; 0 = none do


@dataclass(frozen=True)
class Context:
    """How long a conversation may get."""

    limit: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # tokens; auto = the model's limit, or what fits
    reserve: Annotated[int, Range(1)] = 1024  # tokens kept free for the answer
    on_overflow: Literal["error", "drop", "summarize", "compress"] = "error"  # refuse longer chats, or shorten them


@dataclass(frozen=True, slots=True)
class DraftModelRef:
    """A model that drafts for the one that writes: `[spec]` or `[reasoning_steps]` names it."""

    model: str  # as after -m
    quant: Quant  # precision of its weights
    takes: DraftModelCost = field(
        compare=False, repr=False
    )  # by the method that names it; models loaded alike are the same
    is_assistant: bool = False  # made for that one, whose past it reads


@dataclass(frozen=True)
class Model:
    """`[models.NAME]`: what a short model name stands for."""

    path: str = ""  # model id, folder, or "demo"; empty = the name itself
    revision: str = ""  # commit, tag or branch of the model id; empty = its main branch
    profile: str = ""  # profile used with it unless another is asked for
    trust_remote_code: bool = False  # run Python code that comes with this model


@dataclass(frozen=True)
class Top:
    """Keys of a config file that stand in no table."""

    schema: Literal[1] = 1  # version of this format
    default_model: str = "demo"  # model used when none is named: as after -m, or a name below [models]
    default_profile: str = "ngram"  # profile used when none is named
    keep_chats: bool = True  # whether chats are kept, turn by turn; --no-save leaves one out
    prefix_cache_size: Annotated[str, SIZE] = "8GiB"  # disk for what was read; unsaid, at most a tenth of what is free


@dataclass(frozen=True)
class Header:
    """Keys of a profile that stand in no table."""

    description: str = ""  # one line for `profiles list`
    extends: str | tuple[str, ...] = ()  # a profile, or a list of them of which later ones win
    purpose: Purpose = "your own"  # what it is for, which orders `profiles list`
    exactness: Exactness = "exact"  # what may change the text, drafting aside: nothing, bounded error, anything


class MethodTable(NamedTuple):
    """A table filled by a method."""

    key: str  # names the method
    default: str  # the method if nobody names one


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
    "sample": Sample,
    "context": Context,
}
ORDER = tuple(SECTIONS)
TABLES = {name: table for name, table in SECTIONS.items() if not isinstance(table, MethodTable)}
METHOD_TABLES = {name: table for name, table in SECTIONS.items() if isinstance(table, MethodTable)}
NUMBERS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}  # of `dtype` -> torch's name


def plain_value(dotted: str) -> object:
    """The built-in default of a key of a table, or of the key that names a method."""
    table, _, key = dotted.rpartition(".")
    return METHOD_TABLES[table].default if table in METHOD_TABLES else getattr(TABLES.get(table, Header), key)
