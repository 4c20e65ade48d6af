"""The prompt probe: where each head looks while one text is read as always, and which policy that would allow."""

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
BINS = 4096  # of the token strip
GAZED = 1 << 21  # rows times tokens that are sorted for each query head
FEWEST = 16  # rows
LAST = 32  # newest rows that a stability run hears
LEAST = 4  # rows below which nothing is said
AGAIN = 4  # times that it asks again

Tell = Callable[[int], None]  # tokens read or written


@dataclass(frozen=True, slots=True)
class Judged:
    """What each candidate would keep of one layer's attention."""

    mass: Mapping[Criterion, Tensor]  # [C, K] each
    groups: Tensor  # [C, H] mean over rows, before a group is taken together
    cost: Tensor  # [C, K] tokens

    @staticmethod
    def of(found: Recovery, gqa: Literal["mean", "min"]) -> Judged:
        """The figures without the rows."""
        mass = {name: found.value(name, gqa).float().cpu() for name in CRITERIA}
        return Judged(mass, found.mass.mean(-1).flatten(1).float().cpu(), found.cost.float().cpu())


@dataclass(slots=True)
class Reading:
    """What the probe found."""

    ids: list[int]
    settings: FastGen
    rows: int = 0  # heard
    gazes: dict[tuple[int, int], AttentionSummary] = field(default_factory=dict)  # by (layer, KV head)
    layers: dict[int, Judged] = field(default_factory=dict)
    frequent: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, B] uint8: 255 = all of a bin's tokens
    kinds: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int8))  # [T]
    later: list[tuple[int, dict[int, Judged]]] = field(default_factory=list)  # tokens written, judged anew

    @property
    def width(self) -> int:
        """Tokens of a bin."""
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
    """Read `ids` and look at `layers`; `kinds` [V] by id. `every` > 0: write on, and ask again each so many tokens."""
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
    """The moment with fewer rows where rows are long: sorting all of them takes minutes a layer and shows no more."""
    m = at.q_pos.shape[0]
    rows = min(m, max(FEWEST, GAZED // n))
    keep = torch.arange(rows, device=at.q_pos.device) * m // rows
    return replace(at, q=at.q[:, keep], q_pos=at.q_pos[keep])


def _later(found: Reading, s: Slots, at: LayerContext) -> None:
    new = at.q_pos >= at.n_prompt
    if int(new.sum()) < LEAST:  # the prompt's end lies just before a boundary
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
    """pos, kept [K, S] -> [K, B] uint8."""
    total = torch.zeros(pos.shape[0], -(-n // width), device=pos.device)
    total.scatter_add_(1, pos.clamp(min=0).long() // width, (kept & (pos >= 0)).float())
    return (total / width * 255).round().to(torch.uint8).cpu()


def stacked(layers: Mapping[int, Judged], n_layers: int) -> Judged:
    """All layers as one: mass and cost [C, L, K], groups [C, L, H]. Layers not judged keep all, for 0 tokens."""
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
    """[L, K] of one figure; 0 where nothing was looked at."""
    table = torch.zeros(*shape, dtype=torch.float64)
    for (layer, head), one in found.gazes.items():
        table[layer, head] = of(one)
    return table
