"""Weight files of a model folder: one file, or several shards with an index, checked by their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import fstat
from os.path import exists, lexists
from pathlib import Path, PurePath

from kvcli.errors import BadModel
from kvcli.models.config_file import read_json, unread
from kvcli.models.headers import WeightFile, read_header
from kvcli.settings.small_file import Unfit, open_regular

INDEX = 32 << 20  # bytes, enough for half a million tensors


def weights(path: Path, name: str, allow_pickle: bool) -> tuple[tuple[WeightFile, ...], bool]:
    """Return every weight file that transformers will read, checked, and True if they are pickles."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        is_pickle = suffix == "bin"
        single, index = path / f"{stem}.{suffix}", path / f"{stem}.{suffix}.index.json"
        if not lexists(single) and not lexists(index):
            continue
        if is_pickle and not allow_pickle:
            raise BadModel(
                f"the weights of {name} are pickle files, which can run any code when they are opened",
                code="model_pickle",
                lines=[f"found {(single if lexists(single) else index).name}, no *.safetensors"],
                try_=["look for a safetensors copy of the model", "--allow-pickle, if you trust its author"],
            )
        weight_map = {} if lexists(single) else _weight_map(index, name)
        files = _shards(path, name, weight_map) if weight_map else [single]
        checked = tuple(_pickle(f, name) if is_pickle else read_header(f) for f in files)
        if not is_pickle:
            _check_index(path, name, weight_map, checked)
        return checked, is_pickle
    raise BadModel(
        f"{name} has no weights",
        code="model_incomplete",
        lines=[f"looked in {path} for model.safetensors and model.safetensors.index.json", *unread(path)],
        try_=[f"ls {path}", "download the model again"],
    )


def _weight_map(index: Path, name: str) -> dict[str, str]:
    """Map tensor names to shard files, by the index of a model in several files."""
    weight_map = read_json(index, name, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise BadModel(
            f"{index.name} of {name} lists no tensors", code="model_corrupt", try_=[f"download {index.name} again"]
        )
    for shard in weight_map.values():
        if PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
            raise BadModel(
                f"{index.name} of {name} names a file outside the model's folder: {shard[:80]}",
                code="model_corrupt",
                lines=["a model's weights must be in its own folder"],
                try_=["ask its author, or take another copy of the model"],
            )
    return weight_map


def _shards(path: Path, name: str, weight_map: Mapping[str, str]) -> list[Path]:
    shards = [path / shard for shard in sorted(set(weight_map.values()))]
    missing = [s.name or str(s) for s in shards if not exists(s)]
    if missing:
        raise BadModel(
            f"the weights of {name} are incomplete: {len(missing)} of {len(shards)} shards are missing",
            code="model_incomplete",
            lines=[*missing[:4], *([f"and {len(missing) - 4} more"] if len(missing) > 4 else [])],
            detail={"missing": missing, "shards": len(shards)},
            try_=[f"download into {path} again"],
        )
    return shards


def _check_index(path: Path, name: str, weight_map: Mapping[str, str], files: Sequence[WeightFile]) -> None:
    held = {f.path: f.tensors for f in files}
    absent = [t for t, shard in weight_map.items() if t not in held[path / shard]]
    if absent:
        raise BadModel(
            f"the shards of {name} lack {len(absent)} tensors of their index",
            code="model_corrupt",
            lines=[f"{absent[0]} is not in {weight_map[absent[0]]}"],
            try_=["download the shards and the index of one revision again"],
        )


def _pickle(file: Path, name: str) -> WeightFile:
    try:
        with open_regular(file) as stream:
            return WeightFile(file, fstat(stream.fileno()).st_size, {})
    except Unfit as error:
        raise BadModel(f"{file.name} of {name} {error}", code="model_corrupt", try_=[f"ls -l {file.parent}"]) from error
