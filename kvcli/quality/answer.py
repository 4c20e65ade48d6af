"""Prefill a context, compress it, and answer its questions under one profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.sequence.sampler import Sampler
from kvcli.models.text import decode
from kvcli.quality.partial import Answer
from kvcli.quality.prompt import Prompts
from kvcli.quality.sample import Context, Question, Task

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession


@dataclass(frozen=True, slots=True)
class QualityJob:
    """One context of a task, with the token ids of its text and its questions."""

    task: Task
    context: Context
    ids: list[int]
    questions: list[list[int]]


def answers(model: Model, prompts: Prompts, job: QualityJob, *, is_visible: bool) -> tuple[list[Answer], float]:
    """Return answers to all questions of the job, and the share of slots kept after compression.

    `is_visible`: the KV cache is compressed after the question is prefilled, not before.
    """
    if job.context.is_dialogue:
        return _dialogue(model, prompts, job, is_visible)
    return _visible(model, job) if is_visible else _hidden(model, job)


def open_session(model: Model) -> GenerationSession:
    """Open a session under the model's profile, greedy and without penalty, because answers repeat the text."""
    session = model.new_session()
    session.start_answer([], Sampler())
    return session


def kept(session: GenerationSession) -> float:
    """Return slots kept divided by tokens prefilled, averaged over layers and heads; demoted slots do not count."""
    layers = session.lm.storing
    held = sum(float((session.cache.slots(layer).pos >= 0).sum(1).float().mean()) for layer in layers)
    return held / (len(layers) * max(1, session.committed))


def _hidden(model: Model, job: QualityJob) -> tuple[list[Answer], float]:
    """Answer all questions from one KV cache that was compressed before the questions."""
    session = open_session(model)
    run_to_end(session.read(job.ids))
    held, results = kept(session), []
    for i, (question, ids) in enumerate(zip(job.context.questions, job.questions, strict=True)):
        one = session if i == len(job.questions) - 1 else session.fork()
        one.policy = None  # no more eviction, so that the question is complete under any policy
        run_to_end(one.read(ids))
        results.append(_answer(model, one, job.task, question))
    return results, held


def _visible(model: Model, job: QualityJob) -> tuple[list[Answer], float]:
    """Answer each question from a separate KV cache that was compressed after the question."""
    results, held = [], 1.0
    for question, ids in zip(job.context.questions, job.questions, strict=True):
        session = open_session(model)
        run_to_end(session.read(job.ids + ids))
        held = kept(session)
        session.policy = None
        results.append(_answer(model, session, job.task, question))
    return results, held


def _dialogue(model: Model, prompts: Prompts, job: QualityJob, is_visible: bool) -> tuple[list[Answer], float]:
    """Answer the questions in one chat. The KV cache is compressed once per turn: after the question if `is_visible`,
    else after the answer."""
    session = open_session(model)
    policy, held = session.policy, 1.0
    results: list[Answer] = []
    if not is_visible:
        run_to_end(session.read(job.ids))
        held = kept(session)
    for question, ids in zip(job.context.questions, job.questions, strict=True):
        if results:
            ids = prompts.next_question(question, session.ids[-1])
        if is_visible:
            run_to_end(session.read(ids if results else job.ids + ids))
            held = held if results else kept(session)
            session.policy = None
        else:
            session.policy = None
            run_to_end(session.read(ids))
        results.append(_answer(model, session, job.task, question))
        session.policy = policy
        if not is_visible:
            run_to_end(session.compress_cache())
    return results, held


def _answer(model: Model, session: GenerationSession, task: Task, question: Question) -> Answer:
    """Generate an answer and score it."""
    stop = model.lm.stop_ids
    new = [i for step in iterate_events(session.stream(question.max_new, stop)) for i in step.new]
    text = question.prefix + decode(model.tokenizer, [i for i in new if i not in stop])
    detail = task.detail(text, question) if task.detail else {}
    return Answer(text, task.score(text, question), len(new), {**question.meta, **detail})
