"""Every text-generating class of transformers, tiny and random: is our text that of its own `generate`?

    python -m tests.all_families [--only llama,gpt2] [--new 24] [--seconds 60] [--jobs 1] [--out docs/census.json]

With `--out docs/census.json`, `python docs/generate.py census` then says it in docs/reference/census.md; with
`--only` the file keeps what it says of the others.

Each class is built by its own config with the settings of TINY put in, has its weights sharpened, and writes greedily
in float32: by `generate`, by kvcli, and by kvcli with an n-gram drafter. Classes that see or hear besides are saved and
loaded as a checkpoint is, since kvcli leaves parts of their files alone. In bf16 kvcli then tries whether its rows have
the same bits alone and among others ("bits"). Each runs in a process of its own with a time limit. Prints a line per
class, then JSON on the last line. Exit status 1 if a text is wrong or kvcli crashed. Outcomes:

    equal    both of our texts are that of `generate`, or of `generate` without its cache where that writes another text
    refused  kvcli says by name that it cannot serve the design, from its config or when it is loaded
    wrong    a text differs
    crashed  kvcli raised something else, or took too long
    unbuilt  there is nothing to compare with: it cannot be built tiny, or its own `generate` fails
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import install_kernels, open_lm, wrap_lm
from kvcli.errors import KvcliError
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.models.refusals import refuse
from kvcli.models.source import find
from tests import make
from tests.exact.table import prompt
from tests.families import WINDOW, sharpen

OUTCOMES = ("equal", "refused", "wrong", "crashed", "unbuilt")
LAYERS, HIDDEN, HEADS = 4, 48, 4
LARGEST = 20_000_000  # numbers in a model that still counts as tiny
SEEING = (  # to the class of those that see or hear and continue text all the same
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    | getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {})
)
KINDS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SEEING})
SEEDS = 4  # of weights, to find some that do not write one token over and over

# Put in wherever a config has a setting of that name, in the parts of a config too.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 97),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp", "decoder_ffn_dim"), 56
    ),
    **dict.fromkeys(("encoder_ffn_dim", "dff", "shared_intermediate_size", "dense_intermediate_size"), 56),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    "swa_num_attention_heads": HEADS,
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "attention_head_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "attention_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    **{"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1},
    **{"num_nextn_predict_layers": 0, "is_decoder": True},
    **{"depth": LAYERS, "embed_dim": HIDDEN, "out_hidden_size": HIDDEN},  # of what sees
}
# What one class wants besides, or otherwise; None leaves a setting as the class has it.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12}
_OF_ALL = {"num_key_value_heads": HEADS}  # heads of queries have keys of their own
_SPEECH = {"encoder_config": {"hidden_dim": 64, "dim_head": 16}}
_INKLING = {"vision_config": {"text_hidden_size": HIDDEN}}
_FEW = {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 32}  # of what makes pictures
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _turned(*sections: int) -> dict[str, Any]:
    """Numbers of a head that are turned by time, height and width."""
    return {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": list(sections)}}}


OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glmga", "glm_ocr"), _turned(2, 2, 2)
    ),
    "glm4v_moe": _turned(1, 1, 1),
    "paddleocr_vl": _turned(4, 2, 2),
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": {"base_channels": 32}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "cosmos3_edge": _turned(4, 2, 2),
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [24, 24], "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2]}}
    },
    "florence2": {"vision_config": {"embed_dim": [16] * 4, "num_heads": [4] * 4, "projection_dim": HIDDEN}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "glm5_next": {"text_config": {**_OF_ALL, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 4}},
    "granite_speech": _SPEECH,
    "granite_speech_plus": _SPEECH,
    "hy_v4_vl": _turned(2, 1, 1),
    "inkling2": _INKLING,
    "inkling2_loop": _INKLING,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral4": {**_OF_ALL, "head_dim": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "janus": {"vq_config": _FEW, "vision_config": {"projection_dim": HIDDEN}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen3_asr": {"eos_token_id": [96]},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"adapter_in_dim": HIDDEN, "text_config": {**_OF_ALL, "model_type": "dots3_note_text"}},
    "dots3_note_text": _OF_ALL,
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "minicpm3"), _OF_ALL),
    **dict.fromkeys(("deepseek_v3", "longcat_flash", "youtu"), _OF_ALL | {"head_dim": 8}),  # of what is turned
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 8,
        "intermediate_size": [56] * 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
    },
    "gptj": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_chunk_size": 8},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "helium": {"head_dim": 12},
    "kimi_linear": {"num_key_value_heads": HEADS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},  # by its defaults all its layers attend
    "mimo_v2_flash": {"v_head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 12},
    "phimoe": {"sliding_window": None},
    "reformer": {"axial_pos_embds_dim": [24, 24]},
    "stablelm": {"hidden_size": 64},  # a quarter of a head is turned
    "xlm": {"emb_dim": HIDDEN},
    "zaya": {"num_experts_per_tok": 1},
}

NGRAM = Ngram(adaptive=False, max=7)
DRAFTERS: dict[str, Callable[[LM], Drafter]] = {
    "plain": lambda lm: Off(),
    "ngram": lambda lm: replace(NGRAM, branches=1 if lm.recurrent_layers else NGRAM.branches).drafter(),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one class ended."""

    kind: str  # model_type
    outcome: str  # of OUTCOMES
    why: str = ""
    distinct: int = 0  # tokens among those written: one or two compare little
    seconds: float = 0.0
    bits: bool | None = None  # whether rows are independent to the bit in bf16; None = not tried


class Unbuilt(Exception):
    """There is nothing to compare with."""


def shrunk(given: dict[str, Any]) -> dict[str, Any]:
    """Of all settings of a config those that make it tiny."""
    made: dict[str, Any] = {"tie_word_embeddings": False}  # tied, a random model repeats one token for ever
    n_layers = next((given[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if given.get(key)), 0)
    for key, value in given.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "per_layer_config":
            made[key] = {**shrunk(value), "model_type": value.get("model_type")}
        elif key in TINY:
            made[key] = TINY[key]
        elif isinstance(value, list) and len(value) == n_layers > LAYERS:
            made[key] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]  # each kind of layer, in the order of the first
    return made


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What either says, of the second where both do; tables are merged."""
    both = {k: merged(first[k], v) for k, v in second.items() if isinstance(v, dict) and isinstance(first.get(k), dict)}
    return first | second | both


def config_of(kind: str) -> Any:
    """The tiny config of a model_type. Raises Unbuilt."""
    try:
        wanted = merged(shrunk(CONFIG_MAPPING[kind]().to_dict()), OWN.get(kind, {}))
        return CONFIG_MAPPING[kind](**{k: v for k, v in wanted.items() if v is not None or k == "eos_token_id"})
    except Exception as error:
        raise Unbuilt(f"its config: {said(error)}") from error


def build(config: Any) -> PreTrainedModel:
    """The class of `config`, fp32, on the CPU. Raises Unbuilt."""
    try:
        kind = getattr(transformers, _class_name(config))
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(config).parameters())
        if size > LARGEST:
            raise Unbuilt(f"{size:,} weights with all that TINY says")
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
        return model.eval().requires_grad_(False)
    except Unbuilt:
        raise
    except Exception as error:
        raise Unbuilt(f"its class: {said(error)}") from error


def lively(model: PreTrainedModel, new: int) -> list[int]:
    """Sharpen the weights so that `generate` writes more than one or two tokens over and over -> what it writes."""
    fresh = {name: weight.clone() for name, weight in model.state_dict().items()}

    def written(seed: int) -> list[int]:
        model.load_state_dict(fresh)
        sharpen(model, seed)
        return theirs(model, prompt(), new)

    tried: dict[int, int] = {}
    for seed in range(SEEDS):
        tried[seed] = len(set(text := written(seed)))
        if tried[seed] > new // 4:
            return text
    return written(max(tried, key=lambda seed: tried[seed]))


def theirs(model: PreTrainedModel, ids: list[int], new: int, **options: Any) -> list[int]:
    """What `generate` writes. Raises Unbuilt."""
    try:
        if (settings := model.generation_config) is not None:  # some families bring stop tokens of their own
            settings.eos_token_id = settings.forced_eos_token_id = None
        ended = {"pad_token_id": 0, "do_sample": False, "min_new_tokens": new, "max_new_tokens": new, **options}
        return model.generate(torch.tensor([ids]), **ended)[0, len(ids) :].tolist()
    except Exception as error:
        raise Unbuilt(f"its own generate: {said(error)}") from error


def ours(lm: LM, drafter: Drafter, ids: list[int], new: int) -> list[int]:
    session = make.session(lm, drafter=drafter, chunk=13)
    run_to_end(session.read(ids))
    for _ in iterate_events(session.stream(new)):
        pass
    return session.ids[len(ids) :]


def judge(kind: str, new: int) -> Verdict:
    """Build, write three times, compare."""
    config = config_of(kind)
    try:
        refuse({**config.to_dict(), "architectures": [_class_name(config)]}, kind)
    except KvcliError as error:
        return Verdict(kind, "refused", f"{error.code}: {error.message}")
    model = build(config)
    try:
        want: list[int] | Unbuilt = lively(model, new)
    except Unbuilt as error:
        want = error  # it may yet be refused
    twin = copy.deepcopy(model).to(torch.bfloat16)
    try:
        lm = opened(model, kind)
    except KvcliError as error:
        return Verdict(kind, "refused", "; ".join([f"{error.code}: {error.message}", *error.lines]))
    if isinstance(want, Unbuilt):
        raise want
    install_kernels(lm)
    texts, why = {name: ours(lm, drafter(lm), prompt(), new) for name, drafter in DRAFTERS.items()}, ""
    if any(text != want for text in texts.values()):
        why = "without its cache: with it, generate writes another text than its own forward"
        model = twin.float()
        want = theirs(model, prompt(), new, use_cache=False)
    for name, text in texts.items():
        if text != want:
            at = next(i for i, (a, b) in enumerate(zip(text, want, strict=True)) if a != b)
            return Verdict(kind, "wrong", f"{name} parts at token {at + 1}", len(set(want)))
    half = opened(twin.to(torch.bfloat16), kind)
    return Verdict(kind, "equal", why, len(set(want)), bits=half.is_row_invariant)


def opened(model: PreTrainedModel, kind: str) -> LM:
    """Theirs as ours, laid out."""
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        lm = wrap_lm(model, id=kind, verify=model.dtype is torch.float32)
        install_kernels(lm)
        return lm
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return open_lm(replace(find(folder), id=kind), device="cpu", verify=model.dtype is torch.float32)


def _class_name(config: Any) -> str:
    kind = config.model_type
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, SEEING.get(kind, "ForCausalLM"))
    named = SEEING[kind] if kind in ("qwen3_5", "qwen3_5_moe") else named  # the other one is of their text alone
    return str(named[0] if isinstance(named, tuple) else named)


def said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:240]


# ---- a process each ----


def _child(kind: str, new: int, pipe: Connection) -> None:
    os.setsid()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    began = time.perf_counter()
    with quiet():
        try:
            verdict = judge(kind, new)
        except Unbuilt as error:
            verdict = Verdict(kind, "unbuilt", str(error))
        except BaseException as error:
            verdict = Verdict(kind, "crashed", said(error))
    pipe.send({**asdict(verdict), "seconds": round(time.perf_counter() - began, 1)})


def judged(kind: str, new: int, seconds: float) -> Verdict:
    """`judge` in a process of its own, which may die or take for ever."""
    fork = multiprocessing.get_context("fork")  # what is imported already is imported there
    here, there = fork.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads: they only wait
        child = fork.Process(target=_child, args=(kind, new, there))
        child.start()
    there.close()
    try:
        if here.poll(seconds):
            return Verdict(**here.recv())
        os.kill(child.pid or 0, signal.SIGKILL)
        return Verdict(kind, "crashed", f"not done after {seconds:g} s", seconds=seconds)
    except EOFError:
        child.join()
        return Verdict(kind, "crashed", f"its process ended with {child.exitcode}")
    finally:
        child.join()


def census(kinds: Sequence[str], new: int, seconds: float, jobs: int) -> Iterator[Verdict]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda kind: judged(kind, new, seconds), kinds)


def write(file: Path, verdicts: Sequence[Verdict], is_part: bool) -> None:
    """A line a class; `is_part`: of the others the file keeps what it says."""
    known = {one["kind"]: one for one in json.loads(file.read_text())["verdicts"]} if is_part and file.exists() else {}
    known |= {one.kind: {k: v for k, v in asdict(one).items() if k != "seconds"} for one in verdicts}
    ended = Counter(one["outcome"] for one in known.values())
    counts = {outcome: ended[outcome] for outcome in OUTCOMES}
    head = {"schema": "kvcli.census/1", "transformers": transformers.__version__, "torch": torch.__version__}
    lines = [json.dumps(known[kind]) for kind in sorted(known)]
    said = json.dumps({**head, "counts": counts})[:-1]
    file.write_text(f'{said}, "verdicts": [\n' + ",\n".join(lines) + "\n]}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, by commas")
    parser.add_argument("--new", type=int, default=24, help="tokens to write")
    parser.add_argument("--seconds", type=float, default=60, help="for one class")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    kinds = args.only.split(",") if args.only else KINDS
    verdicts = []
    for one in census(kinds, args.new, args.seconds, args.jobs):
        verdicts.append(one)
        bits = {True: "bits", False: "no bits"}.get(one.bits, "")  # type: ignore[call-overload]
        print(f"{one.kind:26}{one.outcome:9}{bits:9}{one.seconds:6.1f} s {one.distinct:3}  {one.why}"[:240], flush=True)
    counts = Counter(one.outcome for one in verdicts)
    result = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        # their logits were compared all the same, when they were loaded
        "few_tokens": sorted(v.kind for v in verdicts if v.outcome == "equal" and v.distinct < 3),
        "bits": {str(bits): sorted(v.kind for v in verdicts if v.bits is bits) for bits in (True, False)},
        "classes": {outcome: sorted(v.kind for v in verdicts if v.outcome == outcome) for outcome in OUTCOMES},
    }
    if args.out:
        write(args.out, verdicts, is_part=bool(args.only))
    print(json.dumps(result))
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
