"""Conversion of a GGUF file to a folder in transformers' format, at the first load, stored in the cache.

The file is untrusted. The output is bounded by the sizes checked in its header. Its vocabulary is read by transformers
and compared with its embedding. Its chat template is copied as text, and rendered in the process that every model
uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import BadModel, writing
from kvcli.files import check_room, private_folder, replacing_folder
from kvcli.installing import pip
from kvcli.kernels import triton_support
from kvcli.kernels.linear import NativeWeight, WeightArena
from kvcli.kernels.linear_quantized import Codes, of_blocks
from kvcli.kernels.linear_quantized.formats import arrange_panels, arrange_scales
from kvcli.kernels.linear_skinny import of_packed
from kvcli.kernels.linear_skinny.module import FragmentWeight
from kvcli.kernels.moe_linear import why_not_grouped
from kvcli.kernels.moe_linear.tensor import Experts
from kvcli.models import source
from kvcli.models.catalog import Hashes, Stamped, releases
from kvcli.models.control_words import spelled
from kvcli.models.draft_heads import is_of_mtp
from kvcli.models.gguf.architectures import Piece
from kvcli.models.gguf.blocks import PACKED, Bytes, packed_bytes, packed_sizes, stays_packed
from kvcli.models.gguf.config import Described, describe
from kvcli.models.gguf.header import BLOCKS, Header, read
from kvcli.models.gguf.pieces import raw_rows, values
from kvcli.models.gguf.words import splits
from kvcli.models.refusals import blame_files, no_tokenizer
from kvcli.models.sampling import sampling_of
from kvcli.models.source import Source
from kvcli.settings.schema import NUMBERS

# Quantizer for transformers: weights stay quantized while transformers loads them, by its quantizer interface.
#
# A checkpoint that says `quant_method: kvcli` has, in place of each weight that it names with its type and shape, the
# bytes of `kvcli.kernels.linear_quantized.of_blocks`. transformers loads and ties them like any other tensor.

METHOD = "kvcli"


@cache
def register() -> None:
    """Register the quantizer, once in a process."""
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class GGUFConfig(QuantizationConfigMixin):  # type: ignore[misc]  # Any to mypy, as all of transformers
        def __init__(self, weights: dict[str, Any] | None = None, **other: Any) -> None:
            self.quant_method, self.weights = METHOD, weights or {}

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):  # type: ignore[misc]  # the same
        is_trainable = False

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            expect_(model, kept_in(model.config, self.quantization_config))


def kept_in(config: Any, stated: Any, *, of_mtp: bool = False) -> dict[str, Any]:
    """Return type and shape of the weights that stay quantized, of a model with these settings or of its MTP layers."""
    names = stated.weights if getattr(stated, "quant_method", "") == METHOD else {}
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    return {name: how for name, how in names.items() if is_of_mtp(name, layers) == of_mtp}


def expect_(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Make room for the bytes of weights in place of their numbers, in a model that is not loaded yet."""
    for name, (kind, *shape) in weights.items():
        path, _, own = name.rpartition(".")
        module, of_experts = model.get_submodule(path), len(shape) == 3
        if not of_experts and type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            raise TypeError(f"{name} is quantized in the file, but is no linear layer or embedding")
        there = list(getattr(module, own).shape)
        if shape != there and not (of_experts and sorted(shape) == sorted(there)):
            raise ValueError(f"{name} is {shape} in the file, and {there} in the model")
        blob = torch.empty(packed_bytes(kind, shape), dtype=torch.uint8, device="meta")
        setattr(module, own, nn.Parameter(blob, requires_grad=False))


@torch.no_grad()
def attach_(
    model: Any, weights: Mapping[str, Any], device: torch.device, done_with: Callable[[Tensor], object]
) -> None:
    """Replace the loaded bytes of quantized weights by layers that multiply them on `device`, one at a time. Of the
    model all else stays where it is.

    A head that is tied to the embedding shares its memory. `done_with` gets each old tensor.
    """
    room = WeightArena()
    users: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            users.setdefault(id(module._parameters.get("weight")), []).append((parent, name, module))
    for full, (kind, *shape) in weights.items():
        old = model.get_parameter(full)
        is_skinny = not triton_support.why_not(device, model.dtype)
        blob = torch.empty_like(old, device=device) if is_skinny else room.empty((old.nbytes // 4,)).view(torch.uint8)
        blob.copy_(old)
        weight = of_blocks(blob, PACKED[kind].format, (prod(shape[:-1]), shape[-1]))
        form = FragmentWeight(of_packed(weight), range(weight.shape[0])) if is_skinny else weight
        path, _, own = full.rpartition(".")
        if len(shape) == 3:
            module = model.get_submodule(path)
            setattr(module, own, experts_of(module, own, Codes.split(weight, shape[0]), model.dtype))
        for parent, name, module in users.pop(id(old), ()):
            if isinstance(module, nn.Linear):
                setattr(parent, name, form.layer(module.bias, model.dtype))
            else:
                module.weight = nn.Parameter(NativeWeight(form, weight.shape, model.dtype), requires_grad=False)
        done_with(old)


def experts_of(module: nn.Module, name: str, codes: Codes, dtype: torch.dtype) -> nn.Parameter:
    """Return a module's weights of experts, as numbers unless transformers multiplies them in groups."""
    is_turned = not getattr(module, "is_transposed", False)
    n, k = codes.like.shape
    made = Experts(codes, torch.Size((len(codes), n, k) if is_turned else (len(codes), k, n)), dtype, is_turned)
    return nn.Parameter(made.plain() if why_not_grouped(module) else made, requires_grad=False)


# Cache of models converted to another format. Copies are named by a hash of their source; the oldest are removed.

FOLDER = "gguf"  # folder below the cache
KEPT = 4  # copies, the most recently used


def fingerprint(found: Source, version: int, hashes: Hashes) -> str:
    """Hash of the weights' bytes, the config and the version of the converting code."""
    import tokenizers

    files = [Stamped.of(file.path) for file in found.files]
    made_by = [version, tokenizers.__version__, *releases().values()]
    identity = json.dumps([hashes.of(files), found.config, made_by], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def use(copy: Path) -> None:
    """Mark a copy as used now, also on disks that do not record access."""
    file = copy / "config.json" if copy.is_dir() else copy
    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def forget(folder: Path, keep: int) -> None:
    """Remove all but the `keep` most recently used copies, because each is as large as its model."""
    copies = sorted(folder.glob("[!.]*"), key=_used)
    for copy in copies[: max(0, len(copies) - keep)]:
        with suppress(OSError):  # on Windows, a copy open in another process cannot be removed
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def _used(copy: Path) -> int:
    file = copy / "config.json" if copy.is_dir() else copy
    return file.stat().st_atime_ns if file.exists() else 0


VERSION = 6  # version of the output format
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}  # torch's name, safetensors' name


def convert_if_needed(
    found: Source, dtype: str, cache: Path, *, keeps_on: str, tell: Callable[[str], None] | None = None
) -> Source:
    """Return the model as a folder, weights in `dtype` (auto, bf16, ...). Blocks remain quantized as far as a device of
    the kind `keeps_on` multiplies them; "" = none do.

    A source that is no GGUF file is returned unchanged.
    """
    if not found.is_gguf:
        return found
    dtype = NUMBERS.get(dtype, str(found.config["dtype"]))
    file = Stamped.of(found.path)
    header = read(found.path)
    described = describe(header, found.id)
    plan = list(_plan(header, described, dtype, keeps_on))
    name = fingerprint(found, VERSION, Hashes(cache, tell))
    form = "-packed" * any(out.packed for out in plan) + f"-{keeps_on}" * any(out.is_apart for out in plan)
    folder = cache / FOLDER / f"{name}-{dtype}{form}"
    if not folder.exists():
        _make(folder, found, file, header, described, plan, dtype, tell)
    use(folder)
    return replace(
        source.find(str(folder)), id=found.id, revision=found.revision, made_of=tuple(file.path for file in found.files)
    )


def conversion_notes(found: Source, dtype: str, *, keeps_on: str) -> tuple[str, ...]:
    """Notes on the tensors of a file that stay quantized, as in `convert_if_needed`, and those that were dequantized;
    for a GPU with their bytes, because codes of 5 and 6 bits take 8 there."""
    if not found.is_gguf:
        return ()
    tensors = {name: t for file in found.files for name, t in file.tensors.items()}
    sizes = packed_sizes(tensors, keeps_on)
    on_gpu, number, notes = keeps_on == "cuda", getattr(torch, dtype).itemsize, list[str]()
    for keeps in (True, False):
        held = {name: t for name, t in tensors.items() if t.dtype in BLOCKS and (name in sizes) == keeps}
        here = sum(sizes.get(name, prod(t.shape) * number) for name, t in held.items())
        kept = "GGUF tensors that stay quantized" if on_gpu else "GGUF tensors that run in the file's bits"
        what = kept if keeps else f"GGUF tensors converted to {dtype}"
        each = ", ".join(f"{n} {of}" for of, n in sorted(Counter(t.dtype for t in held.values()).items()))
        size = f"; {sum(t.nbytes for t in held.values()) >> 20:,} MiB in the file, {here >> 20:,} MiB on the GPU"
        notes += [f"{what}: {each}{size if on_gpu else ''}"] * bool(held)
    return tuple(notes)


def _make(
    folder: Path,
    found: Source,
    file: Stamped,
    header: Header,
    described: Described,
    plan: Sequence[_Out],
    dtype: str,
    tell: Callable[[str], None] | None,
) -> None:
    need = sum(out.nbytes for out in plan)
    private_folder(folder.parent)
    forget(folder.parent, KEPT - 1)
    check_room(folder.parent, need, f"unpacking {found.id}")
    if tell is not None:
        tell(f"converting {found.id} for first use ({need / 1e6:,.0f} MB, saved in {folder})")
    config = {**described.config, "dtype": dtype}
    if weights := {out.name: out.packed for out in plan if out.packed}:
        config["quantization_config"] = {"quant_method": METHOD, "weights": weights}
    with writing(folder, try_=["df -h"]), replacing_folder(folder) as made:
        ends = _write_words(made, found, header, described)
        (made / "config.json").write_text(json.dumps(config))
        settings = ({"eos_token_id": ends} if ends else {}) | sampling_of(header, found.id)
        (made / "generation_config.json").write_text(json.dumps(settings))
        _write_weights(made / "model.safetensors", plan)
        file.check()


# ---- weights ----


@dataclass(frozen=True, slots=True)
class _Out:
    """A tensor of the folder, and the function that makes its bytes."""

    name: str
    kind: str  # in safetensors' spelling
    shape: tuple[int, ...]
    nbytes: int
    stretches: Callable[[], Iterator[Tensor]]
    packed: tuple[object, ...] = ()  # type and shape of a weight that stays quantized
    is_apart: bool = False  # it would stay quantized on a CPU


def _plan(header: Header, described: Described, dtype: str, keeps_on: str) -> Iterator[_Out]:
    number = getattr(torch, dtype)
    for name, tensor in described.tensors(header).items():
        rows = partial(raw_rows, header, described.pieces[name])
        if stays_packed(name, tensor, keeps_on):
            nbytes = packed_bytes(tensor.dtype, tensor.in_file)
            panels = partial(_panels, rows, tensor.dtype)
            yield _Out(name, "U8", (nbytes,), nbytes, panels, (tensor.dtype, *tensor.in_file))
        else:
            plain = partial(_numbers, header, described.pieces[name], number)
            nbytes, is_apart = (
                prod(tensor.shape) * number.itemsize,
                bool(keeps_on) and stays_packed(name, tensor, "cpu"),
            )
            yield _Out(name, _KINDS[dtype], tensor.shape, nbytes, plain, is_apart=is_apart)


def _numbers(header: Header, piece: Piece, dtype: torch.dtype) -> Iterator[Tensor]:
    return (part.to(dtype) for part in values(header, piece))


def _panels(rows: Callable[[], Iterator[Bytes]], kind: str) -> Iterator[Tensor]:
    """Codes of all panels, then scales of all panels."""
    of = PACKED[kind]
    yield from (arrange_panels(of.codes(raw), of.format.bits) for raw in rows())
    yield from (arrange_scales(of.scales(raw), of.format) for raw in rows())


def _write_weights(file: Path, plan: Sequence[_Out]) -> None:
    """Write a safetensors file in pieces; the library's own writer needs all tensors in memory at once."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for out in plan:
        entries[out.name] = {"dtype": out.kind, "shape": out.shape, "data_offsets": (at, at + out.nbytes)}
        at += out.nbytes
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for out in plan:
            for part in out.stretches():
                stream.write(part.contiguous().view(torch.uint8).numpy().data)


# ---- vocabulary ----


def _write_words(folder: Path, found: Source, header: Header, described: Described) -> list[int]:
    """Write the tokenizer and its chat template; return the stop tokens that the file states."""
    from transformers import PreTrainedTokenizerFast

    if find_spec("transformers.integrations.gguf") is None:  # before 5.23 it split text by GPT-2's rule in all cases
        raise BadModel(
            f"{found.id} is a GGUF file, and this transformers is too old to build its tokenizer",
            code="package_missing",
            try_=[pip("-U", "transformers")],
        )
    with blame_files(partial(_no_words, found)):
        # not by from_pretrained, because files in the same folder belong to other models
        tokenizer = PreTrainedTokenizerFast(
            name_or_path=str(header.path.parent), gguf_file=header.path.name, local_files_only=True
        )
        tokenizer.init_kwargs.pop("local_files_only", None)
        tokenizer.save_pretrained(folder)
        from transformers.integrations.gguf import get_gguf_tokenizer

        _, words, _ = get_gguf_tokenizer(str(header.path))
        most = _mend(folder / "tokenizer.json", described.split, words)
    if most >= described.config["vocab_size"]:
        raise _no_words(found, f"its token {most:,} has no embedding")
    tokens = [header.meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    return sorted({i for i in tokens if type(i) is int})


_CUT = {"type": "Split", "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _mend(file: Path, split: str, words: Mapping[str, Any]) -> int:
    """Correct the tokenizer where transformers ignores the file; return the largest id.

    The corrections are the splitting rule, a missing prefix space, and control words that a byte-level vocabulary does
    not spell in bytes: they get the file's ids.
    """
    made = json.loads(file.read_text(encoding="utf-8"))
    vocab, added = made["model"]["vocab"], {token["content"]: token for token in made["added_tokens"]}
    known = {i: word for word, i in vocab.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, (word, kind) in enumerate(zip(words["tokens"], words.get("token_type") or repeat(1), strict=False)):
        if word in added or (kind == 4 and word.strip()) or (spelled(word) and (kind == 3 or word[1] == "\uff5c")):
            added.setdefault(word, {"content": word, **flags, "special": kind != 4})["id"] = i
            if known.get(i) != word:
                vocab.pop(known.get(i), None)
                vocab[word] = i
    made["added_tokens"] = sorted(added.values(), key=lambda token: int(token["id"]))
    if not words.get("add_prefix_space", True) and (made["pre_tokenizer"] or {}).get("type") == "Metaspace":
        made["pre_tokenizer"]["prepend_scheme"] = "never"
        made["decoder"]["decoders"] = [step for step in made["decoder"]["decoders"] if step["type"] != "Strip"]
    if split:
        cuts = [_CUT | {"pattern": {"Regex": cut}} for cut in splits()[split]["cuts"]]
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*cuts, _BYTES]}
        made["model"]["ignore_merges"] = splits()[split].get("whole", False)
    file.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    return max([*vocab.values(), *(int(token["id"]) for token in made["added_tokens"])], default=-1)


def _no_words(found: Source, reason: str) -> BadModel:
    return no_tokenizer(found.id, reason, "another GGUF file of the model")
