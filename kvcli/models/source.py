"""Model files: find them and check them before anything heavy is loaded. Standard library only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from os.path import exists, expanduser, lexists  # unlike Path's methods, False for an impossible name
from pathlib import Path

from kvcli.demo import BUNDLED, weights_dir
from kvcli.errors import BadModel
from kvcli.models import hub
from kvcli.models.checkpoint_format import CheckpointFormat
from kvcli.models.config_file import Config, read_config, read_json, text_config
from kvcli.models.gguf import header
from kvcli.models.gguf.config import describe
from kvcli.models.headers import WeightFile
from kvcli.models.refusals import refuse
from kvcli.models.shards import weights
from kvcli.models.sizes import hold

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
    is far more often a typing error than one of the few models without an owner. `may_assist`: accept a Gemma 4
    assistant too.
    """
    at = f"{name} at {revision}" if revision else name
    if name in BUNDLED:
        return _checked(name, _bundled(name, demo_dir), "", allow_pickle, may_assist)
    if name and exists(expanduser(name)):
        return _checked(name, Path(expanduser(name)), "", allow_pickle, may_assist)
    if not re.fullmatch(r"[\w-][\w.-]*", name) and not hub.ID.fullmatch(name):
        raise BadModel(
            f"{name[:80] or 'a model without a name'} does not exist",
            code="model_not_found",
            try_=["kvcli models list", "give the folder that holds config.json, or a GGUF file"],
        )
    repo, _, file = name.partition(":")
    try:
        return _checked(name, *hub.cached(repo, file, revision, at, offline), allow_pickle, may_assist)
    except BadModel as error:
        if offline or tell is None or not hub.may_fetch(name, error):
            raise
        where = "not in the cache" if error.code == "model_not_found" else "in the cache only in part"
    tell(f"{at} is {where}: downloading it from huggingface.co")
    return _checked(name, *hub.download(repo, file, revision, at), allow_pickle, may_assist)


def look_up(name: str, revision: str | None = None) -> Source:
    """Read the headers of a hub model: config and vocabulary are downloaded, weights are not."""
    if ":" in name:
        raise BadModel(
            f"{name} is a GGUF file on the hub, which must be downloaded first",
            code="model_not_found",
            try_=[f"kvcli models get {name}, then kvcli models check {name}"],
        )
    path, commit, files = hub.headers(name, revision, f"{name} at {revision}" if revision else name)
    config = read_config(path, name)
    _refuse(config, name, path)
    hold(config, text_config(config), files, name)
    return Source(name, path, commit, config, files, is_pickle=False)


def _checked(name: str, path: Path, commit: str, allow_pickle: bool, may_assist: bool) -> Source:
    if file := _only_gguf(path, name) if path.is_dir() else path:
        return _checked_gguf(name, file, commit)
    config = read_config(path, name)
    _refuse(config, name, path, may_assist=may_assist)
    files, is_pickle = weights(path, name, allow_pickle)
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
    files = (WeightFile(path, found.size, said.tensors(found)),)
    hold(said.config, said.config, files, name)
    return Source(name, path, commit, said.config, files, is_pickle=False, is_gguf=True)


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


def _only_gguf(path: Path, name: str) -> Path | None:
    """Return the GGUF file of a folder with exactly one and no other weights."""
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if not files or any(any(path.glob(other)) for other in ("model*.safetensors*", "pytorch_model*.bin*")):
        return None
    if len(files) > 1:
        raise BadModel(
            f"{name} holds {len(files)} GGUF files, and a model is one file",
            code="gguf_several",
            lines=[f.name for f in files[:8]],
            try_=[f"{name}:{files[0].name}" if hub.ID.fullmatch(name) else f"{path / files[0].name}"],
        )
    return files[0]


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
