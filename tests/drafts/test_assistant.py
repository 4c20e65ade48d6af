"""Assistants of Gemma 4 draft: they say what transformers has them say, over whatever is stored; the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from kvcli.drafts.assistant import AssistantDraft
from kvcli.drafts.assistant_head import AssistantHead
from kvcli.drafts.off import Off
from kvcli.engine.assistant import wrapped
from kvcli.engine.drafter import Drafter, Pair
from kvcli.engine.engine import drive, events
from kvcli.engine.feed import Asks
from kvcli.engine.lm import LM
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.errors import BadModel
from kvcli.kv.dense import Dense
from tests import drafters, families

DEPTH, STEPS = 4, 5
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5}


def loaded(family: str = "gemma4_shared", **changes: Any) -> LM:
    found = LM.of(families.build(family, **changes))
    found.lay_out()
    return found


def theirs(lm: LM, assistant: Any, text: Sequence[int], start: int) -> list[list[int]]:
    """What transformers' generator guesses after each of some steps that accept one guess: no row that was rejected is
    left where it looks, as there is in the passes of its own loop."""
    stock = families.build(*lm.remembers["built"][0], **lm.remembers["built"][1])
    assistant.generation_config.num_assistant_tokens = DEPTH
    table = stock.get_input_embeddings()
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, table, GenerationConfig(max_length=500))
    found = []
    for step in range(STEPS):
        n = start + 2 * step
        ids = torch.tensor([text[:n]])
        with torch.inference_mode():
            out = stock(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
            generator.is_main_model_prefill = True
            said, _ = generator.get_candidates(ids, {}, out, is_first_iteration=False, n_last_matches=0)
        found.append(said[0, n:].tolist())
    return found


def guessed(head: AssistantHead) -> Asks[list[int]]:
    """A chain of its first choices."""
    (gleaned,) = yield from head.read()
    found = [int(gleaned[0])]
    for at in range(DEPTH - 1):
        (gleaned,) = yield from head.go_on(found[-1:], [at - 1])
        found.append(int(gleaned[0]))
    return found


class Follower:
    """Guesses what is right, two tokens a pass, and has the head say what it would."""

    view = glean = None

    def __init__(self, text: Sequence[int], head: AssistantHead) -> None:
        self.text, self.head, self.said = text, head, list[list[int]]()

    def expect(self, costs: Any) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Any = None) -> None:
        self.head.start(ids)

    def propose(self, ids: Sequence[int], room: int, past: Any) -> Asks[Any]:
        from kvcli.engine.rows import Draft

        self.head.over(past)
        self.said.append((yield from guessed(self.head)))
        return Draft([self.text[len(ids)]], [-1], hears="hidden")

    def observe(self, step: Any) -> None:
        self.head.hear(step)
        self.head.extend(step.new)

    def usage(self) -> list[Any]:
        return []

    def report(self) -> None:
        return None


@pytest.mark.parametrize("start", [8, 50, 120])  # within the window of 11 tokens, and beyond
@pytest.mark.parametrize("ordered", [{}, ORDERED], ids=["plain", "ordered"])
@pytest.mark.parametrize("family", ["gemma4_shared", "gemma4"])
def test_guesses_are_those_of_transformers(family: str, ordered: dict[str, Any], start: int) -> None:
    changes = {"vocab_size": 96, "vocab_size_per_layer_input": 96}
    lm = loaded(family, **changes)
    lm.remembers["built"] = (family,), changes
    text = written(lm, Off(), start)
    assistant = drafters.assistant_of(lm, **ordered)
    if ordered:
        order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
        assistant.masked_embedding.token_ordering.copy_(order)
    want = theirs(lm, assistant, text, start)
    assert len({tuple(one) for one in want}) > 2, "they say something about the text"
    follower = Follower(text, AssistantHead(lm, wrapped(lm, assistant)))
    assert written(lm, follower, start) == text  # type: ignore[arg-type]
    assert follower.said[:STEPS] == want


def written(lm: LM, drafter: Drafter, n: int = 50, sampler: Sampler | None = None) -> list[int]:
    session = Session(lm, Dense(lm.shapes, lm.dtype, lm.device), drafter, sampler or Sampler(), chunk=13)
    drive(session.read(families.prompt(n, 96)))
    list(events(session.stream(40)))
    return session.ids
