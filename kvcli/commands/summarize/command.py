"""`kvcli summarize`: summaries of documents, with citations."""

from __future__ import annotations

import typer

from kvcli.commands.common.options import command
from kvcli.commands.summarize.options import SummarizeOptions
from kvcli.environment import Environment
from kvcli.errors import UsageError

app = typer.Typer(add_completion=False)

ALONE = "files, --pages, --type, --password-file, --extract-only, --each, --mode, --chunk, --overlap and --on"


@command(app)
def summarize(world: Environment, options: SummarizeOptions) -> int:
    """Summarize long documents, with verified page citations.

    The summary goes to stdout, everything else to stderr. A citation that
    could not be confirmed ends in "?". Finished parts are saved: after Ctrl-C
    the same command continues with the next part.
    """
    from kvcli.commands.chat.command import pack_of, profile_of, setup_of
    from kvcli.commands.common.document_files import find_files
    from kvcli.commands.models.suggest_model import find_model
    from kvcli.commands.summarize.documents import of_pack, read_all
    from kvcli.commands.summarize.output import outlet
    from kvcli.commands.summarize.run import SummaryRun
    from kvcli.render.terminal.screen import Screen

    names, given, parts, result = options.files or [], options.documents, options.parts, options.result
    if given.extract_only:
        kept = {"files", "pages", "type_", "password_file", "extract_only", "output", "format", "ocr"}
        options.refuse_others("--extract-only", kept)
    if options.dry_run and result.output not in (None, "-"):
        raise UsageError("--dry-run prints the plan and writes no file", try_=["leave out -o"])
    request = options.request()
    inputs = [*names, *([given.password_file] if given.password_file else [])]
    out = outlet(world, result.format, result.output, inputs, each=given.each)
    if out.form == "html" and (given.extract_only or options.dry_run):
        raise UsageError("only summaries can be written as HTML", try_=["--format md", "--format json"])
    screen = Screen.of(world, options.stats)
    others: list[object] = [names, given.pages, given.type_, given.password_file, given.extract_only, given.each]
    others += [parts.mode != "auto", parts.chunk, parts.overlap, parts.on]
    packed = pack_of(world, given.pack, others, ALONE)
    setup, files = setup_of(world, options, packed), find_files(world, names)
    if not given.extract_only:  # extraction needs no model
        setup = find_model(setup, [file.name for file in files])
    profile = profile_of(setup, packed)
    if not given.extract_only:
        setup.look(profile)
    documents = of_pack(packed) if packed is not None else read_all(world, files, given)
    run = SummaryRun(options, setup, profile, request, documents, out, screen, packed)
    return run.print_text() if given.extract_only else run.start()
