"""Heads of a model in words, tables and a grid of layers and KV heads, for the terminal, the HTML page and Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kvcli.render import report
from kvcli.render.heads import cells as c
from kvcli.render.report import Text
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import columns, fitting
from kvcli.render.terminal.terminal import Span, folded, styled, text_width
from kvcli.render.turn.turn_summary import joined

if TYPE_CHECKING:
    from kvcli.schemas.heads import HeadsDocument, HeadsKv

Look = Literal["truecolor", "shade", "digit"]
CELL = 3  # columns of a head, with the gap after it
LEAST = 2  # heads in a line, however narrow the terminal
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
    places.sort(key=lambda at: -document.heads[at[0]][at[1]])
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


def _cell(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def markdown(document: HeadsDocument) -> str:
    """Return text for an issue: the facts, the grid as letters or digits, and the list of heads."""
    show = "policy" if document.policy is not None else "retrieval"
    lines = []
    for layer in document.probed:
        marks = " ".join(c.mark(document, show, layer, head) for head in range(document.kv_heads))
        lines.append(f"L{layer:02d} {marks}  {c.margin(document, show, layer)}")
    if show == "policy" and document.policy is not None:
        pairs = zip(c.letters(document), document.policy.candidates, strict=True)
        lines.append("; ".join(f"{letter} {name}" for letter, name in pairs))
    return report.markdown(
        [
            Text("title", f"Heads of {document.model}"),
            *(Text("item", text) for text in facts(document)),
            *(Text("note", note) for note in document.notes),
            Text("heading", c.WORDS[show]),
            Text("code", "\n".join(lines)),
            report.ReportTable(top_table(document, 20)),
        ]
    )


# ---- terminal ----


def heads_lines(
    document: HeadsDocument, show: str, top: int, width: int, look: Look, folder: str | None
) -> Iterator[list[Span]]:
    """Yield the grid, its legend, the facts, the most important heads, notes, and the command to use them."""
    for line in joined(_title(document, show), width):
        yield [(line, "bold")]
    yield from _grid(document, show, width, look)
    yield from _legend(document, show, width, look)
    yield []
    for text in facts(document):
        yield from styled(text, width, "")
    if top:
        yield []
        heads = top_table(document, top)
        for i, line in enumerate(columns(fitting(heads, width - 1, heads[0][:1:-1]), width - 1)):
            yield [(line, "" if i else "dim")]
    for note in document.notes:
        yield from styled(f"note: {note}", width, "dim")
    word, command = next_step(document, folder)
    if text_width(word + command) + 4 < width:
        yield [(f"{word}:  ", ""), (command, "green")]
        return
    yield [(f"{word}:", "")]
    for line in folded(command, width, 2):
        yield [(f"  {line}", "green")]


def plain_rows(document: HeadsDocument, show: str) -> list[list[str]]:
    """Return a digit or letter per head and the share that each layer keeps, for programs that read no JSON."""
    names = ["layer", *(f"h{head}" for head in range(document.kv_heads)), "kept"]
    rows = [
        [
            str(layer),
            *(c.mark(document, show, layer, head) for head in range(document.kv_heads)),
            c.kept(document, layer),
        ]
        for layer in document.probed
    ]
    return [names, *rows]


def _title(document: HeadsDocument, show: str) -> list[str]:
    return [
        f"{c.WORDS.get(show, show)} per head",
        document.model,
        f"{document.layers} layers × {document.kv_heads} KV heads",
        f"ctx {f.count(document.ctx)}",
        f"{document.samples} texts" if document.samples and show in ("retrieval", "ablate", "needle") else "",
        f"{document.policy.criterion}" if document.policy and show == "policy" else "",
    ]


def _grid(document: HeadsDocument, show: str, width: int, look: Look) -> Iterator[list[Span]]:
    """Yield blocks of heads below each other if they do not fit side by side."""
    label = len(str(document.layers - 1)) + 3
    margins = {layer: c.margin(document, show, layer) for layer in document.probed}
    room = width - 1 - label - max(map(text_width, margins.values())) - 2
    block = max(LEAST, min(document.kv_heads, room // CELL))
    for first in range(0, document.kv_heads, block):
        heads = range(first, min(first + block, document.kv_heads))
        if block < document.kv_heads:
            yield [(f"heads {heads[0]} to {heads[-1]} of {document.kv_heads}", "dim")]
        yield [(" " * label + "".join(f"{head:>2} " for head in heads).rstrip(), "dim")]
        for layer in document.probed:
            name = f" L{layer:0{label - 3}d} "
            spans = [span for head in heads for span in c.cell(document, show, layer, head, look)]
            end = f" {margins[layer]}" if heads[-1] == document.kv_heads - 1 and room >= CELL * LEAST else ""
            yield [(name, "dim"), *spans, (end, "")]


def _legend(document: HeadsDocument, show: str, width: int, look: Look) -> Iterator[list[Span]]:
    if show == "policy" and document.policy is not None:
        used = {i for layer in document.probed for i in document.policy.chosen[layer]}
        names = enumerate(document.policy.candidates)
        said = [f"{c.letters(document)[i]} {name}" for i, name in names if i in used]
        said += ["W window only"] if -1 in used else []
        for line in joined(said, width, between="   "):
            yield [(line, "")]
        return
    yield [*c.scale(document, show, look)]


def next_step(document: HeadsDocument, folder: str | None) -> tuple[str, str]:
    """Return the next command and its purpose."""
    model = document.model
    if document.ranked_by == "prompt":
        return "rank heads", f"kvcli profile-heads {model} --probe ablate"
    if folder is None:
        return "save the map", f"kvcli profile-heads {model} --probe {document.ranked_by} --emit json"
    return "use it", f"kvcli chat {model} -P fastgen --set policy.headmap={folder}/profile.json"
