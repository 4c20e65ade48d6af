"""Terminal view of a model's heads: a grid of layers and KV heads, facts about it, and the next command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kvcli.render.heads import cells as c
from kvcli.render.heads.text import facts, top_table
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import columns, fitting
from kvcli.render.terminal.terminal import Span, folded, styled, text_width
from kvcli.render.turn.turn_summary import joined

if TYPE_CHECKING:
    from kvcli.schemas.heads import HeadsDocument

Look = Literal["truecolor", "shade", "digit"]
CELL = 3  # columns of a head, with the gap after it
LEAST = 2  # heads in a line, however narrow the terminal


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
