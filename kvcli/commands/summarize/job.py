"""One command line of `kvcli summarize`: the request, the output, and errors so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.commands.common.load_model import MemoryWishes
from kvcli.errors import BadInput, ContextOverflow, ExitStatus, KvcliError
from kvcli.render.terminal.errors import print_error

if TYPE_CHECKING:
    from kvcli.chat.document_pack import Pack
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.summarize.documents import InputDocument, InputDocuments
    from kvcli.commands.summarize.options import SummarizeOptions
    from kvcli.commands.summarize.output import SummaryOutput
    from kvcli.render.terminal.screen import Screen
    from kvcli.settings.profile import Profile
    from kvcli.summarize.parts import AsRead
    from kvcli.summarize.request import Request


class EmptySummary(KvcliError):
    code, exit = "nothing_said", ExitStatus.BAD_OUTPUT


@dataclass
class SummaryJob:
    """One command line of `kvcli summarize`."""

    options: SummarizeOptions
    setup: Setup
    profile: Profile
    request: Request
    documents: InputDocuments
    out: SummaryOutput
    screen: Screen
    packed: Pack | None = None  # the pack that the documents come from, if not from files
    status: int = field(default=ExitStatus.OK)

    @property
    def wanted(self) -> MemoryWishes:
        return MemoryWishes(self.options.run.force, self.options.run.ctx == "max")

    @property
    def groups(self) -> list[list[InputDocument]]:
        """Documents of each summary."""
        given = self.documents.given
        return [[one] for one in given] if self.options.documents.each else [given]

    @property
    def read(self) -> AsRead | None:
        """Documents as in the prompt of the pack."""
        from kvcli.documents import with_documents
        from kvcli.summarize.parts import AsRead

        if self.packed is None:
            return None
        return AsRead(with_documents("", self.packed.documents), self.packed.chat.system)

    def names(self, given: Sequence[InputDocument]) -> list[str]:
        """Return the names of the documents of one summary: those of its citations, so no two are the same."""
        from kvcli.summarize.parts import names_of

        if self.options.documents.each:
            return [one.heading for one in given]
        named = names_of([one.document for one in given])
        return [name or one.document.name for name, one in zip(named, given, strict=True)]

    @property
    def tells(self) -> bool:
        """True if notes are printed on stderr; with JSON they are in the document."""
        return not self.screen.quiet and not self.setup.world.options.json

    def tell(self, text: str) -> None:
        if self.tells:
            self.screen.note(text)

    @contextmanager
    def attempt(self, given: Sequence[InputDocument]) -> Iterator[None]:
        """Run one summary in the block. With --each, an error is reported and the other summaries continue."""
        try:
            yield
        except (BadInput, ContextOverflow, EmptySummary) as error:
            if not self.options.documents.each:
                raise
            error.message = f"{given[0].heading}: {error.message}"
            self.failed(error)

    def failed(self, error: KvcliError) -> None:
        """Report the error of one file. The other files continue, and the first error gives the exit code."""
        self.status = self.status or int(error.exit)
        in_lines = self.out.form == "json" and self.options.documents.each
        if in_lines:
            from kvcli.schemas.turn import error_document

            self.out.json(error_document(error), counts=False)
        if not in_lines or self.out.file is not None:
            print_error(self.screen.err, error)

    def tell_failed(self) -> None:
        """Report unreadable files. With JSON, if no file could be read, one error document stands for all."""
        failed = [error for _, error in self.documents.failed]
        if failed and not self.documents.given and self.out.form == "json":
            first, *others = failed
            first.lines = (*first.lines, *(error.message for error in others))
            raise first
        for error in failed:
            self.failed(error)
