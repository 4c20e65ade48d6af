"""Lines before the first turn and after each turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcli.api import Turn
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.stats import FEW, Stats
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.terminal import folded, text_width

DOT = " · "


@dataclass(frozen=True, slots=True)
class HeaderFacts:
    """Facts of the header besides the model's. Empty fields are left out."""

    version: str
    profile: str
    exactness: str = ""  # exact | certified | approx
    context: int = 0  # context window in use, tokens
    estimate: int = 0  # estimated bytes of the run
    threads: int = 0  # on a CPU
    draft: str = ""  # draft model


def header(info: ModelInfo, opening: HeaderFacts, width: int) -> list[str]:
    """Return two lines: model and profile, then context window and memory."""
    model = f"{info.id} (bundled, toy answers)" if info.id == "demo" else info.id
    promise = f" ({opening.exactness})" if opening.exactness else ""
    has_threads = opening.threads and info.device == "cpu"
    place = info.device + (f", {f.plural(opening.threads, 'thread')}" if has_threads else "")
    quant = "" if info.quant in ("", "none") else info.quant
    limit = f" (model limit {f.count(info.limit)})" if info.limit else ""
    first = [f"kvcli {opening.version}", model, f"{opening.profile}{promise}", quant, place]
    second = [
        f"context {f.count(opening.context or info.limit)}{limit}",
        f"draft model {opening.draft}" if opening.draft else "",
        f"estimated memory {f.long_size(opening.estimate)}" if opening.estimate else "",
        "/help",
    ]
    return [*joined(first, width), *joined(second, width)]


def one_line_summary(turn: Turn, width: int) -> list[str]:
    """Return one line with as many figures as fit, the most useful first, and a second one if the answer was cut."""
    stats = turn.stats
    parts = [
        _count(stats) if stats.new >= FEW else f"{_count(stats)} in {f.seconds(stats.decode)}",
        _approx(stats),
        *_speed(stats),
        ", ".join([f"prompt {f.count(stats.prompt)} tokens", *found]) if (found := [*_unread(stats)]) else "",
        f"{stats.tokens_per_pass:.2f} tok/pass" if stats.drafted_passes else "",
        f"KV {f.tiers(stats.kv)}" if stats.kv_bytes else "",
        f"peak {f.long_size(stats.peak)}" if stats.peak else "",
    ]
    line = f"  {parts[0]}"
    for part in filter(None, parts[1:]):
        if text_width(longer := f"{line}{DOT}{part}") < width:
            line = longer
    return [line, *joined(_cut(turn), width, indent="  ")]


def summary(turn: Turn, width: int) -> list[str]:
    """Return up to three lines, more on a narrow terminal: speed, prefill and drafting, memory."""
    stats = turn.stats
    took = f"{_count(stats)} in {f.seconds(stats.decode)}"
    rows = ([took, _approx(stats), *_speed(stats)], _cut(turn), _sampling(stats), _work(stats), _memory(stats))
    return [line for parts in rows for line in joined(parts, width, indent="  ")]


def _cut(turn: Turn) -> list[str]:
    return ["the answer reached its length limit (-n allows a longer one)"] if turn.finish == "length" else []


def _sampling(stats: Stats) -> list[str]:
    """Return `sampling: temperature 0.6, top_k 20`, with the settings that have an effect."""
    told = ", ".join(f"{key} {value:g}" for key, value in stats.sampling.items())
    return [f"sampling: {told}"] if told else []


def _approx(stats: Stats) -> str:
    return "approx" if stats.approx else ""


def _count(stats: Stats) -> str:
    return f"{f.count(stats.new)} {'token' if stats.new == 1 else 'tokens'}"


def _speed(stats: Stats) -> list[str]:
    gain = stats.vs_plain
    plain = "" if gain is None else f" ({gain:.1f}× plain)"
    return [
        f"{f.rate(stats.decode_tok_s)}{plain}" if stats.decode > 0 and stats.new >= FEW else "",
        f"first token {f.seconds(stats.first_token)}" if stats.first_token > 0 else "",
    ]


def _work(stats: Stats) -> list[str]:
    unread = f" ({found})" if (found := ", ".join(_unread(stats))) else ""
    how = f" {f.ORDERS[stats.order]}" if stats.order == "layers" else ""
    share = f"{f.percent(stats.drafted_share)} of {f.count(stats.passes)} passes"
    length = f"acceptance length {stats.mean_acceptance_length:.2f}"
    return [
        f"prompt {f.count(stats.prompt)} tokens{unread} read{how} in {f.seconds(stats.read)}" if stats.prompt else "",
        f"drafting: {share}, {length}, {stats.tokens_per_pass:.2f} tokens per pass" if stats.drafted_passes else "",
        f"drafting paused for {f.count(stats.paused_passes)} passes" if stats.paused_passes else "",
    ]


def _unread(stats: Stats) -> Iterator[str]:
    """Yield counts of prompt tokens that were not computed."""
    for word, n in (("from prefix cache", stats.cached), ("reused from other text", stats.reused)):
        if n:
            yield f"{f.count(n)} {word}"


def _memory(stats: Stats) -> list[str]:
    fp16 = stats.kv_fp16
    guess = f", estimate {f.long_size(stats.estimate)}" if stats.estimate else ""
    before = f" ({f.long_size(fp16)} at 16 bits)" if fp16 > 1.05 * stats.kv_bytes else ""
    return [
        f"KV {f.long_size(stats.kv_bytes)}{before}" if stats.kv_bytes else "",
        f"host KV read: {stats.host_access}" if stats.host_access else "",
        f"{f.percent(stats.page_hit_rate)} of selected pages were already on the device"
        if stats.page_hit_rate is not None
        else "",
        f"peak {f.long_size(stats.peak)}{guess}" if stats.peak else "",
        f"GPU memory {f.long_size(stats.used)} of {f.long_size(stats.total)} in use" if stats.used else "",
        f"context {f.count(stats.context)} of {f.count(stats.limit)}" if stats.limit else "",
    ]


def joined(parts: Iterable[str], width: int, indent: str = "", between: str = DOT) -> list[str]:
    """Join parts side by side, on as many lines as they need. Only a part longer than a line is split."""
    lines: list[str] = []
    for part in filter(None, parts):
        longer = f"{lines[-1]}{between}{part}" if lines else ""
        if lines and text_width(longer) < width:
            lines[-1] = longer
        else:
            lines += [indent + line for line in folded(part, width, len(indent))]
    return lines
