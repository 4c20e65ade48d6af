"""Drafts on a model whose layers keep a state: passes accepted in part, and drafting beside plain decoding.

    python tests/bench/hybrid.py [--reps 9] [--new 48] [--out FILE]

A random Qwen3.5 of some 150M parameters in bf16, on one thread. *passes*: of 8 rows behind 256 tokens, with what takes
the accepted ones in, in times of one that is accepted whole. *copy*: chains of 7 that know the text but for each eighth
token. *wrong*: the adaptive n-gram drafter on a text of few words in random order, whose continuations are wrong. Sides
take turns; in brackets least, median and most of all turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Step
from kvcli.methods.drafts.ngram import Ngram
from tests import make
from tests.bench.harness import Rows, in_turns, measurement, quotients, ran
from tests.drafters import Scripted

# so few words that n-grams of one token match, and are followed by something else
VOCAB, CONTEXT, ROWS, ACCEPTED = 256, 256, 8, (8, 1, 2, 4, 6)


class Copy(Scripted):
    """Knows the text, but for each eighth token."""

    def propose(self, ids: Any, room: int, past: object) -> Draft:
        first = len(ids)
        ahead = self.ahead(ids, min(ROWS - 1, room))
        return Draft.chain([t if (first + i) % 8 else (t + 1) % VOCAB for i, t in enumerate(ahead)])


def build() -> LM:
    config = CONFIG_MAPPING["qwen3_5_text"](
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=1792,
        num_hidden_layers=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with quiet():
        lm = wrap_lm(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), id="random hybrid")
        install_kernels(lm)
    return ran(lm)


def opened(lm: LM, prompt: list[int], drafter: Drafter | None = None) -> GenerationSession:
    text = make.session(lm, drafter=drafter)
    run_to_end(text.read(prompt))
    return text


def passes(lm: LM, prompt: list[int], reps: int) -> list[dict[str, Any]]:
    text = opened(lm, prompt)
    known, rows = text.states.now, PassRows.chain(prompt[:ROWS], text.committed)

    def once(n: int) -> float:
        text.states.now = known
        began = time.perf_counter()
        (made,) = run([ForwardRequest(lm, rows, text.cache, want=range(ROWS), states=text.states)])
        assert made.fold is not None
        made.fold(n)
        return time.perf_counter() - began

    times = in_turns({n: partial(once, n) for n in ACCEPTED}, reps, 2)
    return [
        {
            "what": f"{n} of {ROWS} accepted",
            "ms": round(1000 * statistics.median(times[n]), 2),
            "times": quotients(times[n], times[ROWS], 3),
        }
        for n in ACCEPTED
    ]


def writing(lm: LM, name: str, prompt: list[int], new: int, reps: int) -> dict[str, Any]:
    """Tokens a second, plain and drafted, of the same text."""
    truth = opened(lm, prompt)
    run_to_end(truth.stream(new))
    seconds: dict[str, list[float]] = {"plain": [], name: []}
    n_drafted = taken = 0
    for rep in range(reps + 1):
        for side in seconds:
            drafted = Copy(truth.ids, VOCAB, 0) if name == "copy" else Ngram(branches=1).drafter()
            text = opened(lm, prompt, drafted if side == name else None)
            began = time.perf_counter()
            steps = [said for said in iterate_events(text.stream(new)) if isinstance(said, Step)]
            if rep:
                seconds[side].append(time.perf_counter() - began)
            assert text.ids == truth.ids, "drafts changed the text"
            if side == name:
                n_drafted, taken = sum(s.rows.n_rows - 1 for s in steps), sum(len(s.path) - 1 for s in steps)
    plain, its = seconds["plain"], seconds[name]
    return {
        "what": f"{name} beside plain",
        "ms": round(1000 * statistics.median(its) / new, 2),
        "plain ms": round(1000 * statistics.median(plain) / new, 2),
        "times": quotients(plain, its, 3),
        "draft tokens": n_drafted,
        "accepted": taken,
        "different tokens": len({*truth.ids[len(prompt) :]}),
    }


@measurement(
    "Drafts on a random hybrid of some 150M parameters, bf16",
    columns=["what", "ms", "times", "draft tokens", "accepted"],
    note="times: of a pass accepted whole, or tokens a second in those of plain decoding. ms: a pass or token",
)
def hybrid(reps: int = 9, new: int = 48) -> Rows:
    torch.set_num_threads(1)
    lm = build()
    prompt = torch.randint(0, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        yield from passes(lm, prompt, reps)
        for name in ("copy", "wrong"):
            yield writing(lm, name, prompt, new, max(3, reps // 3))


if __name__ == "__main__":
    hybrid.main()
