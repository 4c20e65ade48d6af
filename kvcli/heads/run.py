"""Run the head probes one after another and combine their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.bench.workloads import cut, prompt_of
from kvcli.chat.transcript import kinds_by_id
from kvcli.documents import with_documents
from kvcli.errors import BadModel, ContextOverflow, UsageError
from kvcli.heads.ablate import Loss
from kvcli.heads.headmap import full_heads, headmap
from kvcli.heads.prompt import Reading, read_prompt, scalar
from kvcli.heads.reason import TASK, reason
from kvcli.heads.repeat import repeat
from kvcli.heads.request import BEST, ProbeRequest
from kvcli.heads.restricted_heads import HeadWindow
from kvcli.heads.retrieval import RetrievalResult, check, long_range_heads, probe_retrieval
from kvcli.heads.sample import ProbeSample, samples
from kvcli.policies.scoring.headmap import refuse_latents

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.methods.policies.fastgen.policy import FastGen
    from kvcli.schemas.heads import Probe

Tell = Callable[[int, int, str], None]  # steps done, of how many, current step
LEAST = 64  # least tokens of a context
ROUNDS = 3  # rounds in which the set of suggested heads may grow
QUESTION = "Summarise the main findings."


@dataclass(slots=True)
class Findings:
    """Findings of all probes. Tables are [L, K] by KV head, [L, H] by query head."""

    layers: tuple[int, ...]
    reach: HeadWindow
    reading: Reading | None = None
    fetched: RetrievalResult | None = None
    query: dict[str, Tensor] = field(default_factory=dict)  # [L, H] scores by probe
    reasoned: int = 0  # texts of the reasoning probe with a right answer
    ranked_by: Probe = "prompt"
    score: Tensor = field(default_factory=lambda: torch.zeros(0))  # [L, K] scores of the probe that ranks
    heads: Tensor = field(default_factory=lambda: torch.zeros(0))  # [L, K] the head map
    kept_full: Loss | None = None  # all but the suggested heads restricted
    taken: Loss | None = None  # only the suggested heads restricted
    seconds: dict[str, float] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    @property
    def full(self) -> Tensor:
        """Heads that keep the full cache by the head map, bool [L, K]."""
        table = torch.zeros_like(self.heads, dtype=torch.bool)
        for layer, head in full_heads(self.heads):
            table[layer, head] = True
        return table


def probe(model: Model, ask: ProbeRequest, tell: Tell = lambda done, total, label: None) -> Findings:
    """Run the requested probes. `tell` may raise to stop, without leaving partial results.

    Raises ContextOverflow, BadInput or UsageError before any prefill, and BadModel for a model without full-attention
    heads.
    """
    refuse_latents(model.lm, "a profile of heads")
    found = Findings(_layers(model, ask), HeadWindow(ask.settings.sinks, ask.recent))
    _check(model, ask, found)
    ids = prompt_ids(model, ask) if "prompt" in ask.probes else []
    fetching = {"ablate", "needle"} & set(ask.probes)
    texts = samples(model, ask.texts, ask.sample, ask.seed, ask.haystack) if fetching else []
    found.total = _steps(model, ask, found, ids, len(texts))
    if ids:
        _timed(found, "prompt", lambda: _prompt(model, ask, found, ids, tell))
    if "reason" in ask.probes:
        _timed(found, "reason", lambda: _reason(model, ask, found, tell))
    if "repeat" in ask.probes:
        tell(found.done, found.total, "repeat · random tokens twice")
        _timed(found, "repeat", lambda: found.query.update(repeat=repeat(model, ask.sample, ask.seed)))
    if texts:
        _timed(found, "retrieval", lambda: _fetch(model, ask, found, texts, tell))
    found.ranked_by = next(name for name in BEST if name in ask.probes)
    found.score = _score(model, found)
    found.heads = headmap(found.score)
    if texts and "ablate" in ask.probes:
        _timed(found, "check", lambda: _confirm(model, found, texts, tell))
    found.done = found.total
    tell(found.total, found.total, "")
    return found


def _layers(model: Model, ask: ProbeRequest) -> tuple[int, ...]:
    n = model.lm.n_layers
    wrong = [layer for layer in ask.layers if layer >= n]
    if wrong:
        raise UsageError(f"there is no layer {wrong[0]}: the model has {n}", try_=[f"--layers 0-{n - 1}"])
    return ask.layers or tuple(range(n))


def _check(model: Model, ask: ProbeRequest, found: Findings) -> None:
    if ask.context > model.limit:
        raise ContextOverflow(
            f"{ask.context:,} tokens exceed the context window",
            lines=[f"the limit is {model.limit:,} tokens"],
            try_=[f"--context {model.limit}"],
        )
    if ask.context < LEAST:
        raise UsageError(f"--context {ask.context} is too short: the minimum is {LEAST} tokens", try_=["--context 2k"])
    if len({(of.n_kv_heads, of.shared_from) for of in model.lm.shapes}) > 1:
        raise BadModel(
            "heads of this model cannot be profiled: its layers differ in their KV heads, or share them",
            code="uneven_layers",
            lines=["a head map has as many KV heads in every layer"],
            try_=["--set policy.name=snap, which scores each prompt by itself"],
        )
    if all(model.lm.windows[layer] is not None for layer in found.layers):
        raise BadModel(
            "these layers attend to a sliding window only: no head reaches distant tokens",
            code="no_full_attention",
            try_=["--layers with a full-attention layer"] if None in model.lm.windows else [],
        )


def _steps(model: Model, ask: ProbeRequest, found: Findings, ids: Sequence[int], texts: int) -> int:
    """Return the number of progress steps: a prefill of a text, or a short pass after one."""
    heads = len(long_range_heads(model, found.layers, found.reach)) if "ablate" in ask.probes else 0
    chunks = -(-len(ids) // model.profile.prefill.chunk) + 4 * ask.stability if ids else 0
    reasons = ask.texts if "reason" in ask.probes else 0
    return chunks + reasons + texts * (1 + heads) + (2 * texts if heads else 0)  # more if the check takes rounds


def _timed(found: Findings, name: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    found.seconds[name] = time.perf_counter() - began


def prompt_ids(model: Model, ask: ProbeRequest) -> list[int]:
    """Return ids of the documents followed by a question, cut to the context; without documents a field report."""
    if not ask.documents:
        return prompt_of("summary", {}, model.tokenizer, model.lm.vocab, ask.context, seed=ask.seed)
    text = with_documents("", ask.documents).strip()
    return cut(model.tokenizer, text, lambda part: [{"role": "user", "content": f"{part}\n\n{QUESTION}"}], ask.context)


def _prompt(model: Model, ask: ProbeRequest, found: Findings, ids: list[int], tell: Tell) -> None:
    read = 0

    def on_tokens(tokens: int) -> None:
        nonlocal read
        found.done += 1 if read < len(ids) - 1 else tokens
        read = max(read, tokens)
        tell(found.done, found.total, f"prompt · {len(ids):,} tokens")

    tell(found.done, found.total, f"prompt · {len(ids):,} tokens")
    kinds = torch.frombuffer(bytearray(kinds_by_id(model.tokenizer, model.lm.vocab)), dtype=torch.int8)
    found.reading = read_prompt(model, ids, _settled(model, ask), kinds, found.layers, on_tokens, ask.stability)


def _settled(model: Model, ask: ProbeRequest) -> FastGen:
    """Return the settings as the policy resolves them for this model (number of rows for `auto`).

    Raises BadInput for a head map of another model.
    """
    ask.settings.full_heads(model.lm)
    return ask.settings.on(model.lm.device.type)


def _reason(model: Model, ask: ProbeRequest, found: Findings, tell: Tell) -> None:
    def passed(passes: int) -> None:
        found.done += passes
        tell(found.done, found.total, f"reason · {ask.texts} texts of {ask.sample:,} tokens")

    passed(0)
    texts = samples(model, ask.texts, ask.sample, ask.seed, ask.haystack, TASK)
    kinds = torch.frombuffer(bytearray(kinds_by_id(model.tokenizer, model.lm.vocab)), dtype=torch.int8)
    found.query["reason"], found.reasoned = reason(model, texts, kinds, passed)


def _fetch(model: Model, ask: ProbeRequest, found: Findings, texts: Sequence[ProbeSample], tell: Tell) -> None:
    label = " and ".join(name for name in ("ablate", "needle") if name in ask.probes)

    def passed(passes: int) -> None:
        found.done += passes
        tell(found.done, found.total, f"{label} · {len(texts)} texts of {ask.sample:,} tokens")

    passed(0)
    found.fetched = probe_retrieval(model, texts, found.layers, ask.probes, found.reach, passed)
    if found.fetched.read is not None:
        found.query["needle"] = found.fetched.read.amax(-1)


def _confirm(model: Model, found: Findings, texts: Sequence[ProbeSample], tell: Tell) -> None:
    """Check that the suggested heads suffice: restrict all others, and then only the suggested ones.

    Heads that replace each other seem dispensable one by one, so the set is doubled while answers are wrong.
    """
    assert found.fetched is not None

    def passed(passes: int) -> None:
        found.done = min(found.total, found.done + passes)
        tell(found.done, found.total, "check · the suggested heads")

    probed = torch.zeros_like(found.heads, dtype=torch.bool)
    probed[list(found.layers)] = True
    for left in reversed(range(ROUNDS)):
        full = found.full
        found.kept_full = check(model, texts, ~full & probed, found.reach, passed)
        is_enough = found.kept_full.right >= found.fetched.right
        if is_enough or not left or 4 * int(full.sum()) > int(probed.sum()):
            break
        found.heads = headmap(found.score, least=2 * int(full.sum()))
    found.taken = check(model, texts, found.full, found.reach, passed)


def _score(model: Model, found: Findings) -> Tensor:
    """Return the scores [L, K] of the probe that ranks."""
    shape = (model.lm.n_layers, model.lm.n_kv_heads)
    if found.ranked_by == "ablate":
        assert found.fetched is not None
        assert found.fetched.kl is not None
        return found.fetched.kl
    if found.ranked_by in found.query:
        return by_kv_head(found.query[found.ranked_by], shape)
    assert found.reading is not None
    return scalar(found.reading, shape, lambda gaze: gaze.worst)


def by_kv_head(table: Tensor, shape: tuple[int, int]) -> Tensor:
    """Reduce [L, H] to [L, K] by the maximum over the query heads of a KV head."""
    return table.double().view(*shape, -1).amax(-1)


def prompt_hash(ids: Sequence[int]) -> str:
    """Return the SHA-256 of the token ids."""
    return sha256(repr(list(ids)).encode()).hexdigest()
