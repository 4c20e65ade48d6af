"""Check whether a model is supported, from a copy on the meta device: no memory is used and no weight is read."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.engine.hf import model_settings
from kvcli.engine.hf.model_probe import probed, quiet
from kvcli.engine.loading.weights import limit_to_files
from kvcli.errors import BadModel
from kvcli.models.checkpoint import CheckpointFormat, count, refuse_unpackable
from kvcli.models.family import loader_of, read_config, refuse_unknown_packing, unreadable
from kvcli.models.gguf import convert
from kvcli.models.refusals import blame_files
from kvcli.models.source import Source

_ATEN = torch.ops.aten
_NUMBER = (_ATEN._local_scalar_dense.default, _ATEN.item.default, _ATEN.is_nonzero.default)


def check_on_meta_device(source: Source, kind: str, trust_remote_code: bool) -> str:
    """Raise BadModel as loading on such a device would. Return "", or the check that is only possible after loading.

    The meta model answers everything that does not depend on values, such as the experts of a row.
    """
    if not source.is_gguf:
        return _examine(source, kind, trust_remote_code)
    with TemporaryDirectory() as folder:  # transformers reads a config only from a folder
        (Path(folder) / "config.json").write_text(json.dumps(source.config))
        return _examine(replace(source, path=Path(folder), is_gguf=False), kind, trust_remote_code)


def _examine(source: Source, kind: str, trust_remote_code: bool) -> str:
    with quiet():
        config = read_config(source, trust_remote_code)
        loader = loader_of(source, config, trust_remote_code)
        refuse_unpackable(source.id, source.config, kind)
        convert.register()
        refuse_unknown_packing(source, CheckpointFormat.of(source.config))
        model = _outline(source, config, loader)
        text = model.config.get_text_config()
        layers = count(getattr(text, "num_hidden_layers", None), "num_hidden_layers", source.id)
        try:
            with _Guesses():  # type: ignore[no-untyped-call]
                probed(model, layers, model_settings.context_limit(text, source.id)[0], source.id)
        except BadModel as error:
            if not any("meta" in line.lower() for line in error.lines):
                raise
            return "its attention is checked when it is loaded, because its code needs the values of tensors"
    return ""


class _Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fixed answers to questions about values of meta tensors: every value of the one row is true or 0, and no expert
    is selected."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[0] if args else None
        if isinstance(of, Tensor) and of.is_meta:
            if func in _NUMBER:
                return True if of.dtype is torch.bool else 0
            if func is _ATEN.nonzero.default:
                return of.new_empty((0, of.dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def _outline(source: Source, config: Any, loader: Any) -> Any:
    """Build the model on the meta device."""
    config._experts_implementation = "eager"  # grouped products check sizes that meta tensors do not have
    build = getattr(loader, "from_config", None) or loader._from_config  # of an Auto class, or of the model's own class
    why = "its config.json does not fit its architecture"
    with limit_to_files(source), blame_files(partial(unreadable, source, why)), torch.device("meta"):
        return build(config, attn_implementation="eager").eval()
