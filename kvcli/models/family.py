"""Model family: the config and model classes of transformers for a model's config.json."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Any

from kvcli.errors import BadModel
from kvcli.installing import pip
from kvcli.models.checkpoint import INSTEAD, CheckpointFormat
from kvcli.models.refusals import blame_files
from kvcli.models.source import Source

_SENSING = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
)  # the second exists in newer releases only


def read_config(source: Source, trust_remote_code: bool) -> Any:
    """Load the config of a family that transformers has or, if trusted, of the model's own code. Raises BadModel."""
    import transformers

    family = source.family
    known = set(transformers.CONFIG_MAPPING)
    remote = bool(source.config.get("auto_map"))
    if family not in known and remote and not trust_remote_code:
        raise BadModel(
            f"{source.id} ({family}) needs Python code from its folder, which is not allowed",
            code="model_remote_code",
            lines=["transformers lacks this architecture; the model's folder holds Python code for it"],
            try_=["read that code, then set load.trust_remote_code = true in your own config"],
        )
    if family not in known and not remote:
        near = get_close_matches(family, known, 1)
        raise BadModel(
            f"{source.id} has an unknown architecture: {family}",
            code="model_unsupported",
            lines=[f"transformers {transformers.__version__} knows {len(known)} others"],
            try_=[pip("-U", "transformers"), *([f'is model_type "{near[0]}"?'] if near else [])],
        )
    with blame_files(partial(unreadable, source, "its config.json does not fit its architecture")):
        config = transformers.AutoConfig.from_pretrained(
            source.path,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            num_labels=2,  # labels of a classifier; without a limit transformers builds as many as the file states
        )
        text = config.get_text_config()
    if not isinstance(text, transformers.PreTrainedConfig):
        raise unreadable(source, "its config.json does not fit its architecture", "its text_config is no table")
    return config


def loader_of(source: Source, config: Any, trust_remote_code: bool) -> Any:
    """Return the transformers class for text generation, without vision or audio parts. Raises BadModel."""
    import transformers

    auto, none = transformers.AutoModelForCausalLM, dict[type, Any]()
    if trust_remote_code and "AutoModelForCausalLM" in source.config.get("auto_map", {}):
        return auto
    mappings = [getattr(transformers, name, none) for name in ("MODEL_FOR_CAUSAL_LM_MAPPING", *_SENSING)]
    kinds = [known[type(config)] for known in mappings if type(config) in known]
    if not kinds:
        raise BadModel(
            f"{source.id} ({source.family}) is not a causal language model",
            code="model_unsupported",
            lines=["transformers has no text generation class for that architecture"],
            try_=["docs/models.md lists what runs"],
        )
    kind = kinds[0][0] if isinstance(kinds[0], tuple) else kinds[0]
    if type(config) in mappings[0] and getattr(kind, "config_class", None) is not type(config):
        return auto  # it passes the text part of the config to a text model's class
    towers = {type(part) for part in _senses(config)} - {type(config.get_text_config())}
    return _without(kind, towers) if towers else kind


def refuse_unknown_packing(source: Source, packing: CheckpointFormat) -> None:
    """Raise BadModel for a format that transformers would load as unquantized: numbers without their scales."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {name.removesuffix("_4bit") for name in AUTO_QUANTIZER_MAPPING}
    if packing.method and packing.method not in known:
        raise BadModel(
            f"{source.id} is quantized as {packing.method}, which transformers cannot load",
            code="model_unsupported",
            lines=["quant_method in its config.json says so; no weights were loaded"],
            try_=[INSTEAD, pip("-U", "transformers")],
        )


def _senses(config: Any) -> list[Any]:
    """Configs of the vision and audio parts."""
    found = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}) if not key.startswith("text"))
    return [part for part in found if part is not None]


def _without(kind: Any, towers: set[type]) -> Any:
    """Subclass of `kind` without the parts of these configs. The parts are built on the meta device and removed before
    a file is read. Name and module are unchanged, because transformers maps checkpoint tensor names by them."""

    from transformers import PreTrainedModel

    def build(self: Any, config: Any, *more: Any, **named: Any) -> None:
        kind.__init__(self, config, *more, **named)
        for parent in list(self.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, PreTrainedModel) and type(part.config) in towers:
                    setattr(parent, name, None)

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def with_defaults(source: Source) -> dict[str, Any]:
    """Return the text part of config.json completed with the family's defaults. Raises BadModel."""
    config = read_config(source, trust_remote_code=False)
    with blame_files(partial(unreadable, source, "its config.json does not fit its architecture")):
        text = config.get_text_config()
        settings: dict[str, Any] = text.to_dict()
        # Nemotron-H derives it from a list of its layers, so it is no setting
        return {"num_hidden_layers": getattr(text, "num_hidden_layers", None)} | settings


def unreadable(source: Source, why: str, said: str) -> BadModel:
    """Return a BadModel. `said`: the error that a library raised about the model's files."""
    return BadModel(
        f"{source.id} ({source.family}) cannot be loaded: {why}",
        code="model_corrupt",
        lines=[said],
        try_=["check that config.json belongs to these weights", "download the model again"],
    )
