"""Document of a run of the head probes, and the token strip shown in the HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.heads.attention import SHARES, AttentionSummary
from kvcli.heads.choose import choose
from kvcli.heads.headmap import full_heads
from kvcli.heads.needle import OFFSETS
from kvcli.heads.prompt import Judged, Reading, scalar, stacked
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import Findings, by_kv_head, prompt_hash
from kvcli.methods.policies.fastgen.recovery import punctuation
from kvcli.models.text import decode
from kvcli.quality.fingerprint import fingerprint
from kvcli.schemas.heads import (
    HeadsCheck,
    HeadsDocument,
    HeadsKv,
    HeadsPolicy,
    HeadsPrompt,
    HeadsStability,
    HeadsSuggest,
    HeadsTop,
)
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.hf.lm import LM

DIGITS = 6  # decimals of numbers in a document
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
    lm, reading = model.lm, found.reading
    shape = (lm.n_layers, lm.n_kv_heads)
    judged = stacked(reading.layers, lm.n_layers) if reading else None
    forced = _forced(lm, ask, found, shape)
    chosen = choose(judged.mass[ask.settings.measure], judged.cost, ask.settings, forced) if judged else None
    suggest = _suggest(found)
    return HeadsDocument(
        kvcli=__version__,
        model=model.info.id,
        profile=model.profile.name,
        fingerprint=fingerprint(model),
        weights=lm.hashes.of(lm.files.get("weights", [])),
        tokenizer=_hash_of_vocabulary(model),
        layers=lm.n_layers,
        kv_heads=lm.n_kv_heads,
        query_heads=lm.n_heads,
        probed=list(found.layers),
        windows=list(lm.windows),
        ctx=ask.context,
        samples=ask.texts if found.fetched or "reason" in found.query else 0,
        seed=ask.seed,
        probes=list(ask.probes),
        ranked_by=found.ranked_by,
        heads=_rounded(_head_map(found)),
        scalars={name: _rounded(table) for name, table in _scalars(found, shape).items()},
        # of the cheapest candidate, where query heads of a group differ most
        query={name: _rounded(table) for name, table in sorted(found.query.items())}
        | ({"recovered": _rounded(judged.groups[0])} if judged else {}),
        offsets=_offsets(found, shape),
        policy=_policy(lm, ask, judged, chosen, found, forced) if judged and chosen is not None else None,
        prompt=_prompt(ask, reading),
        kv=[_kv_bytes(model, n, judged, chosen, suggest, ask) for n in (ask.context, *ask.others)],
        suggest=suggest,
        check=_check(found),
        stability=_stability(ask, reading, chosen, judged, forced),
        compare=None,
        seconds={name: round(value, 3) for name, value in found.seconds.items()},
        notes=_notes(model, ask, found),
        **_by_head(model, reading, shape),
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


def _head_map(found: Findings) -> Tensor:
    """Return the head map; layers that were not probed get 1."""
    heads = found.heads.clone()
    for layer in set(range(heads.shape[0])) - set(found.layers):
        heads[layer] = 1.0
    return heads


def _scalars(found: Findings, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the tables by which the head grid can be coloured."""
    tables = {"retrieval": _head_map(found)}
    if found.fetched is not None and found.fetched.kl is not None:
        tables["ablate"] = found.fetched.kl
    tables |= {name: by_kv_head(table, shape) for name, table in sorted(found.query.items())}
    if (reading := found.reading) is not None:
        for name in ("sink", "local", "far", "worst", "entropy"):
            tables[name] = scalar(reading, shape, attrgetter(name))
        for i, share in enumerate(SHARES):
            tables[f"n{100 * share:.0f}"] = scalar(reading, shape, lambda gaze, i=i: gaze.needed[i])  # type: ignore[misc]
    return tables


def _offsets(found: Findings, shape: tuple[int, int]) -> list[list[int]] | None:
    """Return the needle offset with most attention over the query heads of each KV head."""
    if found.fetched is None or found.fetched.read is None:
        return None
    of_group = found.fetched.read.view(*shape, -1, len(OFFSETS)).amax(2)
    return [[OFFSETS[i] for i in row] for row in of_group.argmax(-1).tolist()]


def _by_head(model: Model, reading: Reading | None, shape: tuple[int, int]) -> dict[str, Any]:
    """Return attention by distance, by kind of token and on single tokens, per head; empty for heads not measured."""
    if reading is None:
        return {"distances": None, "kinds": None, "top": None}

    def of_heads(of: Callable[[AttentionSummary], list[Any]]) -> list[list[list[Any]]]:
        gazes = [[reading.gazes.get((layer, head)) for head in range(shape[1])] for layer in range(shape[0])]
        return [[of(gaze) if gaze else [] for gaze in row] for row in gazes]

    def top(gaze: AttentionSummary) -> list[HeadsTop]:
        known = ((at, decode(model.tokenizer, [reading.ids[at]]), mass) for at, mass in gaze.top if at >= 0)
        return [HeadsTop(position=at, text=text, mass=round(min(1.0, mass), DIGITS)) for at, text, mass in known]

    kinds = next(iter(reading.gazes.values())).kinds if reading.gazes else {}
    masses = {name: scalar(reading, shape, lambda gaze, n=name: gaze.kinds[n]) for name in kinds}  # type: ignore[misc]
    return {
        "distances": of_heads(lambda gaze: [round(x, DIGITS) for x in gaze.distances]),
        "kinds": {name: _rounded(table) for name, table in masses.items()} or None,
        "top": of_heads(top),
    }


def _rounded(table: Tensor) -> list[list[float]]:
    """Round a table to the decimals of a document."""
    return [[round(value, DIGITS) for value in row] for row in table.double().tolist()]


def _forced(lm: LM, ask: ProbeRequest, found: Findings, shape: tuple[int, int]) -> Tensor:
    """Return the heads [L, K] that keep everything by this run's head map or by the profile's head map."""
    forced = torch.zeros(shape, dtype=torch.bool)
    if found.ranked_by != "prompt":  # a map from the prompt probe must not override the choice from the same probe
        forced |= found.full
    if found.reading is not None and (mapped := ask.settings.full_heads(lm)):
        forced |= torch.tensor(mapped)
    return forced


def _policy(lm: LM, ask: ProbeRequest, judged: Judged, chosen: Tensor, found: Findings, forced: Tensor) -> HeadsPolicy:
    settings = ask.settings
    seen = torch.tensor([window is None and layer in found.layers for layer, window in enumerate(lm.windows)])
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
        mass={name: [_rounded(table) for table in judged.mass[name]] for name in judged.mass},
        cost=[_rounded(table) for table in judged.cost],
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
    if "reason" in found.query and 2 * found.reasoned < ask.texts:
        right, of = found.reasoned, ask.texts
        said.append(f"the model answers {right} of {of} questions over two facts right: the reason probe is unreliable")
    return said


def _hash_of_vocabulary(model: Model) -> str:
    return sha256(json.dumps(sorted(model.tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


# ---- memory ----


def _kv_bytes(
    model: Model, context: int, judged: Judged | None, chosen: Tensor | None, suggest: HeadsSuggest, ask: ProbeRequest
) -> HeadsKv:
    """Return the KV bytes of `context` tokens. Sets of policies grow with the text, protected tokens do not."""
    lm = model.lm
    token = 2 * lm.head_dim * model.new_session().cache.dtype.itemsize  # bytes per token of one head
    whole = torch.tensor([[float(min(context, w or context))] * lm.n_kv_heads for w in lm.windows])
    least = torch.minimum(whole, torch.tensor(float(suggest.sinks + suggest.window)))
    mapped = least.clone()
    for layer, head in suggest.full:
        mapped[layer, head] = whole[layer, head]
    sees_all = {layer for layer, w in enumerate(lm.windows) if w is None}
    for layer in set(range(lm.n_layers)) - set(ask.layers or range(lm.n_layers)) | set(range(lm.n_layers)) - sees_all:
        mapped[layer] = whole[layer]
    policy = None
    if judged is not None and chosen is not None:
        kept = _grown(judged, chosen, context, ask.settings.guarded)
        for layer in range(lm.n_layers):
            if float(judged.cost[-1, layer].max()) <= 0:  # not measured
                kept[layer] = whole[layer]
        policy = int(torch.minimum(kept, whole).sum()) * token
    return HeadsKv(context=context, whole=int(whole.sum()) * token, policy=policy, headmap=int(mapped.sum()) * token)


def _grown(judged: Judged, chosen: Tensor, context: int, guard: int) -> Tensor:
    """Return the tokens [L, K] that the chosen candidates keep at `context`."""
    cost = judged.cost.gather(0, chosen.unsqueeze(0))[0]
    n = max(1.0, float(judged.cost[-1].max()))
    beyond = (cost - guard).clamp(min=0) * context / n
    return torch.where(chosen == judged.cost.shape[0] - 1, float(context), cost.clamp(max=guard) + beyond)
