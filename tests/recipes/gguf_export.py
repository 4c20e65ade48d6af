"""Export of a model's weights as one GGUF file, so that llama.cpp can run them beside kvcli.

The file has numbers and no vocabulary: llama.cpp gets token ids. Its own converter must know every pre-tokenizer by
name and refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from kvcli.errors import BadModel
from kvcli.files import check_room, private_folder, replacing
from kvcli.models.catalog import Hashes, Stamped
from kvcli.models.family import read_config
from kvcli.models.gguf.architectures import HEAD, SETTINGS, Architecture, architectures, full_names
from kvcli.models.gguf.convert import FOLDER, KEPT, fingerprint, forget, use

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.models.source import Source

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# families of transformers that are exported for llama.cpp, which computes mistral as llama
_CLASSES = {one.model_type: one for classes in architectures().values() for one in classes}
WRITTEN = {name: _CLASSES["llama" if name == "mistral" else name] for name in ("llama", "mistral", "qwen2", "qwen3")}
VERSION = 1  # version of the output format; part of a file's name, so that a change makes new files


def export(found: Source, dtype: str, cache: Path, tell: Callable[[str], None] | None = None) -> Path:
    """Return the GGUF file of `found` in `dtype` (bfloat16, float16, float32), written below `cache` if it is missing.

    Raises BadModel for an architecture that llama.cpp computes differently or that cannot be exported.
    """
    config = read_config(found, trust_remote_code=False)
    if why := refusal(found, config):
        raise BadModel(
            f"llama.cpp cannot be compared on {found.id}: {why}",
            code="gguf_unsupported",
            try_=["leave --baseline llama.cpp out", "--baseline hf"],
        )
    files = [Stamped.of(file.path) for file in found.files]
    path = cache / FOLDER / f"{fingerprint(found, VERSION, Hashes(cache, tell))}-{dtype}.gguf"
    if path.exists():
        use(path)
        return path
    plan = list(_plan(found, config, WRITTEN[config.model_type]))
    need = sum(w.nbytes(DTYPES[dtype]) for w in plan)
    private_folder(path.parent)
    forget(path.parent, KEPT - 1)
    check_room(path.parent, need, f"the weights of {found.id} as GGUF")
    if tell is not None:
        tell(f"writing the weights of {found.id} as GGUF, {need / 1e6:,.0f} MB: {path}")
    with replacing(path) as file:
        _write(Path(file.name), config, plan, DTYPES[dtype])
        for each in files:
            each.check()
    return path


def refusal(found: Source, config: Any) -> str:
    """Reason why llama.cpp would compute something else than transformers; "" if it would not."""
    if found.family not in WRITTEN:
        return f"{found.family} is not one of {', '.join(WRITTEN)}"
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if found.is_pickle:
        return "its weights are pickle files"
    if "quantization_config" in found.config:
        return "its weights are quantized in a way that GGUF does not support"
    if getattr(config, "sliding_window", None) or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has sliding-window attention, which llama.cpp does not support for this architecture"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, llama.cpp's is silu"
    if kind == "longrope" or (kind not in ("default", "dynamic") and WRITTEN[found.family].stretches != "llama3"):
        return f"its rope is {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding covers only a part of each head"
    return ""


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of each head from (halves, pairs) to pairs: llama.cpp's RoPE rotates neighbouring numbers."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the GGUF file, and its source."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in the file: float32 for norms and biases, because llama.cpp computes with them in float32 only."""
        return torch.float32 if len(self.shape) == 1 else dtype

    def nbytes(self, dtype: torch.dtype) -> int:
        return torch.Size(self.shape).numel() * self.held(dtype).itemsize


def _plan(found: Source, config: Any, layout: Architecture) -> Iterator[_Weight]:
    where = {name: file for file in found.files for name in file.tensors}
    yield from _rope(config)
    groups = [(layout.outer, "", "")]
    groups += [(layout.layer, f"model.layers.{i}.", f"blk.{i}.") for i in range(config.num_hidden_layers)]
    for names, before, below in groups:
        for name, (piece,) in full_names(names):
            theirs, (part,) = before + name, piece.parts
            if (theirs not in where and piece.is_optional) or (theirs == HEAD and config.tie_word_embeddings):
                continue
            yield _weight(found, where, theirs, below + part.stored, getattr(config, str((*part.view, "")[0]), 0))
    # unused: the second copy of a tied head, and frequencies that are computed
    if rest := [name for name in where if name != HEAD and not name.endswith("rotary_emb.inv_freq")]:
        raise BadModel(
            f"llama.cpp cannot be compared on {found.id}: GGUF has no place for its tensor {rest[0]}",
            code="gguf_unsupported",
            try_=["leave --baseline llama.cpp out"],
        )


def _weight(found: Source, where: dict[str, Any], theirs: str, ours: str, heads: int) -> _Weight:
    if theirs not in where:
        raise BadModel(f"{found.id} has no tensor {theirs}", code="gguf_unsupported")
    file = where.pop(theirs)
    return _Weight(ours, file.tensors[theirs].shape, _loader(file.path, theirs, heads))


def _loader(file: Path, name: str, heads: int) -> Callable[[], Tensor]:
    def load() -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            read: Tensor = tensors.get_tensor(name)
        return permuted(read, heads) if heads else read

    return load


def _rope(config: Any) -> Iterator[_Weight]:
    """Frequency divisors of scaled RoPE. They come from transformers' own formula, so any fixed scaling works."""
    # for kvcli, dynamic RoPE ends where it equals the default
    if config.rope_parameters["rope_type"] in ("default", "dynamic"):
        return
    stretched, _ = _frequencies(config)
    dim = 2 * len(stretched)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factors = (plain / stretched.double()).float()
    yield _Weight("rope_freqs.weight", tuple(factors.shape), lambda: factors)


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """RoPE frequencies [D / 2], and the scale of the rotation."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)


def _write(file: Path, config: Any, plan: list[_Weight], dtype: torch.dtype) -> None:
    import gguf

    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    writer = gguf.GGUFWriter(file, WRITTEN[config.model_type].arch)
    for key, value in _settings(config, plan, dtype).items():
        put = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        put(key, value)
    for weight in plan:
        held = weight.held(dtype)
        kind = gguf.GGMLQuantizationType[kinds[held]]
        writer.add_tensor_info(weight.name, weight.shape, None, weight.nbytes(dtype), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in plan:
            # converted to the run's dtype even if stored in float32, because every side computes with those numbers
            numbers = weight.load() if weight.name == "rope_freqs.weight" else weight.load().to(dtype)
            writer.write_tensor_data(numbers.to(weight.held(dtype)).contiguous().view(torch.uint8).numpy())
    finally:
        writer.close()


def _settings(config: Any, plan: list[_Weight], dtype: torch.dtype) -> Mapping[str, str | float | int]:
    """Metadata that llama.cpp reads."""
    arch = WRITTEN[config.model_type].arch
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    vocab = next(w.shape[0] for w in plan if w.name == "token_embd.weight")
    said: dict[str, str | float | int] = {
        "general.file_type": {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}[dtype],
        "tokenizer.ggml.model": "no_vocab",
        f"{arch}.vocab_size": vocab,
        **{f"{arch}.{ours}": int(getattr(config, theirs, None) or head) for ours, theirs in SETTINGS.items()},
        f"{arch}.attention.value_length": int(head),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": int(head),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if any(w.name == "rope_freqs.weight" for w in plan):
        said[f"{arch}.rope.scaling.attn_factor"] = _frequencies(config)[1]
    return said
