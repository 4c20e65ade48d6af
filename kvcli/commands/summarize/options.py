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
_made = partial(option, panel="Reading in parts")
_kept = partial(option, panel="The result")

_FILES = "PDF, HTML, EPUB, DOCX, mail, text, ...; - = standard input, paper.pdf:3-9 = pages, demo:pdf = an example."
_MODE = "Read everything in one part (whole), summarize parts and merge (map-reduce), or whole if it fits (auto)."
_CHECK = "Verify each citation against its page."
_QUOTES = "Print the confirming sentence under each point."
_ONLY = "Print the extracted text with page marks; no model is used."
_OUTPUT = "Write the complete summary to FILE instead of stdout; - = stdout."
_EACH = "Write one summary per file instead of one for all files."
_NO_CACHE = "Ignore saved results of an earlier run."
_CHUNK = "Maximum tokens of a part."
_OVERLAP = "Tokens that a part repeats from the part before it."
_DRY = "Print the plan; load no weights."
_PASSWORD = "File whose first line is the password of encrypted documents."
_TYPE = "Treat files as pdf, html, epub, docx, mail, mhtml, notebook, markdown or text."

Files = Annotated[list[str] | None, typer.Argument(metavar="FILE", help=_FILES, show_default=False)]

Length = Annotated[
    str | None, _said("--length", metavar="short|medium|long|N", help="Length of the summary; N = number of words.")
]
Styled = Annotated[Style | None, _said("--style", help="Form of the summary.")]
Focus = Annotated[str | None, _said("--focus", metavar="TEXT", help="Topic of the summary.")]
Lang = Annotated[str | None, _said("--lang", metavar="NAME", help="Language of the summary.")]
Cite = Annotated[
    Citing, _said("--cite", help="Cite pages (sections or lines in files without pages), or nothing.", rare=True)
]
Check = Annotated[bool, _said("--check/--no-check", help=_CHECK, rare=True)]
Quotes = Annotated[bool, _said("--quotes", help=_QUOTES, rare=True)]

Pack = Annotated[
    str | None, _read("--pack", metavar="NAME.kvs", help="Documents that kvcli pack has saved, instead of files.")
]
Pages = Annotated[str | None, _read("--pages", metavar="1-20,35", help="Read only these pages.")]
Kind = Annotated[str | None, _read("--type", metavar="NAME", help=_TYPE, rare=True)]
Password = Annotated[str | None, _read("--password-file", metavar="FILE", help=_PASSWORD, rare=True)]
Only = Annotated[bool, _read("--extract-only", help=_ONLY, rare=True)]
Each = Annotated[bool, _read("--each", help=_EACH)]

Mode = Annotated[Wish, _made("--mode", help=_MODE, rare=True)]
Chunk = Annotated[str | None, _made("--chunk", metavar="N", help=_CHUNK, rare=True)]
Overlap = Annotated[int, _made("--overlap", metavar="N", help=_OVERLAP, rare=True)]
NoCache = Annotated[bool, _made("--no-cache", help=_NO_CACHE, rare=True)]

Output = Annotated[str | None, _kept("--output", "-o", metavar="FILE", help=_OUTPUT)]
Format = Annotated[Form | None, _kept("--format", help="Output format. Default: by the name of FILE, else md.")]

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
