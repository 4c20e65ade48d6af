"""Options of `kvcli summarize`, as types for its signature, and the request made from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import typer

from kvcli.commands.common.flags import option, tokens
from kvcli.summarize.request import Request, Style, Wish, length_of

Form = Literal["md", "txt", "json", "html"]
Citing = Literal["page", "none"]

_said = partial(option, panel="The summary")
_read = partial(option, panel="The documents")
_made = partial(option, panel="How it is made")
_kept = partial(option, panel="The result")

_FILES = "PDF, HTML, EPUB, DOCX, mail, text, ...; - is standard input, paper.pdf:3-9 pages of it, demo:pdf an example."
_MODE = "Read it whole, in parts (map), or whole if it fits."
_CHECK = "Hold every citation against the page it names."
_QUOTES = "Under each point the sentence that confirms it."
_ONLY = "Print the text as it is read, with page marks, and end; no model."
_OUTPUT = "Write it there when it is complete, nothing on stdout; - is stdout."
_EACH = "One summary for each file instead of one of all."
_FRESH = "Ask anew about parts that an earlier run was told about."
_CHUNK = "Parts of at most this many tokens."
_OVERLAP = "Tokens that a part repeats of the one before it."
_DRY = "Print the plan; load no weights."
_PASSWORD = "A file whose first line opens encrypted documents."
_TYPE = "pdf, html, epub, docx, mail, mhtml, notebook, markdown or text, whatever the file looks like."

Files = Annotated[list[str] | None, typer.Argument(metavar="FILE", help=_FILES, show_default=False)]

Length = Annotated[str | None, _said("--length", metavar="short|medium|long|N", help="N is a number of words.")]
Styled = Annotated[Style | None, _said("--style", help="Bullets, prose, an outline or an abstract.")]
Focus = Annotated[str | None, _said("--focus", metavar="TEXT", help="What the reader wants to know about.")]
Lang = Annotated[str | None, _said("--lang", metavar="NAME", help="The language to write in.")]
Cite = Annotated[
    Citing, _said("--cite", help="Name pages (sections, lines where there are none), or nothing.", rare=True)
]
Check = Annotated[bool, _said("--check/--no-check", help=_CHECK, rare=True)]
Quotes = Annotated[bool, _said("--quotes", help=_QUOTES, rare=True)]

Pack = Annotated[str | None, _read("--pack", metavar="NAME.kvs", help="What kvcli pack has read, instead of files.")]
Pages = Annotated[str | None, _read("--pages", metavar="1-20,35", help="These pages only.")]
Kind = Annotated[str | None, _read("--type", metavar="NAME", help=_TYPE, rare=True)]
Password = Annotated[str | None, _read("--password-file", metavar="FILE", help=_PASSWORD, rare=True)]
Only = Annotated[bool, _read("--extract-only", help=_ONLY, rare=True)]
Each = Annotated[bool, _read("--each", help=_EACH)]

Mode = Annotated[Wish, _made("--mode", help=_MODE, rare=True)]
Chunk = Annotated[str | None, _made("--chunk", metavar="N", help=_CHUNK, rare=True)]
Overlap = Annotated[int, _made("--overlap", metavar="N", help=_OVERLAP, rare=True)]
Fresh = Annotated[bool, _made("--fresh", help=_FRESH, rare=True)]

Output = Annotated[str | None, _kept("--output", "-o", metavar="FILE", help=_OUTPUT)]
Format = Annotated[Form | None, _kept("--format", help="Without it, as FILE ends, else md.")]

DryRun = Annotated[bool, option("--dry-run", help=_DRY, panel="The model", rare=True)]


def request_of(params: Mapping[str, Any]) -> Request:
    """Return the request. Raises UsageError for options that exclude each other."""
    length, chunk = params["length"], params["chunk"]
    return Request(
        mode=params["mode"],
        length=length_of(length) if length is not None else None,
        style=params["style"],
        focus=params["focus"],
        lang=params["lang"],
        cite=params["cite"] == "page",
        check=params["check"],
        quotes=params["quotes"],
        chunk=tokens(chunk, "--chunk") if chunk is not None else None,
        overlap=params["overlap"],
    )
