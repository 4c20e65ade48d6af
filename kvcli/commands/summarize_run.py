"""From documents that were read to summaries on their way out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, cast

from kvcli.errors import BadInput, ContextOverflow, ExitStatus, KvcliError

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvcli.commands.interrupt import Interrupt
    from kvcli.commands.outlook import Prepared
    from kvcli.commands.summarize_job import Job
    from kvcli.commands.summarize_read import Given
    from kvcli.local import Model
    from kvcli.render.summarize_view import SummaryView
    from kvcli.summarize.events import Event
    from kvcli.summarize.plan import Plan, Window
    from kvcli.summarize.prompt import Wording
    from kvcli.summarize.result import Summary


class NothingSaid(KvcliError):
    code, exit = "nothing_said", ExitStatus.BAD_OUTPUT


def run(job: Job, *, dry_run: bool) -> int:
    """All summaries; the exit code."""
    _refuse_early(job)
    job.tell_failed()
    if not job.shelf.given:
        return job.status
    if dry_run:
        from kvcli.commands.summarize_plan import print_plans

        is_json = job.out.form == "json"
        print_plans(job.setup, job.profile, job.groups, job.request, job.wanted, json=is_json)
        return job.status
    for one in job.shelf.given:
        for note in one.document.notes:
            job.tell(f"{one.document.name}: {note}")
    status = _summarize(job)
    if status != ExitStatus.INTERRUPTED:
        job.out.close()
    return status


def print_text(job: Job) -> int:
    """--extract-only: the documents as a model would read them."""
    from kvcli.commands.ask import notes_of
    from kvcli.documents import marked

    job.tell_failed()
    given = job.shelf.given
    if job.out.form == "json":
        from kvcli.commands.summarize_read import facts
        from kvcli.schemas.summary import extract_document

        job.out.json(extract_document(facts(given), job.shelf.documents))
        job.out.has_any = True
    for number, one in enumerate(given, 1):
        document = one.document
        for note in notes_of(document):
            job.tell(note)
        if job.out.form != "json":
            if len(given) > 1:
                job.out.begin(document.name, number)
            text = document.text if document.unit == "line" else marked(document.unit, document.sections)
            job.out.text(text if text.endswith("\n") else text + "\n")
    job.out.close()
    return job.status


def _refuse_early(job: Job) -> None:
    """What the model does not follow is refused before minutes of loading, if its files are here."""
    from kvcli.commands.models import find
    from kvcli.summarize.prompt import wording_of

    try:
        found = find(job.setup.world, job.setup.name, job.profile.load.allow_pickle)
    except KvcliError:
        return  # not here yet, or damaged: loading says so
    wording_of(found.path).refuse(job.request, job.setup.name)


def _summarize(job: Job) -> int:
    from kvcli.commands.interrupt import Interrupt
    from kvcli.commands.loading import load_model
    from kvcli.summarize.plan import Window
    from kvcli.summarize.prompt import wording_of

    prepared, model = load_model(job.setup, job.profile, job.wanted, job.screen)
    with model, Interrupt(job.setup.world.clock) as cancel:
        for note in (*prepared.notes, *model.cautions, *model.info.notes):
            job.tell(note)
        wording = wording_of(model.info.path)
        wording.refuse(job.request, model.info.id)
        window = Window.of(model, job.setup.pass_times(model))
        for number, given in enumerate(job.groups, 1):
            if job.each and len(job.groups) > 1:
                job.out.begin(given[0].document.name, number)
            try:
                _one(job, prepared, model, given, window, wording, cancel)
            except (BadInput, ContextOverflow, NothingSaid) as error:
                if not job.each:
                    raise
                job.failed(error)
            if cancel():
                return ExitStatus.INTERRUPTED
    return job.status


def _one(
    job: Job,
    prepared: Prepared,
    model: Model,
    given: Sequence[Given],
    window: Window,
    wording: Wording,
    cancel: Interrupt,
) -> None:
    """One summary, from its plan to its last note."""
    from kvcli.render.live import Look
    from kvcli.render.summarize_view import SummaryView
    from kvcli.summarize.cache import Cache
    from kvcli.summarize.plan import make_plan
    from kvcli.summarize.run import summarize

    documents = [one.document for one in given]
    plan = make_plan(documents, job.request, window, wording)
    _tell_plan(job, given, plan, window)
    cache = Cache.of(job.setup.world.paths.cache, model.info, prepared.profile, is_fresh=job.fresh)
    look = Look(prepared.profile.name, stopping=cancel)
    view = SummaryView(job.screen, look, plan, job.out.live, tells=job.tells)
    events = summarize(model, documents, cache=cache, cancel=cancel, plan=plan)
    with view.running(), closing(cast("Generator[Event]", events)):
        for event in events:
            view.on(event)
    if view.summary is None:
        _tell_stopped(job, view)
        return
    if not view.summary.points:
        raise NothingSaid(
            f"{model.info.id} wrote no summary",
            lines=["its answer is empty"],
            try_=["-m with another model", "--fresh"],
        )
    _finish(job, prepared, model, given, view.summary)


def _tell_plan(job: Job, given: Sequence[Given], plan: Plan, window: Window) -> None:
    from kvcli.render.summarize import about_file, hung, plan_lines

    if not job.tells:
        return
    err = job.screen.err
    sources = [about_file(one.document, one.document.tokens(window.tokenizer)) for one in given]
    lines = [line for words in sources for line in hung(words, err.width)]
    for line in [*lines, *plan_lines(plan, err.width)]:
        err.line((line, ""))


def _tell_stopped(job: Job, view: SummaryView) -> None:
    stopped = view.stopped
    if stopped is None or not job.tells:
        return
    if stopped.done and stopped.is_kept:
        parts = {1: "part 1", 2: "parts 1 and 2"}.get(stopped.done, f"parts 1 to {stopped.done}")
        kept = f"{parts} of {stopped.of} {'is' if stopped.done == 1 else 'are'} kept; run it again to go on"
    else:
        kept = "nothing was complete yet; run it again to begin anew"
    job.screen.err.line((f"stopped: {kept}", ""))


def _finish(job: Job, prepared: Prepared, model: Model, given: Sequence[Given], summary: Summary) -> None:
    """The document, the notes, the figures, and a line in the log of memory."""
    from kvcli.commands.summarize_read import facts
    from kvcli.commands.turn_json import Run, turn_document
    from kvcli.render.stream import show_summary
    from kvcli.render.summarize import notes, totals
    from kvcli.render.summary import joined
    from kvcli.schemas.summary import summary_document

    profile, documents = prepared.profile, [one.document for one in given]
    under = Run(profile.name, profile.spec.method, profile.hash, profile.exactness, cautions=model.cautions)
    sources = facts(given, model.tokenizer)
    made = summary_document(summary, sources, [turn_document(a.turn, model.info, under) for a in summary.turns])
    if not job.each:
        made.notes += [f"{name} is left out: {error.message}" for name, error in job.shelf.failed]
    job.out.end(made, summary.points)
    for note in notes(summary, documents, cited=job.request.cite):
        job.tell(note)
    fresh = [answered.turn for answered in summary.turns if not answered.is_cached]
    if job.tells and job.screen.stats != "off":
        if len(fresh) == 1 and len(summary.turns) == 1:
            show_summary(fresh[0], job.screen)
        elif fresh:
            for line in joined(totals(summary), job.screen.err.width, indent="  "):
                job.screen.err.line((line, "dim"))
    for turn in fresh:
        if note := prepared.record(profile, turn):
            job.tell(note)
