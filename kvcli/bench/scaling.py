"""Speed by number of threads: decoding steps of a random model, alternating between thread counts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.resources import use_threads
from kvcli.fit.calibrate import cache_of_length, once

CONTEXT = 512  # tokens
TURNS = 12


def random_model() -> LM:
    """A Llama of 86 million weights in bf16, larger than a CPU cache: arithmetic is timed, not text."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=16384,
        intermediate_size=2816,
        tie_word_embeddings=True,
    )
    with quiet():
        lm = wrap_lm(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    install_kernels(lm)
    return lm


def steps_a_second(lm: LM, threads: Sequence[int]) -> dict[int, float]:
    """Decoding steps per second after 512 tokens, by number of threads. Restores the number of threads."""
    kv, were = cache_of_length(lm, CONTEXT), torch.get_num_threads()
    times: dict[int, list[float]] = {n: [] for n in threads}
    try:
        for _ in range(TURNS):
            for n in threads:
                use_threads(n)
                once(lm, kv, 1, CONTEXT)  # wakes sleeping threads
                times[n].append(once(lm, kv, 1, CONTEXT))
    finally:
        use_threads(were)
    return {n: 1 / median(took) for n, took in times.items()}
