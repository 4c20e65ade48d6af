"""Names of models on the Hugging Face hub, and the GGUF files that a name selects. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os.path import basename

from kvcli.errors import BadModel

_PREFIX = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/|hf://", re.IGNORECASE)
# hub id: OWNER/NAME; OWNER/NAME:FILE.gguf for one of its files, OWNER/NAME:QUANT for that of a quantization
ID = re.compile(
    r"(?!(?i:hf|huggingface)\.co/)(?P<id>[\w-][\w.-]*/[\w.-]+)(:(?P<file>(?!.*\.\.)[\w-][\w./-]*\.gguf|[\w-]+))?"
)
DEFAULTS = ("Q4_K_M", "Q8_0")  # quantizations of a name without one, in the order of llama.cpp
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_BESIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # in names of files that are no model
_SHOWN = 12  # files in an error


def hub_id(name: str) -> str:
    """Return OWNER/NAME[:FILE or QUANT] for a hub id with a prefix of other programs; other names are unchanged."""
    bare = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
    return bare if ID.fullmatch(bare) else name


def shards(file: str) -> list[str]:
    """Return the names of all files of a split GGUF model, in order; a file that is not split stands alone."""
    found = _SHARD.fullmatch(file)
    if found is None or not (count := int(found["count"])):
        return [file]
    return [f"{found['stem']}-{i:05}-of-{count:05}{found['suffix']}" for i in range(1, count + 1)]


def select(files: Iterable[str], wanted: str, name: str, defaults: Sequence[str] = DEFAULTS) -> str:
    """Return the first file of the GGUF model that a hub name selects among the files of its repository.

    `wanted`: the file's name, a quantization in any case, or "" for the only model or the first of `defaults`. Raises
    BadModel if nothing or more than one model matches.
    """
    every = sorted(file for file in files if file.lower().endswith(".gguf"))
    models = list(dict.fromkeys(shards(f)[0] for f in every if not any(w in basename(f).lower() for w in _BESIDE)))
    if wanted in every:
        return shards(wanted)[0]
    hits = [] if wanted or len(models) != 1 else models
    for quant in () if hits else (wanted,) if wanted else defaults:
        hits = hits or _of_quant(models, quant)
    if len(hits) == 1:
        return hits[0]
    listed = hits or models
    raise BadModel(
        f"{name} matches {len(hits)} GGUF files" if hits else _nothing(name, wanted, models),
        code="gguf_several" if hits or not wanted else "model_not_found",
        lines=[*listed[:_SHOWN], *([f"and {len(listed) - _SHOWN} more"] if listed[_SHOWN:] else [])],
        detail={"files": listed},
        try_=[f"{name.partition(':')[0]}:{listed[0]}"] if listed else [],
    )


def _of_quant(models: Sequence[str], quant: str) -> list[str]:
    """Return the models of a quantization. A file that adds no word to the name of the others is preferred:
    X-Q4_K_M.gguf to X-UD-Q4_K_M.gguf.
    """
    labels = {model: re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", basename(model), flags=re.IGNORECASE) for model in models}
    one = min(labels.values(), default="")
    ends = (
        i for i in range(len(one), 0, -1) if one[i - 1] in "-._" and all(x.startswith(one[:i]) for x in labels.values())
    )
    common = one[: next(ends, 0)]
    exact = [model for model, label in labels.items() if label.removeprefix(common).lower() == quant.lower()]
    word = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:[-./]|$)", re.IGNORECASE)
    return exact or [model for model in models if word.search(model)]


def _nothing(name: str, wanted: str, models: Sequence[str]) -> str:
    if wanted.lower().endswith(".gguf"):
        return f"{name.partition(':')[0]} has no file {wanted}"
    if wanted:
        return f"{name.partition(':')[0]} has no GGUF file of quantization {wanted}"
    return f"{name} holds {len(models)} GGUF models, and its name selects none of them"
