"""Model files: find them and check them before anything heavy is loaded. Standard library only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import fstat
from os.path import (  # unlike Path's methods, False for an impossible name
    exists,
    expanduser,  # unlike Path's methods, False for an impossible name
    isdir,
    lexists,
)
from pathlib import Path, PurePath
from typing import Any

from kvcli.demo import BUNDLED, weights_dir
from kvcli.errors import BadModel, writing
from kvcli.models.checkpoint import CheckpointFormat, TensorHeader, WeightFile, hold, read_header
from kvcli.models.gguf import header
from kvcli.models.gguf.config import describe
from kvcli.models.hub_names import DEFAULTS, ID, hub_id, select, shards
from kvcli.models.refusals import refuse
from kvcli.settings.small_file import Unfit, open_regular, parse_object, read_small

# Models of the Hugging Face hub: the local cache, and downloads into it.

_CACHED = "models--"  # prefix of a model's folder in the cache, whose / is written --
_DOWNLOAD = ["model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md"]


def cached(name: str, file: str, revision: str | None, at: str, offline: bool) -> tuple[Path, str]:
    """Snapshot folder of a hub id in the cache, or the file in it that `file` selects, and its commit, without network
    access."""
    if not isdir(cached_folder(name)):  # before half a second of imports
        raise _not_cached(name, at, offline)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # no pattern: the library would miss files that nobody asked for, and ours are checked below
        path = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except HFValidationError as error:
        raise _no_name(name, error) from error
    except LocalEntryNotFoundError as error:
        raise _not_cached(name, at, offline) from error
    if file:
        try:
            return path / select((f.relative_to(path).as_posix() for f in path.rglob("*.gguf")), file, at), path.name
        except BadModel as error:
            if error.code != "model_not_found":
                raise
            raise _not_cached(name, at, offline) from error
    return path, path.name


def _not_cached(name: str, at: str, offline: bool) -> BadModel:
    is_id = ID.fullmatch(name) is not None
    return BadModel(
        f"{at} is neither a folder nor in the Hugging Face cache",
        code="model_not_found",
        lines=["offline: the network was not used"] if offline else [] if is_id else ["a hub id is OWNER/NAME"],
        try_=["kvcli models list", f"kvcli models get {at}" if is_id else "kvcli models suggest", "a folder: ./NAME"],
    )


def _no_name(name: str, error: Exception) -> BadModel:
    why = f"{name} is neither a folder nor a hub id"
    return BadModel(why, code="model_name", lines=[str(error)], try_=["kvcli models list"])


def download(name: str, file: str, revision: str | None, at: str) -> tuple[Path, str]:
    """Download the snapshot of a hub id, or the GGUF model that `file` selects; return its path and commit.

    Of a repository with GGUF files alone, one model is downloaded. Raises BadModel.
    """
    listed = _listed(name, revision, at)
    has_others = any(f.endswith((".safetensors", ".bin")) for f in listed)
    if file or (not has_others and any(f.endswith(".gguf") for f in listed)):
        file = select(listed, file, at)
    path = _fetched(name, revision, at, shards(file) if file else _DOWNLOAD)
    return path / file, path.name


def _listed(name: str, revision: str | None, at: str) -> list[str]:
    """Return the names of the files of a repository on the hub. Raises BadModel."""
    from huggingface_hub import HfApi

    with _hub_errors(name, at):
        return [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()]


def headers(name: str, revision: str | None, at: str) -> tuple[Path, str, tuple[WeightFile, ...]]:
    """Download all but the weights, and return the headers of the weights. Raises BadModel."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    path = _fetched(name, revision, at, [pattern for pattern in _DOWNLOAD if "safetensors" not in pattern])
    try:
        found = HfApi().get_safetensors_metadata(name, revision=path.name).files_metadata
    except (NotASafetensorsRepoError, SafetensorsParsingError, HfHubHTTPError) as error:
        raise BadModel(
            f"{at} has no weights whose headers can be read",
            code="model_incomplete",
            lines=[_first(error)],
            try_=[f"kvcli models get {name}, then kvcli models check {name}"],
        ) from error
    except _wire() as error:
        raise _no_network(f"the headers of {at} are not on this machine", error) from error
    return path, path.name, tuple(_announced(path / file, one.tensors.items()) for file, one in sorted(found.items()))


def _announced(file: Path, tensors: Iterable[tuple[str, Any]]) -> WeightFile:
    sizes = {n: TensorHeader(t.dtype, tuple(t.shape), t.data_offsets[1] - t.data_offsets[0]) for n, t in tensors}
    return WeightFile(file, sum(t.nbytes for t in sizes.values()), sizes)


def _fetched(name: str, revision: str | None, at: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name, at):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


@contextmanager
def _hub_errors(name: str, at: str) -> Iterator[None]:
    """Raise errors of the hub's library, of the network and of the disk as BadModel."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise _no_name(name, error) from error
    # the errors of the hub's library for a failed connection, and for HF_HUB_OFFLINE
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise _no_network(f"{at} is not on this machine", error) from error
    except (HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the hub
            with writing(f"{at} into {_cache()}"):
                raise
        raise BadModel(
            f"{at} could not be downloaded",
            code="model_not_found",
            lines=[_first(error)],
            try_=["check the name at huggingface.co", f"hf auth login, then hf download {name}"],
        ) from error
    except _wire() as error:
        raise _no_network(f"{at} is not on this machine", error) from error


def _no_network(why: str, error: Exception) -> BadModel:
    return BadModel(
        f"no network: {why}, and huggingface.co cannot be reached",
        code="no_network",
        lines=[_first(error.__cause__ or error)],
        try_=["kvcli models list shows what is here", "a folder: ./NAME"],
    )


def _wire() -> tuple[type[Exception], ...]:
    """Exceptions of a failed connection, whichever HTTP client the hub's library uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(kind for kind in HfHubHTTPError.__mro__[1:] if issubclass(kind, Exception) and kind is not Exception)


def _first(error: BaseException) -> str:
    """First line of the error's message, or its class name if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def verify(name: str, revision: str) -> None:
    """Compare the downloaded files of a hub id with the hub's checksums. Raises BadModel."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        seen = HfApi().verify_repo_checksums(name.partition(":")[0], revision=revision)
    except (HfHubHTTPError, OSError) as error:
        raise _no_network(f"{name} cannot be verified by its checksums", error) from error
    wrong = seen.mismatches
    for file in [seen.verified_path / one["path"] for one in wrong]:
        # the file that the cache's link points to; the next download replaces it
        file.resolve().unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    if wrong:
        raise BadModel(
            f"{wrong[0]['path']} of {name} has the wrong checksum and was deleted",
            code="wrong_hash",
            lines=[f"found {wrong[0]['actual']}", f"expected {wrong[0]['expected']}"],
            try_=["again: the download may have been cut"],
        )


def may_fetch(name: str, error: BadModel) -> bool:
    """True if a model not found locally may be on the hub."""
    return error.code in ("model_not_found", "model_incomplete") and ID.fullmatch(name) is not None


def cached_ids() -> list[str]:
    """Ids of models in the Hugging Face cache, complete or not, sorted."""
    return sorted(folder.name.removeprefix(_CACHED).replace("--", "/") for folder in _cache().glob(f"{_CACHED}*"))


def cached_folder(id: str) -> Path:
    """Folder of a model in the cache, whether it exists or not."""
    return _cache() / f"{_CACHED}{id.replace('/', '--')}"


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE  # reads the environment, imports nothing large

    return Path(HF_HUB_CACHE)


# Settings of a model: config.json and similar files, read with a size limit.

Config = dict[str, Any]

CONFIG = 4 << 20  # bytes; the longest lists are layer types and layers that are not quantized


def read_config(path: Path, name: str) -> Config:
    """Read config.json of a model folder. Raises BadModel with line and column."""
    file = path / "config.json"
    if not lexists(file):
        lines = [f"looked for {file}"]
        if exists(path / "adapter_config.json"):
            lines.append("adapter_config.json is there: this is an adapter; load its base model with --adapter FOLDER")
        lines += unread(path)
        others = [f"{name}:FILE.gguf, if it is a repository of GGUF files"] if ID.fullmatch(name) else []
        raise BadModel(f"{name} has no config.json", code="model_incomplete", lines=lines, try_=[*others, f"ls {path}"])
    config = read_json(file, name)
    if not isinstance(config.get("model_type"), str):
        raise BadModel(
            f"config.json of {name} names no model_type",
            code="model_corrupt",
            lines=[f"in {file}", "without it the architecture is unknown"],
            try_=["download config.json again"],
        )
    return config


def text_config(config: Config) -> Config:
    """Return the settings of the text decoder inside `config`, or `config` itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def read_json(file: Path, name: str, most: int = CONFIG) -> Config:
    """Read the JSON object of a file of at most `most` bytes. Raises BadModel with line and column."""
    try:
        return parse_object(read_small(file, most))
    except Unfit as error:
        raise BadModel(
            f"{file.name} of {name} {str(error).partition(':')[0]}",
            code="model_corrupt",
            lines=[f"{file}: {error}"],
            try_=[f"download {file.name} again"],
        ) from error


def unread(path: Path) -> list[str]:
    """Describe the weight files of a folder that transformers does not load."""
    other = sorted(f.name for f in path.glob("*.safetensors"))
    return [f"found {', '.join(other[:3])}, which transformers does not look for"] if other else []


# Weight files of a model folder: one file, or several shards with an index, checked by their headers.

INDEX = 32 << 20  # bytes, enough for half a million tensors


def weights(path: Path, name: str, allow_pickle: bool, drafts: bool) -> tuple[tuple[WeightFile, ...], bool]:
    """Return every weight file that transformers will read, checked, and True if they are pickles (`drafts`: never)."""
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
                try_=["look for a safetensors copy of the model", "--allow-pickle, if you trust it"][: 2 - drafts],
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


_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json", "tokeniz*.py", "*vocab.json")


@dataclass(frozen=True, slots=True)
class Source:
    """A model on disk with all its files present."""

    id: str  # the name that the user typed
    path: Path
    revision: str  # commit on the hub, "" for a folder
    config: Config
    files: tuple[WeightFile, ...]
    is_pickle: bool
    is_gguf: bool = False  # `path` is the GGUF file, and `config` is built from its metadata
    made_of: tuple[Path, ...] = ()  # the GGUF file that a folder was converted from

    @property
    def family(self) -> str:
        return str(self.config["model_type"])[:64]  # untrusted, perhaps a page long

    @property
    def text_config(self) -> Config:
        """Settings of the text decoder: nested in `text_config` if the checkpoint also has a vision part."""
        return text_config(self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(f.nbytes for f in self.files)

    @property
    def parameters(self) -> int:
        """Weights of the loaded model, however its files pack them; 0 if unknown."""
        packing = CheckpointFormat.of(self.config)
        return sum(packing.weights(name, t.dtype, t.shape) for f in self.files for name, t in f.tensors.items())

    @property
    def has_words(self) -> bool:
        """True if the folder has a vocabulary, in a file or in code that makes one."""
        return self.is_gguf or any(file.match(pattern) for file in self.path.iterdir() for pattern in _VOCABULARIES)

    @property
    def dtype(self) -> str:
        """The dtype of most bytes, in safetensors' spelling; "" if unknown."""
        held: Counter[str] = Counter()
        for file in self.files:
            for t in file.tensors.values():
                held[t.dtype] += t.nbytes
        return held.most_common(1)[0][0] if held else ""


def find(
    name: str,
    *,
    offline: bool = False,
    revision: str | None = None,
    demo_dir: Path | None = None,
    allow_pickle: bool = False,
    tell: Callable[[str], None] | None = None,
    may_assist: bool = False,
) -> Source:
    """Find a bundled model, a folder, a GGUF file or a hub id, and check every file.

    A hub id is looked up in the local cache. It is downloaded only if `offline` is false and `tell` is given, so a
    library call without `tell` stays off the network. A name without an owner is never looked up on the hub, because it
    is far more often a typing error than one of the few models without an owner. `may_assist`: accept a draft
    head that kvcli drafts with too.
    """
    if not exists(expanduser(name)):
        name = hub_id(name)
    at = f"{name} at {revision}" if revision else name
    if name in BUNDLED:
        return _checked(name, _bundled(name, demo_dir), "", allow_pickle, may_assist)
    if name and exists(expanduser(name)):
        return _checked(name, Path(expanduser(name)), "", allow_pickle, may_assist)
    if not re.fullmatch(r"[\w-][\w.-]*", name) and not ID.fullmatch(name):
        raise BadModel(
            f"{name[:80] or 'a model without a name'} does not exist",
            code="model_not_found",
            try_=["kvcli models list", "OWNER/NAME, or the folder that holds config.json, or a GGUF file"],
        )
    repo, _, file = name.partition(":")
    try:
        return _checked(name, *cached(repo, file, revision, at, offline), allow_pickle, may_assist)
    except BadModel as error:
        if offline or tell is None or not may_fetch(name, error):
            raise
        where = "not in the cache" if error.code == "model_not_found" else "in the cache only in part"
    tell(f"{at} is {where}: downloading it from huggingface.co")
    return _checked(name, *download(repo, file, revision, at), allow_pickle, may_assist)


def look_up(name: str, revision: str | None = None) -> Source:
    """Read the headers of a hub model: config and vocabulary are downloaded, weights are not."""
    if ":" in name:
        raise BadModel(
            f"{name} is a GGUF file on the hub, which must be downloaded first",
            code="model_not_found",
            try_=[f"kvcli models get {name}, then kvcli models check {name}"],
        )
    path, commit, files = headers(name, revision, f"{name} at {revision}" if revision else name)
    config = read_config(path, name)
    _refuse(config, name, path)
    hold(config, text_config(config), files, name)
    return Source(name, path, commit, config, files, is_pickle=False)


def _checked(name: str, path: Path, commit: str, allow_pickle: bool, may_assist: bool) -> Source:
    if file := _only_gguf(path, name, DEFAULTS if commit else ()) if path.is_dir() else path:
        return _checked_gguf(name, file, commit)
    config = read_config(path, name)
    _refuse(config, name, path, may_assist=may_assist)
    files, is_pickle = weights(path, name, allow_pickle, drafts=may_assist)
    hold(config, text_config(config), files, name)
    if lexists(path / "generation_config.json"):  # transformers continues without a file that it cannot read
        read_json(path / "generation_config.json", name)
    return Source(name, path, commit, config, files, is_pickle)


def _checked_gguf(name: str, path: Path, commit: str) -> Source:
    if not header.is_gguf(path):
        raise BadModel(
            f"{name} is a file; a model is a folder with config.json and *.safetensors, or one GGUF file",
            code="model_not_found",
            try_=[f"kvcli chat {path.parent}"],
        )
    found = header.read(path)
    said = describe(found, name)
    _refuse(said.config, name, path)
    others = (WeightFile(one.path, one.size, {}) for one in found.others)
    files = (WeightFile(found.path, found.size, said.tensors(found)), *others)  # the first holds all their headers
    hold(said.config, said.config, files, name)
    return Source(name, found.path, commit, said.config, files, is_pickle=False, is_gguf=True)


def _refuse(config: Config, name: str, path: Path, *, may_assist: bool = False) -> None:
    try:
        refuse(config, name, may_assist=may_assist)
    except (TypeError, AttributeError, LookupError) as error:
        raise BadModel(
            f"config.json of {name} has a setting of the wrong type",
            code="model_corrupt",
            lines=[f"in {path / 'config.json'}: {error}"],
            try_=["download config.json again"],
        ) from error


def _only_gguf(path: Path, name: str, defaults: Sequence[str]) -> Path | None:
    """Return the GGUF file of a folder without other weights, by `defaults` if it holds several models."""
    files = [file.name for file in path.iterdir() if file.suffix.lower() == ".gguf"]
    if not files or any(any(path.glob(other)) for other in ("model*.safetensors*", "pytorch_model*.bin*")):
        return None
    try:
        return path / select(files, "", name, defaults)
    except BadModel as error:
        if not ID.fullmatch(name):
            error.try_ = (str(path / min(files)),)
        raise


# ---- locations ----


def _bundled(name: str, demo_dir: Path | None) -> Path:
    demo_dir = demo_dir or weights_dir(name)
    if not (demo_dir / "config.json").exists():
        raise BadModel(
            "the bundled demo model is missing from this installation",
            code="model_not_found",
            lines=[f"looked in {demo_dir}"],
            try_=["install kvcli again"],
        )
    return demo_dir
