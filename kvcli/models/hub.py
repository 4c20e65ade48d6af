"""Models of the Hugging Face hub: the local cache, and downloads into it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from os.path import exists, isdir  # unlike Path's methods, False for an impossible name
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel, writing
from kvcli.models.headers import TensorHeader, WeightFile

# hub id: OWNER/NAME, or OWNER/NAME:FILE.gguf for one of its files
ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(:(?P<file>(?!.*\.\.)[\w-][\w./-]*\.gguf))?")
_CACHED = "models--"  # prefix of a model's folder in the cache, whose / is written --
_DOWNLOAD = ["model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md"]


def cached(name: str, file: str, revision: str | None, at: str, offline: bool) -> tuple[Path, str]:
    """Snapshot folder of a hub id in the cache, or `file` in it, and its commit, without network access."""
    if not isdir(cached_folder(name)):  # before half a second of imports
        raise _not_cached(name, at, offline)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise _no_name(name, error) from error
    except LocalEntryNotFoundError as error:
        raise _not_cached(name, at, offline) from error
    if file and not exists(path / file):
        raise _not_cached(name, at, offline)
    return path / file, path.name


def _not_cached(name: str, at: str, offline: bool) -> BadModel:
    is_id = ID.fullmatch(name) is not None
    return BadModel(
        f"{at} is neither a folder nor in the Hugging Face cache",
        code="model_not_found",
        lines=["offline: the network was not used"] if offline else [] if is_id else ["a hub id is OWNER/NAME"],
        try_=["kvcli models list", f"hf download {name}", "a folder: ./NAME"],
    )


def _no_name(name: str, error: Exception) -> BadModel:
    why = f"{name} is neither a folder nor a hub id"
    return BadModel(why, code="model_name", lines=[str(error)], try_=["kvcli models list"])


def download(name: str, file: str, revision: str | None, at: str) -> tuple[Path, str]:
    """Download the snapshot of a hub id, or `file` of it; return its path and commit. Raises BadModel."""
    path = _fetched(name, revision, at, [file] if file else _DOWNLOAD)
    if file and not exists(path / file):
        raise BadModel(
            f"{name} has no file {file}", code="model_not_found", try_=["look for its name at huggingface.co"]
        )
    return path / file, path.name


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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise _no_name(name, error) from error
    except LocalEntryNotFoundError as error:  # the error of the hub's library for a failed connection
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
