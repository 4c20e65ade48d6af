"""Summaries by workers of a Ray cluster, each with a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadInput, EngineLost, EngineUnreachable
from kvcli.installing import pip

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.documents import Document
    from kvcli.settings.profile import Profile
    from kvcli.summarize.request import Request
    from kvcli.summarize.result import Summary


class Worker:
    """An actor: a process with a model, which the first call loads, so that its error is that of a call."""

    def __init__(self, name: str, profile: Profile) -> None:
        self.given = name, profile

    @cached_property
    def model(self) -> Model:
        import kvcli

        return kvcli.load(*self.given)

    def about(self) -> dict[str, Any]:
        """Return the facts of a session that reports need."""
        model = self.model
        return {name: getattr(model, name) for name in ("info", "cautions", "profile")} | {
            "promise": model.exactness_label
        }

    def summary(self, documents: Sequence[Document], request: Request) -> Summary:
        from kvcli.summarize.events import Done
        from kvcli.summarize.run import summarize

        return next(e.summary for e in summarize(self.model, documents, request) if isinstance(e, Done))


class RayWorkers:
    """Workers of a cluster. Documents travel as their text, because a worker may not see the files."""

    def __init__(self, address: str, model: str, profile: Profile, workers: int | None) -> None:
        """`address`: as for `ray.init`; "local" starts a cluster of this machine."""
        try:
            import ray
        except ImportError:
            raise BadInput("--on ray needs Ray", code="no_ray", try_=[pip("kvcli[ray]")]) from None
        self.ray = ray
        local = {"include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineUnreachable(f"no Ray cluster at {address}: {error}", try_=["ray status", "--on ray"]) from None
        self.n = workers or max(1, len(ray.nodes()))
        has_gpu = ray.cluster_resources().get("GPU", 0) >= self.n
        # max_restarts: Ray's own restart hides which document the worker died of
        self.actor = ray.remote(num_cpus=1, num_gpus=int(has_gpu), max_restarts=0)(Worker)
        self.given = model, profile
        self.idle = SimpleQueue[Any]()
        for _ in range(self.n):
            self.idle.put(self.actor.remote(*self.given))

    def about(self) -> SimpleNamespace:
        """Wait for a model; return the facts of its session."""
        worker = self.idle.get()
        self.idle.put(worker)
        return SimpleNamespace(**self._get(worker.about.remote()), tokenizer=None, engine=None)

    def summary(self, documents: Sequence[Document], request: Request) -> Summary:
        """Return a worker's summary. Raises its error, and EngineLost if it died; another takes its place."""
        worker = self.idle.get()
        try:
            found: Summary = self._get(worker.summary.remote(documents, request))
        except self.ray.exceptions.RayActorError as error:
            worker = self.actor.remote(*self.given)
            raise EngineLost(f"a worker died: {str(error).partition(chr(10))[0]}", try_=["ray status"]) from None
        finally:
            self.idle.put(worker)
        return found

    def _get(self, result: Any) -> Any:
        try:
            return self.ray.get(result)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def close(self) -> None:
        """End the workers."""
        self.ray.shutdown()
