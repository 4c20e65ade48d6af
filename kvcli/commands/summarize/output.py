"""Output of summaries: streamed to standard output, or written to a file when all of them are complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.common.output import output_file, print_json
from kvcli.commands.summarize.options import Form
from kvcli.documents import split_pages
from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import write_output
from kvcli.render.terminal.terminal import Terminal
from kvcli.safe_output import escaped, neutralise
from kvcli.schemas.base import SURROGATE, Json

if TYPE_CHECKING:
    from kvcli.environment import Environment
    from kvcli.schemas.summary import SummaryDocument
    from kvcli.summarize.result import Point

ENDINGS: dict[str, Form] = {
    "": "md", ".md": "md", ".markdown": "md", ".txt": "txt", ".text": "txt", ".json": "json", ".jsonl": "json",
    ".html": "html", ".htm": "html",
}  # fmt: skip


@dataclass
class SummaryOutput:
    """Destination and format of the summaries of one run."""

    world: Environment
    form: Form
    file: Path | None = None
    folder: Path | None = None  # gets a file for each summary
    held: list[tuple[SummaryDocument, Sequence[Point]]] = field(default_factory=list)  # of an HTML page
    texts: list[str] = field(default_factory=list)  # of a text file
    head: str = ""  # heading of the next text in the file
    written: set[Path] = field(default_factory=set)  # files in the folder
    has_any: bool = False  # there is some requested output, perhaps incomplete; errors alone replace no file

    @property
    def writer(self) -> Callable[[Sequence[Point]], str] | None:
        """Function that formats points as text; None if the format needs all points first."""
        from kvcli.render.summarize.text import WIDTH, plain_text
        from kvcli.summarize.result import written

        if self.form == "md":
            return written
        if self.form != "txt":
            return None
        out = Terminal.of(self.world, "stdout")
        width = max(20, out.width - 1) if out.is_tty and self.file is None else WIDTH
        return lambda points: plain_text(points, width)

    def live(self) -> Callable[[Sequence[Point]], str] | None:
        """Return the formatter of streamed output; the heading is printed with the first point."""
        writer, head = self.writer, self.head
        if self.file is not None or writer is None:
            return None

        def said(points: Sequence[Point]) -> str:
            self.has_any = self.has_any or bool(points)
            return head + writer(points) if points else ""

        return said

    def begin(self, name: str) -> None:
        """Begin a summary. With --each, its heading is the name of the file, or its own file in the folder is."""
        if self.folder is not None:
            stem = Path(split_pages(name)[0]).name.lstrip(".") or "summary"
            names = [f"{stem}{number}.{self.form}" for number in ("", *(f"-{i}" for i in range(2, 10_000)))]
            self.file = next(file for one in names if (file := self.folder / one) not in self.written)
            self.has_any = False
            return
        if self.form in ("json", "html"):
            return
        clean = neutralise(name, one_line=True)
        head = f"# {clean}\n\n" if self.form == "md" else f"{clean}\n{'=' * len(clean)}\n\n"
        self.head = ("\n" if self.has_any else "") + head

    def end(self, document: SummaryDocument, points: Sequence[Point]) -> None:
        """Add a complete summary."""
        self.has_any = True
        if self.form == "html":
            self.held.append((document, points))
        elif self.form == "json":
            self.json(document)
        elif self.file is not None and self.writer is not None:
            self._say(self.writer(points))
        if self.folder is not None and self.file is not None:
            self.close()
            self.written.add(self.file)
            self.texts, self.held, self.has_any = [], [], False

    def text(self, text: str) -> None:
        """Output a text that is no summary."""
        self.has_any = True
        self._say(text)

    def json(self, document: Json, *, counts: bool = True) -> None:
        """Output a JSON document. `counts`: it is requested output, and no error."""
        self.has_any = self.has_any or counts
        if self.file is None:
            print_json(self.world, document)
        else:
            self.texts.append(escaped(json.dumps(document.document(), ensure_ascii=False)) + "\n")

    def close(self) -> None:
        """Write the file or the page. Only a run that was not interrupted calls this."""
        if self.form == "html" and self.held:
            from kvcli.render.summarize.html import html

            self._say(html(self.held))
        if self.file is None or not self.has_any:
            return
        with writing(self.file, try_=["-o FILE elsewhere"]):
            write_output(self.file, SURROGATE.sub("\N{REPLACEMENT CHARACTER}", "".join(self.texts)))
        if not self.world.options.quiet:
            Terminal.of(self.world, "stderr").line((f"wrote {self.file}", ""))

    def _say(self, text: str) -> None:
        text, self.head = self.head + text, ""
        if self.file is not None:
            self.texts.append(text)
        else:
            Terminal.of(self.world, "stdout").write(text)


def outlet(
    world: Environment, form: Form | None, output: str | None, inputs: Sequence[str], *, each: bool = False
) -> SummaryOutput:
    """Return the destination. Refuses files that cannot be written, before anything is read."""
    if world.options.json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} exclude each other", try_=["only one of them"])
    form = "json" if world.options.json else form
    if output is None or output == "-":
        return SummaryOutput(world, form or "md")
    if not output:
        raise UsageError("-o needs a file name", try_=["-o FILE", "-o - for standard output"])
    file = world.path(output)
    if each and (output.endswith("/") or file.is_dir()):
        with writing(output, try_=["-o FOLDER/ elsewhere"]):
            file.mkdir(exist_ok=True)
        return SummaryOutput(world, form or "md", file, file)
    if any(_same(file, world, name) for typed in inputs for name in (typed, split_pages(typed)[0])):
        raise UsageError(f"-o {output} would overwrite an input file", try_=["another name"])
    ending = ENDINGS.get(file.suffix.lower())
    if world.options.json and file.suffix and ending not in (None, "json"):
        raise UsageError(f"--json and -o {output} exclude each other", try_=["-o FILE.json", "leave out --json"])
    file, form = output_file(world, output, ENDINGS, form)
    return SummaryOutput(world, form, file)


def _same(file: Path, world: Environment, name: str) -> bool:
    try:
        return file.samefile(world.path(name))
    except (OSError, BadInput):  # the input does not exist
        return False
