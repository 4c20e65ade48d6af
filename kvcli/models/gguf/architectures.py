"""Architectures of llama.cpp, and how transformers' tensors and settings are made from theirs: architectures.toml.

Standard library and tomli only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli

TABLE = Path(__file__).with_name("architectures.toml")
HEAD = "lm_head.weight"
# metadata, after the architecture's name -> config.json: keys of all architectures with the same number
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
Size = Any  # a number, or in the table the name of a setting; the product of several sizes is a count


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored tensor, in another order. Of a vector, each number is a row."""

    stored: str  # name in the file, below the layer; a module's has no suffix, and a full stop ends one without suffix
    skip: tuple[Size, ...] = ()  # count of rows before the first
    take: tuple[Size, ...] = ()  # count of rows; () = all that follow
    view: tuple[Size, ...] = (-1,)  # axes of the rows, slowest first; -1 = what is left
    axes: tuple[int, ...] = (0,)  # the axes in the order of transformers' rows
    by: Literal["rows", "columns", "numbers"] = "rows"  # columns or single numbers are taken as rows


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of transformers. Each part is cut into as many groups; the first group of each part comes first.

    In the table, sizes may be names of settings; of a model, all are numbers, and names are those in the file.
    """

    parts: tuple[Part, ...]
    groups: Size = 0  # 0 = one per matrix, for example per expert; -1 = one per row
    is_turned: bool = False  # each matrix is transposed at the end
    shape: tuple[Size, ...] = ()  # () = that of the parts, one below the other
    is_log: bool = False  # the file has -exp(x)
    offset: float | None = None  # added before storing; None = the architecture's for norms, else none
    is_optional: bool = False  # a file may lack the tensor
    bias: bool = False  # the same for the bias of the module, if the file has one

    @property
    def is_plain(self) -> bool:
        """True if the tensor has rows of stored tensors, with their numbers, or is the transpose of such rows."""
        return not (self.is_log or self.offset) and all(part.by == "rows" for part in self.parts)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of config.json that a key of the metadata states."""

    name: str
    usual: object = None  # if the file does not state the key
    is_optional: bool = False  # the setting is None if the file does not state the key
    per: str = ""  # the number is divided by this setting
    values: Mapping[str, str] = field(default_factory=dict)  # the key's value -> the setting's; "" = None


Names = Mapping[str, tuple[Piece, ...]]  # transformers' name, below the layer -> pieces, of which one is in the file


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp, and the class of transformers that computes the same."""

    arch: str
    model_type: str
    model: str
    layer: Names  # tensors of each layer
    outer: Names  # tensors outside layers
    kinds: Mapping[str, Names]  # kind of a layer in `layer_types` -> its tensors
    blocks: tuple[Names, ...]  # each layer has the tensors of the first whose first tensor is in the file
    mtp: Names  # tensors of an MTP layer, beside those of a layer, in the blocks behind the layers
    keys: Mapping[str, tuple[Setting, ...]]  # beside SETTINGS
    mtp_names: tuple[str, ...] = ()  # prefixes of those tensors and of the layer's, by block i or MTP layer j; setting
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that hold for each file
    shows: Mapping[str, str] = field(default_factory=dict)  # setting -> tensor of a layer that a file has if it holds
    lacks: Mapping[str, str] = field(default_factory=dict)  # setting -> tensor that some layer lacks if it holds
    implied: tuple[str, ...] = ()  # keys that state what the tensors show
    when: str = ""  # key that files of this class state, with a value other than 0
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # key, setting
    offset: float = 0.0  # of stored norms
    stretches: str = ""  # kind of RoPE that frequency factors in the file stand for
    is_partial: bool = False  # RoPE may cover a part of each head
    log_mul: float = 0.0  # yarn_log_multiplier of mscale 1; 0 = the architecture has no such key
    period: int = 0  # every `period`-th layer has full attention, the others a window; 0 = all have full attention
    has_two_ropes: bool = False  # layers with a window have a RoPE of their own
    leads: bool | None = None  # a space leads text; None = as the file states
    scaled_by_width: int = 0  # layers of the model whose scale of queries follows from its width (as in llama.cpp)


@cache
def table() -> Mapping[str, Any]:
    """Read the table of all architectures."""
    return tomli.loads(TABLE.read_text(encoding="utf-8"))


@cache
def architectures() -> Mapping[str, tuple[Architecture, ...]]:
    """By llama.cpp's name, the classes among which the metadata decides."""
    groups = {name: {key: _pieces(said) for key, said in group.items()} for name, group in table()["tensors"].items()}
    keys = {name: {key: _settings(to) for key, to in group.items()} for name, group in table()["settings"].items()}
    found: dict[str, tuple[Architecture, ...]] = {}
    for row in map(dict, table()["architecture"]):
        row["layer"] = _joined(groups, row["layer"])
        row["outer"] = groups[row.get("outer", "outer")]
        row["kinds"] = {kind: _joined(groups, names) for kind, names in row.get("kinds", {}).items()}
        row["blocks"] = tuple(_joined(groups, names) for names in row.get("blocks", ()))
        row["mtp"] = groups[row["mtp"]] if "mtp" in row else {}
        row["keys"] = _joined(keys, row.get("keys", ()))
        one = Architecture(**row)
        found[one.arch] = (*found.get(one.arch, ()), one)
    return found


def _joined(groups: Mapping[str, Mapping[str, Any]], names: list[str]) -> dict[str, Any]:
    return {key: value for name in names for key, value in groups[name].items()}


def _pieces(said: Any) -> tuple[Piece, ...]:
    return tuple(map(_piece, said if isinstance(said, list) else [said]))


def _piece(said: Any) -> Piece:
    said = {"parts": [{"stored": said}]} if isinstance(said, str) else said
    marks = "".join(part["stored"] for part in said["parts"])
    parts = tuple(Part(**{key: _frozen(value) for key, value in part.items()}) for part in said["parts"])
    rest = {key: _frozen(value) for key, value in said.items()}
    return Piece(**{**rest, "parts": parts, "bias": "+" in marks, "is_optional": "?" in marks})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value.rstrip("+?") if isinstance(value, str) else value


def _settings(said: Any) -> tuple[Setting, ...]:
    several = said if isinstance(said, list) else [said]
    return tuple(Setting(one) if isinstance(one, str) else Setting(**one) for one in several)


def full_names(names: Names) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Tensors of a group by their full names: weights, and biases of modules that may have them."""
    for name, pieces in names.items():
        if pieces[0].parts[0].stored.endswith((".", ".weight", ".bias", ".scale")):
            yield name, pieces
            continue
        for suffix in ("weight", "bias") if pieces[0].bias else ("weight",):
            (piece,) = pieces
            parts = tuple(replace(part, stored=f"{part.stored}.{suffix}") for part in piece.parts)
            may_lack = suffix == "bias" or piece.is_optional
            yield f"{name}.{suffix}", (replace(piece, parts=parts, is_optional=may_lack),)
