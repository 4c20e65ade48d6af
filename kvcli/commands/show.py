"""What commands print on stdout beside answers: JSON documents and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.render.terminal import Terminal, cells
from kvcli.text import neutralise

if TYPE_CHECKING:
    from kvcli.schemas.base import Json
    from kvcli.world import World


def print_json(world: World, document: Json | dict[str, object]) -> None:
    """One document on one line; characters that the stream cannot write are escaped."""
    plain = document if isinstance(document, dict) else document.document()
    world.stdout.write(json.dumps(plain, ensure_ascii=not world.is_utf8("stdout")) + "\n")
    world.stdout.flush()


def print_table(world: World, rows: Sequence[Sequence[str]]) -> None:
    """Rows under their header; with --plain, tabs between the cells and nothing else."""
    clean = [[neutralise(cell, one_line=True) for cell in row] for row in rows]
    if world.options.plain:
        lines = ["\t".join(row) for row in clean]
    else:
        widths = [max(cells(row[i]) for row in clean) for i in range(len(clean[0]))]
        lines = ["  ".join(c + " " * (w - cells(c)) for c, w in zip(r, widths, strict=True)).rstrip() for r in clean]
    Terminal.of(world, "stdout").write("".join(f"{line}\n" for line in lines))
