"""Convert probe findings to a document, and to the token strip shown in the HTML page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.heads import tables
from kvcli.heads.choose import choose
from kvcli.heads.headmap import full_heads
from kvcli.heads.memory import kv_bytes
from kvcli.heads.prompt import Judged, Reading, stacked
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import Findings, prompt_hash
from kvcli.methods.policies.fastgen.recovery import punctuation
from kvcli.models.text import decode
from kvcli.policies.scoring.headmap import read_headmap
from kvcli.quality.fingerprint import fingerprint
from kvcli.schemas.heads import HeadsCheck, HeadsDocument, HeadsPolicy, HeadsPrompt, HeadsStability, HeadsSuggest
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.model import Model

ONE_PROMPT = (
    "a head map from one prompt: heads that this prompt does not use look unneeded; --probe ablate ranks heads by "
    "what is lost without them"
)


@dataclass(frozen=True, slots=True)
class Strip:
    """Token strip of the prompt for the HTML page, in bins of several tokens if the prompt is long."""

    texts: list[str]  # [B]
    kinds: list[int]  # [B] kind of the first token of each bin (kvcli.engine.sequence.state)
    punct: list[int]  # kinds that count as punctuation here
    width: int  # tokens per bin
    tokens: int
    frequent: dict[int, list[bytes]]  # layer -> [K] one byte per bin: 255 = all of its tokens are frequent


def document(model: Model, ask: ProbeRequest, found: Findings) -> HeadsDocument:
    """Return all findings as a document."""
    lm = model.lm
    shape = (lm.n_layers, lm.n_kv_heads)
    judged = stacked(found.reading.layers, lm.n_layers) if found.reading else None
    forced = _forced(ask, found, shape)
    chosen = choose(judged.mass[ask.settings.measure], judged.cost, ask.settings, forced) if judged else None
    seen = torch.tensor([w is None for w in lm.windows]) & torch.isin(
        torch.arange(lm.n_layers), torch.tensor(found.layers)
    )
    suggest = _suggest(found)
    return HeadsDocument(
        kvcli=__version__,
        model=model.info.id,
        profile=model.profile.name,
        fingerprint=fingerprint(model),
        tokenizer=_hash_of_vocabulary(model),
        layers=lm.n_layers,
        kv_heads=lm.n_kv_heads,
        query_heads=lm.n_heads,
        probed=list(found.layers),
        windows=list(lm.windows),
        ctx=ask.context,
        samples=ask.texts if found.fetched or found.reasoning is not None else 0,
        seed=ask.seed,
        probes=list(ask.probes),
        ranked_by=found.ranked_by,
        heads=tables.rounded(tables.head_map(found)),
        scalars={name: tables.rounded(table) for name, table in tables.scalars(found, shape).items()},
        query={name: tables.rounded(table) for name, table in tables.query(found, judged).items()},
        offsets=tables.offsets(found, shape),
        policy=_policy(ask, judged, chosen, seen, forced) if judged and chosen is not None else None,
        distances=tables.by_head(found.reading, shape, lambda g: [round(x, tables.DIGITS) for x in g.distances]),
        kinds=tables.kinds(found.reading, shape),
        top=tables.top(model, found.reading, shape),
        prompt=_prompt(ask, found.reading),
        kv=[kv_bytes(model, n, judged, chosen, suggest, ask) for n in (ask.context, *ask.others)],
        suggest=suggest,
        check=_check(found),
        stability=_stability(ask, found.reading, chosen, judged, forced),
        compare=None,
        seconds={name: round(value, 3) for name, value in found.seconds.items()},
        notes=_notes(model, ask, found),
    )


def strip(model: Model, reading: Reading | None) -> Strip | None:
    """Return the token strip of the prompt, with the frequent tokens of each head; None without the prompt probe."""
    if reading is None:
        return None
    width, n = reading.width, len(reading.ids)
    kinds = reading.kinds.tolist()
    return Strip(
        texts=[decode(model.tokenizer, reading.ids[a : a + width]) for a in range(0, n, width)],
        kinds=[kinds[a] if a < len(kinds) else 0 for a in range(0, n, width)],
        punct=list(punctuation(reading.kinds, reading.settings.punct_cap)),
        width=width,
        tokens=n,
        frequent={layer: [bytes(row.tolist()) for row in table] for layer, table in reading.frequent.items()},
    )


def _forced(ask: ProbeRequest, found: Findings, shape: tuple[int, int]) -> Tensor:
    """Return the heads [L, K] that keep everything by this run's head map or by the profile's head map."""
    forced = torch.zeros(shape, dtype=torch.bool)
    if found.ranked_by != "prompt":  # a map from the prompt probe must not override the choice from the same probe
        forced |= found.full
    if ask.settings.headmap and found.reading is not None:
        forced |= torch.tensor(read_headmap(ask.settings.headmap)) >= ask.settings.headmap_from
    return forced


def _policy(ask: ProbeRequest, judged: Judged, chosen: Tensor, seen: Tensor, forced: Tensor) -> HeadsPolicy:
    settings = ask.settings
    n = float(judged.cost[-1].max())
    by_budget = settings.keep > 0

    def of(table: Tensor) -> Tensor:
        """Return the value of the chosen candidate for each head of full-attention layers."""
        return table.gather(0, chosen.unsqueeze(0))[0][seen]

    return HeadsPolicy(
        criterion=settings.measure,
        recovery=None if by_budget else settings.least,
        keep=settings.keep if by_budget else None,
        candidates=list(settings.candidates),
        chosen=chosen.masked_fill(~seen.unsqueeze(1), -1).tolist(),
        forced=[(layer, head) for layer, head in forced.nonzero().tolist() if bool(seen[layer])],
        mass={name: [tables.rounded(table) for table in judged.mass[name]] for name in judged.mass},
        cost=[tables.rounded(table) for table in judged.cost],
        guard=settings.guarded,
        local=max(settings.guarded, round(settings.reach * n)),
        sinks=settings.sinks,
        kept=float(of(judged.cost).mean() / n),
        recovered=min(1.0, float(of(judged.mass["mean"]).mean())),
        worst=min(1.0, float(of(judged.mass["cvar10"]).mean())),
    )


def _prompt(ask: ProbeRequest, reading: Reading | None) -> HeadsPrompt | None:
    if reading is None:
        return None
    name = ", ".join(d.name for d in ask.documents) or "built-in report"
    return HeadsPrompt(name=name, sha256=prompt_hash(reading.ids), tokens=len(reading.ids), rows=reading.rows)


def _suggest(found: Findings) -> HeadsSuggest:
    full = [(layer, head) for layer, head in full_heads(found.heads) if layer in found.layers]
    total = float(found.score.sum())
    carried = sum(float(found.score[layer, head]) for layer, head in full) / total if total > 0 else 0.0
    return HeadsSuggest(full=full, carried=min(1.0, carried), sinks=found.reach.sinks, window=found.reach.recent)


def _check(found: Findings) -> HeadsCheck | None:
    if found.kept_full is None or found.taken is None or found.fetched is None:
        return None
    whole, restricted, without = found.fetched.right, found.kept_full.right, found.taken.right
    return HeadsCheck.from_attributes(found.kept_full, whole=whole, restricted=restricted, without=without)


def _stability(
    ask: ProbeRequest, reading: Reading | None, chosen: Tensor | None, judged: Judged | None, forced: Tensor
) -> HeadsStability | None:
    """Compare choices made while generating with those at the end of the prompt."""
    if reading is None or chosen is None or judged is None or not reading.later:
        return None
    changed, drift = [], []
    heads = torch.isin(torch.arange(chosen.shape[0]), torch.tensor(sorted(reading.layers)))
    for _, layers in reading.later:
        now = stacked(layers, chosen.shape[0])
        anew = choose(now.mass[ask.settings.measure], now.cost, ask.settings, forced)
        changed.append(int((anew != chosen)[heads].sum()))
        then = judged.mass["mean"].gather(0, chosen.unsqueeze(0))[0]
        moved = (now.mass["mean"].gather(0, chosen.unsqueeze(0))[0] - then).abs()[heads]
        drift.append(min(1.0, float(moved.mean())))
    return HeadsStability(every=ask.stability, tokens=[n for n, _ in reading.later], changed=changed, drift=drift)


def _notes(model: Model, ask: ProbeRequest, found: Findings) -> list[str]:
    said = []
    if found.ranked_by == "prompt":
        said.append(ONE_PROMPT)
    if found.ranked_by in ("needle", "reason", "repeat"):
        said.append(f"the head map ranks heads by attention in the {found.ranked_by} probe, not by lost accuracy")
    sliding = [layer for layer in found.layers if model.lm.windows[layer] is not None]
    if sliding:
        said.append(f"{len(sliding)} layers attend to a sliding window only; they are not restricted")
    if found.fetched is not None and found.fetched.right < found.fetched.of / 2:
        right, of = found.fetched.right, found.fetched.of
        said.append(f"the model answers {right} of {of} questions about hidden facts right: the ranking is unreliable")
    if found.reasoning is not None and 2 * found.reasoned < ask.texts:
        right, of = found.reasoned, ask.texts
        said.append(f"the model answers {right} of {of} questions over two facts right: the reason probe is unreliable")
    return said


def _hash_of_vocabulary(model: Model) -> str:
    vocabulary = sorted(model.tokenizer.get_vocab().items())
    return sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
