"""The run of `kvcli summarize`: summaries of the documents, printed or written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, cast

from kvcli.commands.summarize.job import EmptySummary
from kvcli.errors import ExitStatus, KvcliError

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvcli.api import Turn
    from kvcli.chat.model import TextSession
    from kvcli.commands.common.exits import Interrupt
    from kvcli.commands.common.load_model import CheckedRun
    from kvcli.commands.summarize.documents import InputDocument
    from kvcli.commands.summarize.job import SummaryJob
    from kvcli.render.summarize.view import SummaryView
    from kvcli.summarize.events import Event
    from kvcli.summarize.plan import Plan, PlanWindow
    from kvcli.summarize.wording import Wording


def run(job: SummaryJob, *, dry_run: bool) -> int:
    """Make all summaries; returns the exit code."""
    _refuse_early(job)
    job.tell_failed()
    if not job.documents.given:
        return job.status
    if dry_run:
        from kvcli.commands.summarize.plan import print_plans

        print_plans(job)
        return job.status
    for one, name in zip(job.documents.given, job.names(job.documents.given), strict=True):
        for note in one.document.notes:
            job.tell(f"{name}: {note}")
    status = _summarize(job)
    if status != ExitStatus.INTERRUPTED:
        job.out.close()
    elif job.setup.world.options.json:
        raise KeyboardInterrupt  # reported as an error
    return status


def print_text(job: SummaryJob) -> int:
    """Print the documents as in a prompt, for --extract-only; returns the exit code."""
    from kvcli.commands.common.inputs import notes_of
    from kvcli.documents import marked

    job.tell_failed()
    given = job.documents.given
    if job.out.form == "json":
        from kvcli.commands.summarize.documents import facts
        from kvcli.summarize.document import extract_document

        job.out.json(extract_document(facts(given), job.documents.documents))
    for one in given:
        document = one.document
        for note in notes_of(document):
            job.tell(note)
        if job.out.form != "json":
            if len(given) > 1:
                job.out.begin(one.heading)
            text = document.text if document.unit == "line" else marked(document.unit, document.sections)
            job.out.text(text if text.endswith("\n") else text + "\n")
    job.out.close()
    return job.status


def _refuse_early(job: SummaryJob) -> None:
    """Refuse requests that the model cannot follow, before minutes of loading, if the model's files are here."""
    from kvcli.summarize.wording import wording_of

    try:
        found = job.setup.fetch(job.profile)
    except KvcliError:
        return  # missing or damaged files: loading reports them
    wording_of(found).refuse(job.request, job.setup.name)


def _summarize(job: SummaryJob) -> int:
    from kvcli.commands.common.exits import Interrupt
    from kvcli.commands.common.load_model import load_model
    from kvcli.summarize.plan import PlanWindow
    from kvcli.summarize.wording import wording_of

    job.setup.reuses = job.setup.keeps_chats
    prepared, text_session = load_model(job.setup, job.profile, job.wanted, job.screen)
    cancel = Interrupt(job.setup.world.clock)  # active while the model works; before that Ctrl-C ends the command
    with text_session:
        if job.packed is not None:
            job.packed.refuse_other(text_session.session, text_session.profile)
            text_session.pack = job.packed
        for note in (*prepared.notes, *text_session.cautions, *text_session.info.notes):
            job.tell(note)
        wording = wording_of(text_session.info)
        wording.refuse(job.request, text_session.info.id)
        window = PlanWindow.of(text_session, job.setup.pass_times(text_session.model))
        for given in job.groups:
            if job.each and len(job.groups) > 1:
                job.out.begin(given[0].heading)
            with job.attempt(given):
                _one(job, prepared, text_session, given, window, wording, cancel)
            if cancel():
                return ExitStatus.INTERRUPTED
    return job.status


def _one(
    job: SummaryJob,
    prepared: CheckedRun,
    text_session: TextSession,
    given: Sequence[InputDocument],
    window: PlanWindow,
    wording: Wording,
    cancel: Interrupt,
) -> None:
    """Make one summary, from its plan to its last note."""
    from kvcli.render.summarize.view import SummaryView
    from kvcli.render.turn.status_row import RowOptions
    from kvcli.render.turn.turn_view import busy_word
    from kvcli.summarize.cache import Cache
    from kvcli.summarize.events import PartEnded
    from kvcli.summarize.plan import make_plan
    from kvcli.summarize.run import summarize

    documents = [one.document for one in given]
    with busy_word(job.screen, "counting tokens"):
        plan = make_plan(documents, job.request, window, wording, job.read)
        said = _plan(job, given, plan, window)
    for line in said:
        job.screen.err.line((line, ""))
    cache = Cache.of(job.setup.world.paths.cache, text_session.info, prepared.profile, is_fresh=job.no_cache)
    look = RowOptions(prepared.profile.name, stopping=cancel)
    view = SummaryView(job.screen, look, plan, job.out.live(), tells=job.tells)
    events = summarize(text_session, documents, cache=cache, cancel=cancel, plan=plan)
    with cancel, view.running(), closing(cast("Generator[Event]", events)):
        for event in events:
            view.on(event)
            if isinstance(event, PartEnded) and not event.answered.is_cached:
                _keep(job, text_session, event.answered.turn, cancel)
    if view.summary is None:
        _tell_stopped(job, view)
        return
    if not view.summary.points:
        is_loop = any(answered.turn.finish == "loop" for answered in view.summary.turns)
        raise EmptySummary(
            f"{text_session.info.id} wrote no summary",
            lines=["its answer repeated itself" if is_loop else "its answer is empty"],
            try_=["-m with another model", "--no-cache"],
        )
    _finish(job, prepared, text_session, given, view)


def _keep(job: SummaryJob, text_session: TextSession, turn: Turn, cancel: Interrupt) -> None:
    """Save the KV cache of a part for later runs, before the next part replaces it."""
    from kvcli.commands.chat.save_chat import said_of

    if job.packed is not None and turn.stats.cached < job.packed.about.tokens:
        job.tell(f"{job.packed.folder.name} was read again: the question merges with the last token of its text")
    job.tell(said_of(text_session.keep(cancel)))


def _plan(job: SummaryJob, given: Sequence[InputDocument], plan: Plan, window: PlanWindow) -> list[str]:
    from kvcli.commands.summarize.plan import plan_words

    return plan_words(job, given, plan, window, job.screen.err.width) if job.tells else []


def _tell_stopped(job: SummaryJob, view: SummaryView) -> None:
    from kvcli.render.summarize.notes import stopped
    from kvcli.render.turn.turn_summary import joined

    err = job.screen.err
    for line in joined([stopped(view.stopped, no_cache=job.no_cache)], err.width) if view.stopped and job.tells else ():
        err.line((line, ""))


def _finish(
    job: SummaryJob, prepared: CheckedRun, text_session: TextSession, given: Sequence[InputDocument], view: SummaryView
) -> None:
    """Output the document, the notes and the figures, and log the memory."""
    from kvcli.commands.common.turn_json import Run, turn_document
    from kvcli.commands.summarize.documents import facts
    from kvcli.render.summarize.notes import notes, totals
    from kvcli.render.turn.turn_summary import joined
    from kvcli.render.turn.turn_view import show_summary
    from kvcli.summarize.document import summary_document

    summary, profile = view.summary, prepared.profile
    assert summary is not None
    under = Run(profile.name, profile.spec.method, profile.hash, text_session.promise, cautions=text_session.cautions)
    sources = facts(given, text_session.tokenizer)
    made = summary_document(summary, sources, [turn_document(a.turn, text_session.info, under) for a in summary.turns])
    if not job.each:
        made.notes += [f"{name} is not in the summary: {error.message}" for name, error in job.documents.failed]
    job.out.end(made, summary.points)
    named = {name: one.document for name, one in zip(job.names(given), given, strict=True)}
    for note in notes(summary, named, cited=job.request.cite):
        if note not in view.told:
            job.tell(note)
    fresh = [answered.turn for answered in summary.turns if not answered.is_cached]
    if job.tells and job.screen.stats != "off":
        if len(fresh) == 1 and len(summary.turns) == 1:
            show_summary(fresh[0], job.screen)
        elif fresh:
            for line in joined(totals(summary), job.screen.err.width, indent="  "):
                job.screen.err.line((line, "dim"))
    if any(answered.turn.finish == "loop" for answered in summary.turns):
        job.status = job.status or ExitStatus.BAD_OUTPUT
    for turn in fresh:
        if note := prepared.record(profile, turn):
            job.tell(note)
