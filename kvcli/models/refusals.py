"""Models and settings refused before loading: unsupported architectures, quantizations and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvcli.errors import BadModel, KvcliError, UsageError, is_out_of_memory

# Errors raised by libraries, split into faults of the input files and internal errors of kvcli.


@contextmanager
def blame_files(say: Callable[[str], KvcliError]) -> Iterator[None]:
    """Convert exceptions of a library call on untrusted files into an error about the files.

    `say` makes the error from one line that begins with the exception's class. Out of memory is re-raised, and so is an
    exception raised in kvcli's own code, because that is a bug whatever the files are.
    """
    try:
        yield
    except KvcliError:
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        if not _is_foreign(error):
            raise
        raise say(f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")) from error


def _is_foreign(error: BaseException) -> bool:
    rusts = type(error) is Exception or type(error).__name__ == "PanicException"  # has no traceback line of the library
    if is_out_of_memory(error) or not (isinstance(error, Exception) or rusts):
        return False
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return rusts or (at is not None and not str(at.tb_frame.f_globals.get("__name__")).startswith("kvcli"))


def _first_line(error: BaseException) -> str:
    """First non-empty line of the message; a line that ends with a colon only announces the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0] if lines else "")[:300]


Config = dict[str, Any]

_ATTENTION = {"full_attention", "sliding_attention", "attention"}
# Recurrent layers and layers that compute each row separately. The probe finds them, and the check at load tests them
# (model_probe.py).
_FOUND = {"linear_attention", "mamba", "mamba2", "conv", "hybrid", "hybrid_sliding", "recurrent", "mlp", "moe"}
# Families without attention layers, with states kept elsewhere, or whose states no pass of several rows can continue.
_STATE_FAMILIES = set("mamba mamba2 falcon_mamba rwkv xlstm recurrent_gemma minimax jamba zamba zamba2".split())
_SIGNS = {  # lower-case parts of architectures, types and algorithms -> kind of head
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "dflash": "a DFlash head",
    "medusa": "Medusa heads",
    "muse_glimmer_assistant": "a DFlash head",
    "_assistant": "an assistant that reads the KV cache of its target model",
    "mlp_speculator": "an MLP speculator",
}
WHY = "it needs hidden states of several layers of the target model, which kvcli gives to no drafter"
_ASSISTANTS = {"gemma4_assistant", "gemma4_unified_assistant"}
_WRITES_TEXT = ("CausalLM", "ForConditionalGeneration", "LMHead", "ForImageTextToText")


def no_tokenizer(id: str, said: str, try_: str) -> BadModel:
    """Return the error for a model without a usable tokenizer."""
    return BadModel(f"{id} has no tokenizer that can be read", code="bad_tokenizer", lines=[said], try_=[try_])


def refuse(config: Config, name: str, *, may_assist: bool = False) -> None:
    """Raise BadModel if the architecture in `config` is unsupported. `may_assist`: as in `refuse_head`."""
    refuse_head(config, name, may_assist=may_assist)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    family = str(text.get("model_type") or config["model_type"])
    for reason in _reasons:
        why = reason(config, text, family)
        if why:
            raise BadModel(
                f"{name} ({family}) is not supported: {why[0]}",
                code="model_unsupported",
                lines=why[1:],
                detail={"family": family},
                try_=["docs/models.md lists what runs", "vLLM or llama.cpp may serve this model"],
            )


def is_assistant(config: Mapping[str, Any]) -> bool:
    """True if `spec.method = "assistant"` can use the model."""
    return config.get("model_type") in _ASSISTANTS


def refuse_head(config: Mapping[str, Any], name: str, *, may_assist: bool = False) -> None:
    """Raise BadModel for a draft head, which is no complete model. `may_assist`: allow a Gemma 4 assistant."""
    if may_assist and is_assistant(config):
        return
    kinds = [config.get(key) for key in ("model_type", "speculators_model_type")]
    listed = config.get("architectures")
    signs = " ".join(str(s) for s in [*kinds, *(listed if isinstance(listed, list) else [])]).lower()
    keys = {"eagle3": "draft_vocab_size", "dflash": "dflash_config", "medusa": "medusa_num_heads"}
    signs += "".join(f" {sign}" for sign, key in keys.items() if key in config)
    if (what := next((what for sign, what in _SIGNS.items() if sign in signs), None)) is None:
        return
    stated = config.get("speculators_config")
    verifier = stated.get("verifier") if isinstance(stated, dict) else None
    made_for = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    ours = is_assistant(config)
    instead = "--draft MODEL, a small model of the same family: kvcli models show MODEL lists them"
    raise BadModel(
        f"{name} is {what}; it cannot generate text alone",
        code="draft_head",
        lines=[*([] if ours else [WHY]), *([f"it was made for {str(made_for)[:80]}"] if made_for else [])],
        try_=[f"-m MODEL --draft {name}, with the Gemma 4 that it was made for" if ours else instead, "--spec ngram"],
    )


def refuse_device(name: str) -> None:
    """Refuse a kind of GPU that torch supports and kvcli was never run on, before looking for such a device."""
    if name.startswith("xpu"):
        raise UsageError(
            f"load.device = {name}: kvcli has never run on Intel's GPUs",
            code="no_such_device",
            lines=["llama.cpp (SYCL) and vLLM-XPU serve them"],
            try_=["--device cpu", "kvcli doctor"],
        )


def refuse_quant(name: str, quant: str, kind: str, *, is_quantized: bool) -> None:
    """Refuse a quantization that this kind of device or an already quantized model does not support."""
    if quant == "none":
        return
    if is_quantized:
        raise UsageError(
            f"{name} is quantized already, so load.quant = {quant} cannot be applied",
            code="bad_quant",
            try_=["--set load.quant=none", "the original, unquantized model"],
        )
    if quant == "nf4" and kind == "cpu":
        raise UsageError(
            "load.quant = nf4 is for CUDA: on a CPU it is slower than no quantization at all",
            code="bad_quant",
            lines=["its CPU path dequantizes every weight for every token"],
            try_=["--quant int4", "kvcli fit --vram 12GiB, to ask about a GPU"],
        )
    if kind not in ("cpu", "cuda"):
        raise UsageError(
            f"load.quant = {quant} does not run on {kind}",
            code="bad_quant",
            lines=["MLX and llama.cpp have kernels for quantized weights there"] * (kind == "mps"),
            try_=["--set load.quant=none", "--device cpu"],
        )


def refuse_across_ranks(model: str, **asked: bool) -> None:
    """Raise BadModel for what does not work if several processes share the model. `asked`: names, and if they apply."""
    if wrong := [name for name, applies in asked.items() if applies]:
        raise BadModel(
            f"{model} cannot be shared by several processes with {' and '.join(wrong)}",
            code="no_ranks",
            lines=["torchrun splits models of plain attention, in full precision"],
            try_=["the same command without it", "one process, without torchrun"],
        )


def refuse_split(
    layers: int | str, experts: int | str, embeddings: str, kind: str, *, is_quantized: bool, folds: bool = False
) -> None:
    """Refuse `load.layers_on_gpu`, `load.experts_on_gpu` and `load.embeddings` without a GPU, and the first where
    layers cannot be split."""
    asked = {
        "layers_on_gpu": (layers, "auto"),
        "experts_on_gpu": (experts, "auto"),
        "embeddings": (embeddings, "device"),
    }
    for key, (value, default) in asked.items():
        if kind != "cuda" and value != default:
            raise UsageError(
                f"load.{key} = {value}, but the model runs on {kind}",
                code="no_gpu",
                try_=[f"--set load.{key}={default}", "--device cuda"],
            )
    if layers == "auto":
        return
    if is_quantized:
        raise UsageError(
            f"load.layers_on_gpu = {layers}: a quantized checkpoint cannot be split over devices",
            code="no_split",
            try_=["--set load.layers_on_gpu=auto", "the original, unquantized model with --quant int4"],
        )
    if experts != "auto":
        raise UsageError(
            f"load.layers_on_gpu = {layers}: load.experts_on_gpu divides the model as well",
            code="no_split",
            try_=["--set load.layers_on_gpu=auto", "--set load.experts_on_gpu=auto"],
        )
    if folds:
        raise UsageError(
            f"load.layers_on_gpu = {layers}: a model with recurrent layers cannot be split over devices",
            code="no_split",
            try_=["--set load.layers_on_gpu=auto", "--quant int4"],
        )


def _encoder_decoder(config: Config, text: Config, family: str) -> list[str]:
    if not config.get("is_encoder_decoder"):
        return []
    return ["it is an encoder-decoder", "kvcli stores the KV cache of one sequence; cross-attention needs a second one"]


def _writes_no_text(config: Config, text: Config, family: str) -> list[str]:
    names = config.get("architectures") or []
    if "vision_config" in config and "text_config" not in config and not config.get("vocab_size"):
        return ["its config has a vision part and no text decoder", f"architectures: {', '.join(names) or 'none'}"]
    if names and not any(mark in n for n in names for mark in _WRITES_TEXT):
        return [f"{names[0]} does not generate text", "needed: a causal language model, such as LlamaForCausalLM"]
    return []


def _recurrent(config: Config, text: Config, family: str) -> list[str]:
    if family not in _STATE_FAMILIES:
        return []
    return [
        "it has recurrent layers",
        f"the code of {family} updates their state token by token, or stores it itself",
        "Qwen3.5, LFM2, Nemotron-H, Granite 4, Falcon-H1 and their like run: docs/models.md",
    ]


def _odd_layers(config: Config, text: Config, family: str) -> list[str]:
    stated = (text.get(key) or () for key in ("layer_types", "layers_block_type", "block_types"))
    kinds = sorted({str(kind) for kinds in stated for kind in kinds} - _ATTENTION - _FOUND)
    if text.get("attention_chunk_size") or "chunked_attention" in kinds:
        return [
            "it uses chunked attention",
            "a token attends to its own chunk only; kvcli supports full and sliding-window attention",
        ]
    if kinds:
        return [f"its layers are of kind {', '.join(kinds)}", "kvcli supports full and sliding-window attention"]
    return []


def _alibi(config: Config, text: Config, family: str) -> list[str]:
    attn = text.get("attn_config")
    if text.get("alibi") or family == "bloom" or (isinstance(attn, dict) and attn.get("alibi")):
        return ["it uses ALiBi", "kvcli does not support its bias on scores, which grows with distance"]
    return []


_reasons: tuple[Callable[[Config, Config, str], list[str]], ...] = (
    _encoder_decoder,
    _recurrent,
    _odd_layers,
    _alibi,
    _writes_no_text,
)
