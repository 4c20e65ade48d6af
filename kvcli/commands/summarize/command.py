"""`kvcli summarize`: summaries of documents, with citations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as f
from kvcli.commands.summarize import options as o
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.environment import Environment

app = typer.Typer(add_completion=False)

ALONE = "files, --pages, --type, --password-file, --extract-only, --each, --mode, --chunk and --overlap"


@app.command()
def summarize(
    context: typer.Context,
    files: o.Files = None,
    length: o.Length = None,
    style: o.Styled = None,
    focus: o.Focus = None,
    lang: o.Lang = None,
    cite: o.Cite = "page",
    check: o.Check = True,
    quotes: o.Quotes = False,
    pack: o.Pack = None,
    pages: o.Pages = None,
    type_: o.Kind = None,
    password_file: o.Password = None,
    extract_only: o.Only = False,
    each: o.Each = False,
    mode: o.Mode = "auto",
    chunk: o.Chunk = None,
    overlap: o.Overlap = 0,
    no_cache: o.NoCache = False,
    output: o.Output = None,
    format: o.Format = None,
    model: f.ModelOption = None,
    ctx: f.Ctx = None,
    device: f.Device = None,
    dtype: f.Dtype = None,
    quant: f.Quant = None,
    budget: f.Budget = None,
    spec: f.Spec = None,
    draft: f.Draft = None,
    exact: f.Exact = False,
    force: f.Force = False,
    allow_pickle: f.Pickle = False,
    stats: f.Figures = None,
    dry_run: o.DryRun = False,
) -> int:
    """Summarize long documents, with verified page citations.

    The summary goes to stdout, everything else to stderr. A citation that
    could not be confirmed ends in "?". Finished parts are saved: after Ctrl-C
    the same command continues with the next part.
    """
    from kvcli.commands.chat.command import pack_of, packed_model, profile_of
    from kvcli.commands.common.load_model import MemoryWishes
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.models.suggest_model import find_model
    from kvcli.commands.summarize.documents import ReadOptions, of_pack, password_of, read_all
    from kvcli.commands.summarize.job import SummaryJob
    from kvcli.commands.summarize.output import outlet
    from kvcli.commands.summarize.run import print_text, run
    from kvcli.render.terminal.screen import Screen

    world: Environment = context.obj
    if extract_only:
        kept = {"files", "pages", "type_", "password_file", "extract_only", "output", "format"}
        f.refuse_others(context, "--extract-only", kept)
    if dry_run and output not in (None, "-"):
        raise UsageError("--dry-run prints the plan and writes no file", try_=["leave out -o"])
    request = o.request_of(context.params)
    out = outlet(world, format, output, [*(files or []), *([password_file] if password_file else [])])
    if out.form == "html" and (extract_only or dry_run):
        raise UsageError("only summaries can be written as HTML", try_=["--format md", "--format json"])
    screen = Screen.of(world, stats or ("live" if world.is_tty("stderr") else "turn"))
    others = [files, pages, type_, password_file, extract_only, each, mode != "auto", chunk, overlap]
    packed = pack_of(world, pack, others, ALONE) if pack is not None else None
    named = packed_model(world, packed) if packed is not None and model is None else model
    about = packed.about if packed is not None else None
    flags, is_typed = f.profile_flags(context.params), model is not None
    setup = Setup(world, named, flags, exact, is_typed=is_typed, reuses=True, pack=about)
    if not extract_only:  # extraction needs no model
        setup = find_model(setup, files or [])
    profile = profile_of(setup, packed)
    if not extract_only:
        setup.look(profile)
    how = ReadOptions(pages, type_, password_of(world, password_file))
    documents = of_pack(packed) if packed is not None else read_all(world, files or [], how)
    job = SummaryJob(
        setup, profile, request, documents, out, screen, MemoryWishes(force, ctx == "max"), each, no_cache, packed
    )
    return print_text(job) if extract_only else run(job, dry_run=dry_run)
