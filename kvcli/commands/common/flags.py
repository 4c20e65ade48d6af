"""Options of commands, as types for their signatures, and the profile keys that many of them set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, get_args

import typer

from kvcli.commands.common.options import Options, choice, flag, option, refuse_larger
from kvcli.documents.document import Ocr
from kvcli.errors import UsageError
from kvcli.settings.schema import NO_PENALTY, ThinkingMode, registries, tokens_of
from kvcli.settings.values import Settings

_ask = partial(option, panel="The question")
_model = partial(option, panel="The model")

MODEL = "demo, a name from kvcli models suggest or your config, a folder, a GGUF file, or a Hugging Face id."
_FIGURES = "Show figures while generating (live), after the answer (turn), or never (off)."
_BUDGET = "Limit the KV cache to 6GiB, 25% of its full size, or free memory (fit). Approximate: tokens get fewer bits."
_EXACT = "Refuse settings that can change the text (also drafting, on models that are not batch invariant)."
_PICKLE = "Allow weights in pickle files, which can run code."
_ADAPTER = "LoRA adapter: a folder, or an id in the local cache. Repeatable."
_DRAFT = "Draft model for speculative decoding, or auto (same text, fewer passes)."
_THINK = "Thinking before the answer: on, off, a level, or at most N tokens of it. Default: as the model does."
_ENGINE = "Ask an OpenAI-compatible server: vLLM, llama-server, Ollama, ..."
_TIMEOUT = "Wait this long for the first word of an answer. Default: 600."
_SPEC = "Drafting method for speculative decoding (same text, fewer passes)."

_OCR = "Recognize text of scanned pages (auto), of all pages of a PDF (on), or of none (off)."

StatsMode = Literal["live", "turn", "off"]
Figures = Annotated[StatsMode | None, option("--stats", help=_FIGURES, panel="The answer", rare=True)]
System = Annotated[str | None, _ask("--system", "-s", metavar="TEXT", help="System message.")]
SystemFile = Annotated[str | None, _ask("--system-file", metavar="PATH", help="System message from a file.", rare=True)]

OcrMode = Annotated[Ocr, option("--ocr", help=_OCR, rare=True)]

ModelName = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)]
ModelOption = Annotated[str | None, _model("--model", "-m", metavar="MODEL", help=MODEL)]
Ctx = Annotated[str | None, _model("--ctx", metavar="N|auto|max", help="Context window in tokens; 32k = 32768.")]
Budget = Annotated[str | None, _model("--budget", metavar="SIZE", help=_BUDGET)]
Draft = Annotated[str | None, _model("--draft", metavar="MODEL", help=_DRAFT)]
Force = Annotated[bool, _model("--force", help="Load even if the memory estimate does not fit.", rare=True)]
ONLINE = "Download missing file headers from the Hugging Face hub."
Pickle = Annotated[bool, _model("--allow-pickle", help=_PICKLE, rare=True)]


class Weights(Options, panel="The model"):
    """Options of loading the weights."""

    device: str | None = choice(metavar="NAME", help="auto, cpu, cuda, cuda:N or mps.")
    dtype: str | None = choice(metavar="NAME", help="auto, bf16, fp16 or fp32.", rare=True)
    quant: str | None = choice(metavar="NAME", help="Quantize weights: none, int8, int4 or nf4.")
    adapter: list[str] | None = choice(metavar="PATH[:WEIGHT]", help=_ADAPTER, rare=True)


class RunOptions(Options, panel="The model"):
    """Options of a model that answers."""

    ctx: Ctx = None
    weights: Weights
    budget: Budget = None
    spec: str | None = choice(metavar="|".join(registries()["spec"]), help=_SPEC, rare=True)
    draft: Draft = None
    think: str | None = choice(metavar="on|off|low|high|N", help=_THINK)
    exact: bool = flag(help=_EXACT, rare=True)
    force: Force = False
    allow_pickle: Pickle = False
    no_server: bool = flag(help="Load the model in this process, even if kvcli serve has it.", rare=True)


class EngineOptions(Options, panel="Another engine"):
    """Options of a server that runs the model."""

    engine: Literal["openai"] | None = choice(help=_ENGINE, rare=True)
    base_url: str | None = choice(metavar="URL", help="Its address, such as http://127.0.0.1:8000/v1.", rare=True)
    key_file: str | None = choice(metavar="FILE", help="Private file with its key.", rare=True)
    engine_timeout: float = choice(default=600.0, metavar="SECONDS", help=_TIMEOUT, rare=True)


# flag -> key; `origin` names the flag wherever a setting is shown
KEYS: Mapping[str, str] = {
    "--device": "load.device",
    "--dtype": "load.dtype",
    "--quant": "load.quant",
    "--adapter": "load.adapters",
    "--allow-pickle": "load.allow_pickle",
    "--budget": "memory.budget",
    "--spec": "spec.method",
    "--draft": "spec.model",
    "--temperature": "sample.temperature",
    "--greedy": "sample.temperature",
    "--top-p": "sample.top_p",
    "--top-k": "sample.top_k",
    "--min-p": "sample.min_p",
    "--repetition-penalty": "sample.repetition_penalty",
    "--stop": "sample.stop",
    "--seed": "sample.seed",
    "--max-new-tokens": "sample.max_new_tokens",
    "--think": "thinking.mode",
    "--ctx": "context.limit",
}


def profile_flags(params: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return dotted key -> value and flag for the parameters of a command that were typed (not None or False)."""
    given = {flag: params.get(flag[2:].replace("-", "_")) for flag in KEYS}
    given = {flag: value for flag, value in given.items() if value is not None and value is not False and value != []}
    if "--greedy" in given:
        given["--greedy"] = 0.0
        if given.get("--temperature", 0.0) != 0.0:
            raise UsageError("--greedy and --temperature exclude each other", try_=["only one of them"])
    if "--max-new-tokens" in given:
        given["--max-new-tokens"] = tokens(str(given["--max-new-tokens"]), "--max-new-tokens")
    if "--ctx" in given:
        given["--ctx"] = window(str(given["--ctx"]))
    limit = tokens_of(str(given.get("--think", "")))
    if limit:
        given["--think"] = "on"
    elif "--think" in given and given["--think"] not in get_args(ThinkingMode):
        ways = ["--think off", "--think 512, for at most 512 tokens"]
        raise UsageError(f"--think takes {', '.join(get_args(ThinkingMode))} or a number of tokens", try_=ways)
    if "--draft" in given and given.get("--spec", "model") != "model":
        raise UsageError(f"--draft and --spec {given['--spec']} exclude each other", try_=["only one of them"])
    found = {KEYS[flag]: (value, flag) for flag, value in given.items()}
    if "--greedy" in given:
        for key, off in NO_PENALTY.items():
            found.setdefault(f"sample.{key}", (off, "--greedy"))
    if "--draft" in given:
        found.setdefault("spec.method", ("model", "--draft"))
    if limit:
        found["thinking.max_tokens"] = (limit, "--think")
    if "--budget" in given:
        found |= {"policy.name": ("budget", "--budget"), "exactness": ("approx", "--budget")}
    return found


def refuse_implied(flags: Mapping[str, tuple[object, str]], typed: Settings, sets: Settings) -> None:
    """Raise UsageError if a flag implies another value of a key than the value typed elsewhere, or if `--set` gives the
    flag's own key another value. Advice to set that key would change nothing."""
    implying = {by for key, (_, by) in flags.items() if KEYS[by] != key}
    for key, (value, by) in flags.items():
        own = KEYS[by]
        other = (sets if key == own else typed).get(tuple(key.split(".")))
        if by in implying and other is not None and other.value != value:
            said = f"{key}={other.value} ({other.origin.name})"
            instead = f"leave out {by}" if key == own else f"--set {own}={flags[own][0]} instead of {by}"
            raise UsageError(f"{by} and {said} exclude each other", try_=[instead, f"leave out {key}"])


def load_flags(params: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return `profile_flags` of weights and KV cache alone, for commands with other options of their own."""
    names = ("device", "dtype", "quant", "adapter", "allow_pickle", "budget")
    return profile_flags({name: params.get(name) for name in names})


def listed(text: str) -> list[str]:
    """Return the names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def window(text: str) -> int | str:
    """Parse `auto`, `max` or a number of tokens. Both words mean the model's limit; auto is reduced if memory lacks."""
    return "auto" if text in ("auto", "max") else tokens(text, "--ctx", 'a number of tokens from 1, "auto" or "max"')


def tokens(text: str, flag: str, kind: str = "a number of tokens from 1") -> int:
    """Parse a number of tokens: `4096`, `4k` (4,096), `1.5k`, `1m`."""
    if n := tokens_of(text):
        refuse_larger(flag, n)
        return n
    raise UsageError(f"{flag} takes {kind}, not {text!r}", try_=[f"{flag} 4096", f"{flag} 4k"])
