"""Output of `kvcli profile-heads`: tables and files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.common.flags import listed
from kvcli.commands.common.output import print_cells, print_json
from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import private_folder, write_private
from kvcli.heads.headmap import DUO_CONFIG, PROFILE, TSV
from kvcli.render.heads.html import html
from kvcli.render.heads.text import Look, heads_lines, markdown, plain_rows
from kvcli.render.terminal.terminal import Terminal
from kvcli.settings.small_file import toml_value

if TYPE_CHECKING:
    from kvcli.commands.heads.options import HeadsOptions
    from kvcli.environment import Environment
    from kvcli.heads.report import Strip
    from kvcli.heads.request import ProbeRequest
    from kvcli.schemas.heads import HeadsDocument

FORMS = ("html", "json", "npz", "tsv", "md", "toml")
TRUECOLOR = ("truecolor", "24bit")  # values of COLORTERM of terminals with any colour
# scalars by the probe that computes them, for the check of --show before the run
SHOWN = {
    "policy": "prompt", "sink": "prompt", "local": "prompt", "far": "prompt", "worst": "prompt", "entropy": "prompt",
    "n50": "prompt", "n90": "prompt", "n95": "prompt", "n99": "prompt",
    "ablate": "ablate", "needle": "needle", "repeat": "repeat", "retrieval": "",
}  # fmt: skip


@dataclass(frozen=True)
class HeadsOutput:
    """Destination of the results of one run."""

    world: Environment
    show: str
    top: int
    forms: tuple[str, ...]
    folder: Path
    compare: tuple[Path, str, str] | None  # folder or file, as typed, and what to compare

    def finish(self, document: HeadsDocument, tokens: Strip | None) -> None:
        """Compare, write and print the results. Files come first, because the last line tells how to use them."""
        if self.compare is not None:
            from kvcli.heads.headmap import compare

            document.compare = compare(document, *self.compare)
        if self.forms:
            self._write(list(self._files(document, tokens)))
        self._print(document)

    def _files(self, document: HeadsDocument, tokens: Strip | None) -> Iterator[tuple[str, str | bytes]]:
        from kvcli.heads import headmap

        for form in self.forms:
            if form == "json":
                yield PROFILE, document.model_dump_json(by_alias=True) + "\n"
            elif form == "html":
                yield "heads.html", html(document, tokens, self._where)
            elif form == "npz":
                yield "profile.npz", headmap.arrays(document)
            elif form == "tsv":
                yield TSV, headmap.duo_tsv(document.heads)
                yield DUO_CONFIG, headmap.duo_config(document)
                if line := headmap.retrieval_line(document):
                    yield "retrieval_heads.json", line
            elif form == "md":
                yield "heads.md", markdown(document)
            elif form == "toml":
                yield "profile.toml", _profile(document, self.folder / PROFILE)

    def _write(self, held: Sequence[tuple[str, str | bytes]]) -> None:
        """Write each file in one step, readable by its owner only. Replaced files are reported."""
        new, old = list[str](), list[str]()
        with writing(f"to {self.folder}", try_=["--out DIR"]):
            private_folder(self.folder)
            for name, text in held:
                (old if (self.folder / name).exists() else new).append(name)
                write_private(self.folder / name, text)
        if not self.world.options.quiet:
            said = [f"wrote {', '.join(new)}" if new else "", f"replaced {', '.join(old)}" if old else ""]
            self.world.stderr.write(f"{'; '.join(filter(None, said))} in {_short(self.folder, self.world.cwd)}/\n")

    @property
    def _where(self) -> str | None:
        """Folder of the map as the user would type it; None = no map is written."""
        return _short(self.folder, self.world.cwd) if "json" in self.forms else None

    def _print(self, document: HeadsDocument) -> None:
        if self.world.options.json:
            print_json(self.world, document)
            return
        out = Terminal.of(self.world, "stdout")
        if self.world.options.plain:
            print_cells(self.world, plain_rows(document, self.show))
            return
        is_true = out.colour and self.world.environ.get("COLORTERM", "") in TRUECOLOR
        look: Look = "truecolor" if is_true else "shade" if out.unicode else "digit"
        for spans in heads_lines(document, self.show, self.top, out.width, look, self._where):
            out.line(*spans)


def outlet(world: Environment, model: str, ask: ProbeRequest, options: HeadsOptions) -> HeadsOutput:
    """Return the destination. Refuses what cannot be shown, read or written, before anything is measured."""
    chosen = options.show or ("policy" if "prompt" in ask.probes else "retrieval")
    if chosen not in SHOWN:
        raise UsageError(f"--show does not take {chosen!r}", try_=[f"--show {' | '.join(SHOWN)}"])
    if SHOWN[chosen] and SHOWN[chosen] not in ask.probes:
        raise UsageError(
            f"--show {chosen} needs --probe {SHOWN[chosen]}",
            try_=[f"--probe {','.join([*ask.probes, SHOWN[chosen]])} --show {chosen}"],
        )
    folder = world.path(options.out or f"heads-{_safe(model)}")
    forms = _forms(options.emit)
    if forms:
        _check_folder(folder)
    held = None
    if (compare := options.compare) is not None:
        from kvcli.heads.headmap import read_map

        path = world.path(compare)
        read_map(path, compare)
        held = (path, compare, chosen)
    return HeadsOutput(world, chosen, options.top, forms, folder, held)


def _forms(text: str) -> tuple[str, ...]:
    names = listed(text)
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in FORMS]
    if unknown or not names:
        said = f"--emit does not take {unknown[0]!r}" if unknown else "--emit names no format"
        raise UsageError(said, try_=[f"--emit {','.join(FORMS)}", "--emit none"])
    if "toml" in names and "json" not in names:
        raise UsageError(f"--emit toml needs json: the profile points to {PROFILE}", try_=["--emit json,toml"])
    return tuple(name for name in FORMS if name in names)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"cannot write to {folder}: it is a file", code="file_unwritable", try_=["--out DIR"])
    above = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise BadInput(
            f"cannot write to {folder}: no permission for {above}", code="file_unwritable", try_=["--out DIR"]
        )


def _safe(model: str) -> str:
    """Return the last part of a model's name, as the name of a folder."""
    last = model.rstrip("/").rpartition("/")[2]
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last).lstrip(".") or "model"


def _short(folder: Path, cwd: Path) -> str:
    return folder.relative_to(cwd).as_posix() if folder.is_relative_to(cwd) else str(folder)


def _profile(document: HeadsDocument, path: Path) -> str:
    """Return a profile file that uses the map: `-P profile --config profile.toml`."""
    lines = [
        "# FastGen; the heads that this map names keep everything.",
        "schema = 1",
        'extends = "ngram"',
        f"description = {toml_value(f'fastgen with the head map of {document.model}')}",
        'exactness = "approx"',
        "",
        "[policy]",
        'name = "fastgen"',
        f"headmap = {toml_value(str(path))}",
    ]
    return "\n".join(lines) + "\n"
