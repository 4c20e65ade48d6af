"""Benchmark side for transformers' `generate`: same files, same dtype, with and without its prompt lookup."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from kvcli.bench.side import TimedSample
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading import weights
from kvcli.engine.stats import Stats
from kvcli.models.family import read_config
from kvcli.models.gguf.convert import convert_if_needed
from kvcli.models.source import Source
from kvcli.settings.profile import Profile

LOOKUP = 10  # draft tokens of prompt lookup, the number that transformers' documentation uses


class HfSide:
    """Benchmark side that runs `generate` with sdpa attention."""

    peak_bytes: int | None = None  # it runs in this process

    def __init__(
        self,
        name: str,
        model: Any,
        threads: int,
        *,
        lookup: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`lookup`: draft tokens of prompt lookup, 0 for none; `temperature` 0 is greedy."""
        self.temperature, self.seed = temperature, seed
        self.name, self.model, self.threads, self.lookup, self.clock = name, model, threads, lookup, clock

    @property
    def setup(self) -> dict[str, str]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        is_quantized = getattr(self.model.config, "quantization_config", None) is not None
        said = {
            "engine": f"transformers {version('transformers')} generate",
            "dtype": dtype,
            "weights": "as in the checkpoint" if is_quantized else dtype,
            "device": str(self.model.device),
            "threads": str(self.threads),
            "attention": "sdpa",
            "cache": "DynamicCache",
        }
        if self.lookup:
            said["prompt_lookup_num_tokens"] = str(self.lookup)
        return said

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        """Continue `prompt` by `new` tokens. The time is read whenever `generate` hands over tokens."""
        torch.set_num_threads(self.threads)
        more: dict[str, Any] = {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
        if self.temperature:
            more |= {"do_sample": True, "temperature": self.temperature, "top_k": 0}
            torch.manual_seed(self.seed)  # the same text in every repetition
        # the model's own generation settings hold stop tokens and penalties, and generate merges them in
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        cache = DynamicCache(config=self.model.config.get_text_config())
        lookup = LookupDrafts(self.model) if self.lookup else None
        ids = torch.tensor([list(prompt)], device=self.model.device)
        watch = Watch(self.clock)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=new,
                streamer=watch,
                **({"do_sample": False} | more),
            )
        written = tuple(out[0, len(prompt) :].tolist())
        stats = lookup.stats(watch.groups, len(prompt)) if lookup is not None else None
        return TimedSample(written, tuple(watch.at), len(prompt), _nbytes(cache), stats)

    def close(self) -> None:
        self.model = None


class Watch:
    """Streamer that records times: `generate` puts the prompt first, then the tokens of each pass."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self.at: list[float] = []
        self.groups: list[int] = []  # tokens of each pass
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.groups.append(value.numel())
        self.at += [self.clock() - self.began] * value.numel()

    def end(self) -> None:
        return


class LookupDrafts:
    """Counter of prompt lookup's draft tokens, which wraps its candidate generator."""

    def __init__(self, model: Any) -> None:
        self.drafted: list[int] = []  # draft tokens of each pass
        make = type(model)._get_candidate_generator

        def watched(*args: Any, **kwargs: Any) -> Any:
            inner = make(model, *args, **kwargs)
            propose = inner.get_candidates

            def get_candidates(ids: torch.Tensor, *more: Any, **named: Any) -> Any:
                found = propose(ids, *more, **named)
                self.drafted.append(found[0].shape[1] - ids.shape[1])
                return found

            inner.get_candidates = get_candidates
            return inner

        model._get_candidate_generator = watched

    def stats(self, groups: Sequence[int], prompt: int) -> Stats:
        """Statistics as in kvcli's engine: a pass accepts at most its new tokens less the one the model sampled."""
        stats = Stats(prompt=prompt, new=sum(groups), passes=len(groups))
        for gave, drafted in zip(groups, self.drafted, strict=True):
            if drafted:
                stats.draft(drafted, gave - 1)
        return stats


def load_hf(found: Source, profile: Profile, cache: Path) -> Any:
    """Load the files by transformers, in the dtype and on the device that the profile sets."""
    wants = profile.load
    with quiet():
        found = convert_if_needed(found, wants.dtype, cache, keeps_on="")
        config = read_config(found, wants.trust_remote_code)
        where = weights.find_device(wants.device)
        model, _ = weights.load_weights(found, config, wants.dtype, where, wants.trust_remote_code)
    model.set_attn_implementation("sdpa")
    return model.to(where).eval().requires_grad_(False)


def _nbytes(cache: DynamicCache) -> int:
    held = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.nbytes for t in held if t is not None)
