"""Drafting layers and heads that come with a model, in its files or in separate files. Standard library only.

MTP layers (engine/drafting/mtp.py) and Gemma 4's assistants (engine/drafting/gemma4_assistant.py, separate files) are
used for drafting. Other heads need hidden states of several layers, which no drafter gets. An early exit has no weights
of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvcli.models.refusals import is_assistant
from kvcli.models.source import Source, read_json

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
# names that families use for the number of MTP layers
_MTP = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
# families whose MTP layers transformers builds, by text model type; it drops those of other families
_BUILT = {"bailing_hybrid", "deepseek_v3", "glm4_moe", "mellum", "step3p7"}
_BUILT |= {"qwen3_5_text", "qwen3_5_moe_text"}  # built because `_name_layers` configures them


def found_in(source: Source) -> list[str]:
    """Describe each way to draft with the model's own files, with its settings or the reason it is unused, as lines."""
    return [*_early_exit(source), *_mtp(source)]


def _early_exit(source: Source) -> list[str]:
    """Describe an early exit layer (LayerSkip, arXiv 2404.16710) named by `assistant_early_exit` in
    generation_config.json. This is a key of transformers' `generate`; no family's config.json has one."""
    file, layers = source.path / "generation_config.json", source.text_config.get("num_hidden_layers")
    stop = read_json(file, source.id).get("assistant_early_exit") if file.is_file() else None
    if not (isinstance(stop, int) and isinstance(layers, int) and 1 < stop < layers):
        return []
    use = f"--set spec.method=self --set spec.skip=early --set spec.skipped={(layers - stop) / (layers - 2):.3g}"
    return [f"early exit after {stop} of {layers} layers (generation_config.json): {use}"]


def has_mtp(source: Source) -> bool:
    """True if, by tensor names, the files contain the layers that `spec.method = "mtp"` needs."""
    return bool(_said(source) and _held(source) and _is_built(source))


def _mtp(source: Source) -> list[str]:
    said, held = _said(source), _held(source)
    kinds = f"{said} MTP layer{'s' if said > 1 else ''}" if said else "MTP layers"
    if not held:
        gone = "its files hold none of their tensors, as is usual for quantized copies"
        return [f"{kinds} in its config.json: {gone}"] if said and _is_built(source) else []
    about = f"{kinds} ({len(held)} tensors, {held[0]}, ...)"
    if has_mtp(source):
        return [f"{about}: --spec mtp{', which uses the first' if said > 1 else ''}"]
    kind = source.text_config.get("model_type", source.family)
    why = "its config.json does not say how many" if not said else f"transformers lacks them for {str(kind)[:64]}"
    return [f"{about}: not used, {why}"]


def _said(source: Source) -> int:
    """Number of MTP layers stated in the config."""
    return next((n for key in _MTP if type(n := source.text_config.get(key)) is int and n > 0), 0)


def _held(source: Source) -> list[str]:
    """Names of the tensors of the MTP layers."""
    layers = source.text_config.get("num_hidden_layers")
    return [name for file in source.files for name in file.tensors if is_of_mtp(name, layers)]


def is_of_mtp(name: str, layers: object) -> bool:
    """True if a tensor of this name belongs to an MTP layer of a model with so many other layers."""
    number = _LAYER.search(name)
    is_beyond = isinstance(layers, int) and number is not None and int(number[1]) >= layers
    return name.startswith("mtp.") or ".mtp." in name or is_beyond


def _is_built(source: Source) -> bool:
    kind = source.text_config.get("model_type", source.config.get("model_type"))
    return kind in _BUILT or f"{kind}_text" in _BUILT


def assistant_for(found: Source, here: Mapping[str, Source]) -> str:
    """Name of the smallest of these models that, by its config, may be this model's assistant; "" if none is."""
    of = found.text_config
    sizes = of.get("model_type"), of.get("hidden_size"), of.get("vocab_size")

    def sizes_of(one: Source) -> tuple[object, ...]:
        return (
            one.text_config.get("model_type"),
            one.config.get("backbone_hidden_size"),
            one.text_config.get("vocab_size"),
        )

    able = {name: one for name, one in here.items() if is_assistant(one.config) and sizes_of(one) == sizes}
    return min(able, key=lambda name: able[name].nbytes, default="")
