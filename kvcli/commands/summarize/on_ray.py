"""Summaries by the workers of a Ray cluster: one task for each group of documents, which travel as text."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcli.commands.common.run_setup import Setup
from kvcli.environment import Environment
from kvcli.errors import BadInput, EngineLost, EngineUnreachable
from kvcli.installing import pip

if TYPE_CHECKING:
    from kvcli.api import Cancel
    from kvcli.chat.model import Model
    from kvcli.commands.summarize.documents import InputDocument
    from kvcli.settings.profile import Profile
    from kvcli.summarize.request import Request

Group = Sequence["InputDocument"]


@cache
def _model(name: str, profile: bytes) -> Model:
    """Return the model of this worker process, which the first task loads."""
    return Setup(Environment.real(), name).load(pickle.loads(profile), times=False)


def _summary(name: str, profile: bytes, group: Group, request: Request) -> SimpleNamespace:
    """Return the summary of a worker, with the facts about its session that reports need."""
    from kvcli.summarize.events import Done
    from kvcli.summarize.run import summarize

    model = _model(name, profile)
    events = summarize(model, [one.document for one in group], request)
    made = next(event.summary for event in events if isinstance(event, Done))
    facts = {key: getattr(model, key) for key in ("info", "cautions", "profile")}
    return SimpleNamespace(**facts, summary=made, promise=model.exactness_label, tokenizer=None, engine=None)


def summaries(
    address: str, name: str, profile: Profile, request: Request, groups: Sequence[Group], n: int, cancel: Cancel
) -> Iterator[tuple[Group, Callable[[], SimpleNamespace]]]:
    """Yield each group with a function that returns its summary or raises its error, in order; `n` tasks at a time.

    `address`: as for `ray.init`; "local" starts a cluster of this machine. Ray repeats the task of a dead worker once.
    """
    try:
        import ray
    except ImportError:
        raise BadInput("--on ray needs Ray", code="no_ray", try_=[pip("ray")]) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineUnreachable(f"no Ray cluster at {address}: {error}", try_=["ray status", "--on ray"]) from None
    try:
        has, n = ray.cluster_resources(), max(n, len(ray.nodes()))
        share = has.get("CPU", 1.0) / n
        needs = {"num_cpus": share if share < 1 else int(share), "num_gpus": int(has.get("GPU", 0) >= n)}
        task = ray.remote(**needs, max_retries=1)(_summary)
        settings = pickle.dumps(profile)
        results = [task.remote(name, settings, group, request) for group in groups]
        for group, result in zip(groups, results, strict=True):
            while not ray.wait([result], timeout=0.2)[0]:
                if cancel():
                    return
            yield group, partial(_result, ray, result)
    finally:
        ray.shutdown()


def _result(ray: Any, result: Any) -> SimpleNamespace:
    try:
        found: SimpleNamespace = ray.get(result)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        what = str(error).partition("\n")[0]
        raise EngineLost(f"two workers died: {what}", try_=["ray status", "a smaller --parallel"]) from None
    return found
