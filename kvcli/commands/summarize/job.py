"""One command line of `kvcli summarize`: what was asked, where it goes, and what went wrong so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, ContextOverflow, ExitStatus, KvcliError
from kvcli.render.terminal.errors import print_error

if TYPE_CHECKING:
    from kvcli.chat.document_pack import Pack
    from kvcli.commands.common.memory_check import MemoryWishes
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.summarize.documents import InputDocument, InputDocuments
    from kvcli.commands.summarize.output import SummaryOutput
    from kvcli.render.terminal.screen import Screen
    from kvcli.settings.profile import Profile
    from kvcli.summarize.parts import AsRead
    from kvcli.summarize.request import Request


class EmptySummary(KvcliError):
    code, exit = "nothing_said", ExitStatus.BAD_OUTPUT


@dataclass
class SummaryJob:
    """One command line."""

    setup: Setup
    profile: Profile
    request: Request
    shelf: InputDocuments
    out: SummaryOutput
    screen: Screen
    wanted: MemoryWishes
    each: bool = False
    no_cache: bool = False
    packed: Pack | None = None  # where the documents come from, if from none of their files
    status: int = field(default=ExitStatus.OK)

    @property
    def groups(self) -> list[list[InputDocument]]:
        """The documents of each summary."""
        given = self.shelf.given
        return [[one] for one in given] if self.each else [given]

    @property
    def read(self) -> AsRead | None:
        """The documents as the pack's model has read them."""
        from kvcli.documents import with_documents
        from kvcli.summarize.parts import AsRead

        if self.packed is None:
            return None
        return AsRead(with_documents("", self.packed.documents), self.packed.chat.system)

    def names(self, given: Sequence[InputDocument]) -> list[str]:
        """What the screen calls the documents of one summary: as its citations do, so no two are the same."""
        from kvcli.summarize.parts import names_of

        if self.each:
            return [one.heading for one in given]
        named = names_of([one.document for one in given])
        return [name or one.document.name for name, one in zip(named, given, strict=True)]

    @property
    def tells(self) -> bool:
        """Whether what is to know is said on stderr; in JSON it stands in the document."""
        return not self.screen.quiet and not self.setup.world.options.json

    def tell(self, text: str) -> None:
        if self.tells:
            self.screen.note(text)

    @contextmanager
    def attempt(self, given: Sequence[InputDocument]) -> Iterator[None]:
        """One summary. With --each, what goes wrong with it is said and the others go on."""
        try:
            yield
        except (BadInput, ContextOverflow, EmptySummary) as error:
            if not self.each:
                raise
            error.message = f"{given[0].heading}: {error.message}"
            self.failed(error)

    def failed(self, error: KvcliError) -> None:
        """One file went wrong; the others go on, and the exit code is of the first that did."""
        self.status = self.status or int(error.exit)
        in_lines = self.out.form == "json" and self.each
        if in_lines:
            from kvcli.schemas.turn import error_document

            self.out.json(error_document(error), counts=False)
        if not in_lines or self.out.file is not None:
            print_error(self.screen.err, error)

    def tell_failed(self) -> None:
        """What could not be read. As JSON there is one document for all if nothing could: the error."""
        failed = [error for _, error in self.shelf.failed]
        if failed and not self.shelf.given and self.out.form == "json":
            first, *others = failed
            first.lines = (*first.lines, *(error.message for error in others))
            raise first
        for error in failed:
            self.failed(error)
