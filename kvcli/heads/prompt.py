"""Prompt probe: attention statistics of each head during a normal prefill, and the FastGen candidates they allow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcli.engine.engine import iterate_events
from kvcli.heads.attention import AttentionSummary, gaze
from kvcli.heads.query_probe import listening
from kvcli.methods.policies.fastgen.recovery import Criterion, Recovery, recover

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.policy.policy import LayerContext
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import Slots
    from kvcli.methods.policies.fastgen.policy import FastGen

CRITERIA: tuple[Criterion, ...] = ("cvar10", "mean", "p05")
BINS = 4096  # bins of the token strip
GAZED = 1 << 21  # most rows times tokens sorted for each query head
FEWEST = 16  # least rows summarized
LAST = 32  # newest rows recorded by a stability run
LEAST = 4  # fewer new rows are not measured
AGAIN = 4  # measurements repeated while generating

Tell = Callable[[int], None]  # tokens prefilled or generated


@dataclass(frozen=True, slots=True)
class Judged:
    """Attention mass that each candidate would keep in one layer, and its cost."""

    mass: Mapping[Criterion, Tensor]  # [C, K] each
    groups: Tensor  # [C, H] mean over rows, per query head
    cost: Tensor  # [C, K] tokens kept

    @staticmethod
    def of(found: Recovery, gqa: Literal["mean", "min"]) -> Judged:
        """Reduce a recovery measurement over its rows."""
        mass = {name: found.value(name, gqa).float().cpu() for name in CRITERIA}
        return Judged(mass, found.mass.mean(-1).flatten(1).float().cpu(), found.cost.float().cpu())


@dataclass(slots=True)
class Reading:
    """Result of the prompt probe."""

    ids: list[int]
    settings: FastGen
    rows: int = 0  # number of recorded rows
    gazes: dict[tuple[int, int], AttentionSummary] = field(default_factory=dict)  # by (layer, KV head)
    layers: dict[int, Judged] = field(default_factory=dict)
    frequent: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, B] uint8: 255 = all of a bin's tokens
    kinds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int8))  # [T]
    later: list[tuple[int, dict[int, Judged]]] = field(default_factory=list)  # (tokens generated, new measurement)

    @property
    def width(self) -> int:
        """Tokens per bin."""
        return -(-len(self.ids) // BINS)


def read_prompt(
    model: Model,
    ids: list[int],
    settings: FastGen,
    kinds: Tensor,
    layers: Collection[int],
    tell: Tell = lambda tokens: None,
    every: int = 0,
) -> Reading:
    """Prefill `ids` and measure `layers`; `kinds` [V] by id. `every` > 0: generate, and measure each `every` tokens."""
    found = Reading(ids, settings)

    def hear(s: Slots, at: LayerContext) -> None:
        if at.layer not in layers or at.window is not None or not at.q_pos.shape[0]:
            return
        if at.phase == "read":
            _first(found, s, at)
        else:
            _later(found, s, at)

    session = listening(model, settings.probes, hear, kinds, recent=min(every, LAST), every=every or None)
    for done in iterate_events(session.read(ids)):
        tell(done)
    if every:
        _write(session, every, tell)
    return found


def _first(found: Reading, s: Slots, at: LayerContext) -> None:
    settings = found.settings
    few = _thinned(at, s.n_slots)
    for head in range(s.k.shape[0]):
        found.gazes[at.layer, head] = gaze(s, few, head, settings.sinks, max(1, settings.recent))
    judged = _judged(s, at, settings)
    found.frequent[at.layer] = _binned(s.pos, judged.frequent, found.width, len(found.ids))
    found.layers[at.layer] = Judged.of(judged, settings.gqa)
    found.kinds, found.rows = at.kinds, at.q_pos.shape[0]


def _judged(s: Slots, at: LayerContext, settings: FastGen) -> Recovery:
    own = settings, at.scale, at.softcap, at.window
    return recover(at.q, at.q_pos, s, at.kinds, *own, sink=at.sink, n_prompt=at.n_prompt)


def _thinned(at: LayerContext, n: int) -> LayerContext:
    """Return the context with fewer rows if rows are long: sorting all takes minutes per layer and shows no more."""
    m = at.q_pos.shape[0]
    rows = min(m, max(FEWEST, GAZED // n))
    keep = torch.arange(rows, device=at.q_pos.device) * m // rows
    return replace(at, q=at.q[:, keep], q_pos=at.q_pos[keep])


def _later(found: Reading, s: Slots, at: LayerContext) -> None:
    new = at.q_pos >= at.n_prompt
    if int(new.sum()) < LEAST:  # the prompt ended just before a compression point
        return
    at = replace(at, q=at.q[:, new], q_pos=at.q_pos[new])
    settings = found.settings
    judged = _judged(s, at, settings)
    written = int(s.pos.max()) + 1 - at.n_prompt
    if not found.later or found.later[-1][0] != written:
        found.later.append((written, {}))
    found.later[-1][1][at.layer] = Judged.of(judged, settings.gqa)


def _write(session: GenerationSession, every: int, tell: Tell) -> None:
    for step in iterate_events(session.stream(min(AGAIN * every + 1, session.lm.limit - len(session.ids)))):
        tell(len(step.new))


def _binned(pos: Tensor, kept: Tensor, width: int, n: int) -> Tensor:
    """Return the share of kept tokens per bin, uint8 [K, B], from positions and mask [K, S]."""
    total = torch.zeros(pos.shape[0], -(-n // width), device=pos.device)
    total.scatter_add_(1, pos.clamp(min=0).long() // width, (kept & (pos >= 0)).float())
    return (total / width * 255).round().to(torch.uint8).cpu()


def stacked(layers: Mapping[int, Judged], n_layers: int) -> Judged:
    """Stack all layers: mass and cost [C, L, K], groups [C, L, H]. Layers not measured keep all, at a cost of 0."""
    like = next(iter(layers.values()))
    c, k = like.cost.shape
    mass = {name: torch.ones(c, n_layers, k) for name in CRITERIA}
    cost = torch.zeros(c, n_layers, k)
    groups = torch.ones(c, n_layers, like.groups.shape[1])
    for layer, one in layers.items():
        for name in CRITERIA:
            mass[name][:, layer] = one.mass[name]
        cost[:, layer], groups[:, layer] = one.cost, one.groups
    return Judged(mass, groups, cost)


def scalar(found: Reading, shape: Sequence[int], of: Callable[[AttentionSummary], float]) -> Tensor:
    """Return a table [L, K] of one statistic; 0 for heads not measured."""
    table = torch.zeros(*shape, dtype=torch.float64)
    for (layer, head), one in found.gazes.items():
        table[layer, head] = of(one)
    return table
