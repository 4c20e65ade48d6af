"""What transformers makes of a model's config.json."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.foreign import blamed
from kvcli.models.source import Source


def read_config(source: Source, trust_remote_code: bool) -> Any:
    """Of a family that transformers knows, or that brings its own code where that is trusted. Raises BadModel."""
    import transformers

    family = source.family
    known = set(transformers.CONFIG_MAPPING)
    remote = bool(source.config.get("auto_map"))
    if family not in known and remote and not trust_remote_code:
        raise BadModel(
            f"{source.id} ({family}) runs code of its own, which is off",
            code="model_remote_code",
            lines=["transformers has no such architecture; the model's folder brings Python code for it"],
            try_=["read that code, then set load.trust_remote_code = true in your own config"],
        )
    if family not in known and not remote:
        near = get_close_matches(family, known, 1)
        raise BadModel(
            f"{source.id} has an unknown architecture: {family}",
            code="model_unsupported",
            lines=[f"transformers {transformers.__version__} knows {len(known)} others"],
            try_=["pip install -U transformers", *([f'is model_type "{near[0]}"?'] if near else [])],
        )
    with blamed(partial(unreadable, source, "its config.json does not fit its architecture")):
        config = transformers.AutoConfig.from_pretrained(
            source.path,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            num_labels=2,  # of a classifier; transformers would name as many as the file says
        )
        text = config.get_text_config()
    if not isinstance(text, transformers.PreTrainedConfig):
        raise unreadable(source, "its config.json does not fit its architecture", "the text part is no table")
    return config


def with_defaults(source: Source) -> dict[str, Any]:
    """The text part of config.json with what the family's defaults say besides. Raises BadModel."""
    config = read_config(source, trust_remote_code=False)
    with blamed(partial(unreadable, source, "its config.json does not fit its architecture")):
        settings: dict[str, Any] = config.get_text_config().to_dict()
    return settings


def unreadable(source: Source, why: str, said: str) -> BadModel:
    """`said`: what a library raised about the model's files."""
    return BadModel(
        f"{source.id} ({source.family}) cannot be loaded: {why}",
        code="model_corrupt",
        lines=[said],
        try_=["check that config.json belongs to these weights", "download the model again"],
    )
