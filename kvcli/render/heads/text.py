"""Heads of a model in words and tables, for the terminal, the HTML page and markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.render.heads import cells as c
from kvcli.render.terminal import terminal as f
from kvcli.safe_output import neutralise

if TYPE_CHECKING:
    from kvcli.schemas.heads import HeadsDocument, HeadsKv

# column of the list of heads -> scalar of the document
LISTED = {
    "map": "retrieval",
    "loss": "ablate",
    "needle": "needle",
    "reason": "reason",
    "repeat": "repeat",
    "far": "far",
    "sink": "sink",
    "n90": "n90",
    "entropy": "entropy",
}


def facts(document: HeadsDocument, *, beside: bool = False) -> Iterator[str]:
    """Yield a summary of the figures, a sentence each; `beside` leaves out those that the page shows large."""
    if (policy := document.policy) is not None and not beside:
        yield (
            f"policies keep {100 * policy.kept:.1f} % of the tokens of this prompt; attention recovered: "
            f"mean {policy.recovered:.3f}, worst tenth of rows {policy.worst:.3f}"
        )
    for kv in document.kv[beside:]:
        yield _memory(kv, document)
    suggest, total = document.suggest, len(document.probed) * document.kv_heads
    if document.ranked_by != "prompt" and not beside:
        what = {
            "ablate": "the loss from restricting heads",
            "needle": "the weight on hidden facts",
            "reason": "the weight on facts that other facts point to",
        }.get(document.ranked_by, "the weight on repeats")
        yield (
            f"{len(suggest.full)} of {total} heads carry {100 * suggest.carried:.0f} % of {what}; "
            f"the others need only the first {suggest.sinks} and newest {suggest.window} tokens"
        )
    if (check := document.check) is not None and not beside:
        yield (
            f"hidden facts answered correctly: {check.whole} of {check.of} with the full KV cache, "
            f"{check.restricted} with it for these heads only, {check.without} with these heads restricted"
        )
    if (stability := document.stability) is not None and stability.tokens:
        said = ", ".join(f"{n} after {f.count(t)}" for n, t in zip(stability.changed, stability.tokens, strict=True))
        yield f"policy changes during generation: {said} tokens; mass moved by up to {max(stability.drift):.3f}"
    if document.compare is not None:
        yield _compared(document)


def _memory(kv: HeadsKv, document: HeadsDocument) -> str:
    said = [f"{f.long_size(kv.policy)} with these policies"] if kv.policy is not None else []
    if document.ranked_by != "prompt":
        said.append(f"{f.long_size(kv.headmap)} with the head map")
    return f"KV cache at {f.count(kv.context)} tokens: {f.long_size(kv.whole)} in full → {', '.join(said) or 'unknown'}"


def _compared(document: HeadsDocument) -> str:
    assert document.compare is not None
    other = document.compare
    rho = "no ranks to compare" if other.spearman is None else f"rank correlation {other.spearman:.2f}"
    flips = "" if other.changed is None else f", {other.changed} heads with another policy"
    largest = max((abs(value) for row in other.difference for value in row), default=0.0)
    return f"against {other.name}, {other.scalar}: {rho}, largest difference {largest:.2g}{flips}"


def top_table(document: HeadsDocument, top: int) -> list[list[str]]:
    """Return the heads with the largest scores in the map."""
    there = {column: name for column, name in LISTED.items() if name in document.scalars}
    places = [(layer, head) for layer in document.probed for head in range(document.kv_heads)]
    places.sort(key=lambda at: -_score(document, *at))
    policy = ["policy"] if document.policy is not None else []
    offset = ["at"] if document.offsets is not None else []
    rows = [["head", *there, *offset, *policy]]
    for layer, head in places[:top]:
        row = [f"L{layer:02d}H{head}", *(_cell(document.scalars[name][layer][head]) for name in there.values())]
        if document.offsets is not None:
            row.append(f"{document.offsets[layer][head]:+d}")
        if document.policy is not None:
            chosen = document.policy.chosen[layer][head]
            row.append("window" if chosen < 0 else document.policy.candidates[chosen])
        rows.append(row)
    return rows


def _score(document: HeadsDocument, layer: int, head: int) -> float:
    return document.heads[layer][head]


def _cell(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def markdown(document: HeadsDocument) -> str:
    """Return text for an issue: the facts, the grid as letters or digits, and the list of heads."""
    show = "policy" if document.policy is not None else "retrieval"
    lines = [f"## Heads of {neutralise(document.model, one_line=True)}", ""]
    lines += [f"- {text}" for text in facts(document)]
    lines += [f"- note: {note}" for note in document.notes]
    lines += ["", f"{c.WORDS[show]}:", "", "```"]
    for layer in document.probed:
        marks = " ".join(c.mark(document, show, layer, head) for head in range(document.kv_heads))
        lines.append(f"L{layer:02d} {marks}  {c.margin(document, show, layer)}")
    if show == "policy" and document.policy is not None:
        pairs = zip(c.letters(document), document.policy.candidates, strict=True)
        lines.append("; ".join(f"{letter} {name}" for letter, name in pairs))
    lines += ["```", ""]
    first, *rest = top_table(document, 20)
    lines += [_row(first), _row(["---"] + ["---:"] * (len(first) - 1)), *map(_row, rest)]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
