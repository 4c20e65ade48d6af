"""Agreement with the full cache on any text, measured per token, without labels or questions.

A window of the text is prefilled and compressed. The tokens after it are then predicted one by one, each given the true
tokens before it, from the compressed KV cache and from the full one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.errors import BadInput, ContextOverflow, UsageError
from kvcli.models.text import encode
from kvcli.quality.answer import kept, open_session
from kvcli.quality.controls import Row, full_profile, rows
from kvcli.quality.run import Cancel, Tell
from kvcli.quality.statistics import bootstrap
from kvcli.schemas.quality import AgreementDocument, AgreementRow, Estimate

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.settings.profile import Profile

CONTEXT = 768  # most tokens prefilled and compressed per window
SCORED = 256  # tokens predicted after them
WINDOWS = 8  # most windows of the text
LEAST = 64  # least tokens of a text


@dataclass(frozen=True, slots=True)
class TextWindow:
    """One window of the text, as token ids."""

    context: list[int]
    scored: list[int]


@dataclass(frozen=True, slots=True)
class PredictionDistance:
    """Distance of predictions from those of the full cache, per token: all [n]."""

    same: Tensor  # bool: the likeliest token is that of the full cache
    kl: Tensor  # KL from the full cache's distribution to this one, nats
    nll: Tensor  # negative log-likelihood of the true token, nats
    delta: Tensor  # nll minus that of the full cache

    @staticmethod
    def of(logprobs: Tensor, truth: Tensor, scored: Sequence[int]) -> PredictionDistance:
        """Compare the log-probabilities `logprobs` with those of the full cache, `truth`: [n, V]."""
        at = torch.tensor(scored, device=logprobs.device).unsqueeze(1)
        nll, full = -logprobs.gather(1, at).squeeze(1), -truth.gather(1, at).squeeze(1)
        kl = (truth.exp() * (truth - logprobs)).sum(-1)
        return PredictionDistance(logprobs.argmax(-1) == truth.argmax(-1), kl, nll, nll - full)


@dataclass(frozen=True, slots=True)
class _Window:
    """Result of one row in one window: means over its tokens."""

    kept: float
    agreement: float
    kl: float
    delta_nll: float
    nll: float

    @staticmethod
    def of(far: PredictionDistance, kept: float) -> _Window:
        kl = max(0.0, float(far.kl.mean()))
        return _Window(kept, float(far.same.float().mean()), kl, float(far.delta.mean()), float(far.nll.mean()))


def agreement(
    model: Model,
    profiles: Sequence[Profile],
    text: str,
    *,
    context: int = CONTEXT,
    scored: int = SCORED,
    windows: int = WINDOWS,
    seed: int = 0,
    tell: Tell = lambda done, total, label: None,
    cancel: Cancel = lambda: False,
) -> AgreementDocument | None:
    """Measure top-1 agreement, KL and added negative log-likelihood of `profiles` and the controls vs. the full cache.

    Windows of `context` + `scored` tokens are spread evenly over the text. A shorter text is one window, with a quarter
    of it scored. Returns None if cancelled before the first window. Raises BadInput for a text that is too short.
    """
    _check(model, context, scored, windows)
    parts = cuts(_ids(model, text, context + scored), context, scored, windows)
    table = rows(profiles, full_profile(model.profile), [len(parts[0].context)])
    found = list(_windows(model, table, parts, tell, cancel))
    if not found:
        return None
    return AgreementDocument(
        windows=len(found),
        context=len(parts[0].context),
        scored=len(parts[0].scored),
        rows=[_row(row, [far[i] for far in found], seed) for i, row in enumerate(table)],
        complete=len(found) == len(parts),
    )


def _windows(
    model: Model, table: Sequence[Row], parts: Sequence[TextWindow], tell: Tell, cancel: Cancel
) -> Iterator[list[_Window]]:
    """Yield the results of each window, one per row; a window that was cancelled halfway is left out."""
    done, total = 0, len(parts) * len(table)
    for lot, cut in enumerate(parts):
        far: list[_Window] = []
        truth: Tensor | None = None
        for row in table:
            if cancel():
                return
            tell(done, total, f"{row.name} · agreement")
            session = open_session(model.with_profile(row.at(len(cut.context), lot)))
            run_to_end(session.read(cut.context))
            logprobs = predicted(session, cut.scored)
            truth = logprobs if truth is None else truth
            far.append(_Window.of(PredictionDistance.of(logprobs, truth, cut.scored), kept(session)))
            done += 1
        yield far
    tell(done, total, "")


def _check(model: Model, context: int, scored: int, windows: int) -> None:
    if context < 2 or min(scored, windows) < 1:
        raise UsageError("agreement needs 2 context tokens, 1 predicted token, 1 window", code="bad_quality_size")
    if context + scored > model.limit:
        raise ContextOverflow(
            "the agreement test exceeds the context window",
            lines=[f"{context:,} read + {scored:,} predicted > {model.limit:,} tokens"],
            detail={"context": context, "scored": scored, "limit": model.limit},
            try_=["shorter ones"],
        )


def _ids(model: Model, text: str, wanted: int) -> list[int]:
    ids = encode(model.tokenizer, text)
    if len(ids) < min(wanted, LEAST):
        raise BadInput(
            "the text is too short to measure agreement",
            code="text_too_short",
            lines=[f"{len(ids):,} tokens; the minimum is {min(wanted, LEAST):,}"],
            try_=["a longer file"],
        )
    return ids


def cuts(ids: list[int], context: int, scored: int, windows: int) -> list[TextWindow]:
    """Return windows from the start to the end of the text, without overlaps."""
    wide = context + scored
    if len(ids) < wide:
        behind = min(scored, max(1, len(ids) // 4))
        return [TextWindow(ids[:-behind], ids[-behind:])]
    n = min(windows, len(ids) // wide)
    starts = [round(i * (len(ids) - wide) / max(1, n - 1)) for i in range(n)]
    return [TextWindow(ids[s : s + context], ids[s + context : s + wide]) for s in starts]


def predicted(session: GenerationSession, scored: Sequence[int]) -> Tensor:
    """Return log-probabilities [n, V] for each scored token given the ones before it. The session is not changed."""
    lm, past = session.lm, session.cache
    rows = Rows.chain([session.ids[-1], *scored[:-1]], session.committed)
    with torch.inference_mode():
        (made,) = run([ForwardRequest(lm, rows, past, session.view, range(rows.n_rows), states=session.states)])
        return torch.log_softmax(made.logits.float(), dim=-1)


def _estimate(values: list[float], seed: int, *, least: float = -inf, most: float = inf) -> Estimate:
    low, high = bootstrap({"windows": values}, seed, least=least, most=most) or (None, None)
    return Estimate(mean=fmean(values), low=low, high=high)


def _row(row: Row, far: Sequence[_Window], seed: int) -> AgreementRow:
    return AgreementRow(
        profile=row.name,
        role=row.role,
        kept=fmean(f.kept for f in far),
        agreement=_estimate([f.agreement for f in far], seed, least=0, most=1),
        kl=_estimate([f.kl for f in far], seed, least=0),
        delta_nll=_estimate([f.delta_nll for f in far], seed),
        nll=fmean(f.nll for f in far),
    )
