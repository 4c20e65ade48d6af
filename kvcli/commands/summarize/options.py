"""Options of `kvcli summarize`, and the request made from them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import Options, choice, flag
from kvcli.errors import UsageError
from kvcli.summarize.request import Request, Style, Wish, length_of

Form = Literal["md", "txt", "json", "html"]
Citing = Literal["page", "none"]

_FILES = (
    "PDF, HTML, EPUB, DOCX, mail, text, ...: files, folders, '*.txt', https:// addresses; - = standard input, "
    "paper.pdf:3-9 = pages, demo:pdf = an example."
)
_CITE = "Cite pages (sections or lines in files without pages), or nothing."
_MODE = "Read everything in one part (whole), summarize parts and merge (map-reduce), or whole if it fits (auto)."
_OUTPUT = "Write the complete summary to FILE instead of stdout; - = stdout. With --each, FOLDER/ gets a file for each."
_PARALLEL = "Answer about N parts or files at the same time; the text is the same."
_ON = "Let workers of a Ray cluster answer, --parallel of them or one for each node."
_PASSWORD = "File whose first line is the password of encrypted documents."
_TYPE = "Treat files as pdf, html, epub, docx, mail, mhtml, notebook, markdown or text."


class SummaryOptions(Options, panel="The summary"):
    length: str | None = choice(metavar="short|medium|long|N", help="Length of the summary; N = number of words.")
    style: Style | None = choice(help="Form of the summary.")
    focus: str | None = choice(metavar="TEXT", help="Topic of the summary.")
    lang: str | None = choice(metavar="NAME", help="Language of the summary.")
    cite: Citing = choice(default="page", help=_CITE, rare=True)
    check: bool = choice("--check/--no-check", default=True, help="Verify each citation against its page.", rare=True)
    quotes: bool = flag(help="Print the confirming sentence under each point.", rare=True)


class DocumentOptions(Options, panel="The documents"):
    pack: str | None = choice(metavar="NAME.kvs", help="Documents that kvcli pack has saved, instead of files.")
    pages: str | None = choice(metavar="1-20,35", help="Read only these pages.")
    type_: str | None = choice(metavar="NAME", help=_TYPE, rare=True)
    ocr: o.OcrMode = "auto"
    password_file: str | None = choice(metavar="FILE", help=_PASSWORD, rare=True)
    extract_only: bool = flag(help="Print the extracted text with page marks; no model is used.", rare=True)
    each: bool = flag(help="Write one summary per file instead of one for all files.")


class PartOptions(Options, panel="Reading in parts"):
    mode: Wish = choice(default="auto", help=_MODE, rare=True)
    chunk: str | None = choice(metavar="N", help="Maximum tokens of a part.", rare=True)
    overlap: int = choice(default=0, metavar="N", help="Tokens that a part repeats from the part before it.", rare=True)
    parallel: int = choice(default=1, metavar="N", help=_PARALLEL, rare=True)
    on: str | None = choice(metavar="ray[://ADDRESS]", help=_ON, rare=True)
    no_cache: bool = flag(help="Ignore saved results of an earlier run.", rare=True)


class ResultOptions(Options, panel="The result"):
    output: str | None = choice("-o", metavar="FILE", help=_OUTPUT)
    format: Form | None = choice(help="Output format. Default: by the name of FILE, else md.")


class SummarizeOptions(Options, panel="The model"):
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help=_FILES, show_default=False)] = None
    summary: SummaryOptions
    documents: DocumentOptions
    parts: PartOptions
    result: ResultOptions
    model: o.ModelOption = None
    run: o.RunOptions
    engine: o.EngineOptions
    stats: o.Figures = None
    dry_run: bool = flag(help="Print the plan; load no weights.", rare=True)

    def request(self) -> Request:
        """Return the request of the summary. Raises UsageError for options that exclude each other."""
        said, parts = self.summary, self.parts
        if parts.parallel < 1:
            raise UsageError(f"--parallel {parts.parallel}: at least 1", try_=["--parallel 2"])
        if parts.on is not None and parts.on.partition("://")[0] != "ray":
            raise UsageError(f"--on {parts.on}: ray or ray://ADDRESS", try_=["--on ray"])
        return Request(
            mode=parts.mode, length=length_of(said.length) if said.length is not None else None, style=said.style,
            focus=said.focus, lang=said.lang, cite=said.cite == "page", check=said.check, quotes=said.quotes,
            chunk=o.tokens(parts.chunk, "--chunk") if parts.chunk is not None else None, overlap=parts.overlap,
        )  # fmt: skip
