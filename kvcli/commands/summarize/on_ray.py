"""Text sessions whose answers the workers of a Ray cluster make (--on ray)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Turn
from kvcli.commands.common.run_setup import Setup
from kvcli.engine.stats import Stats
from kvcli.engines.http import never
from kvcli.engines.openai import StandIn
from kvcli.environment import Environment
from kvcli.errors import BadInput, EngineUnreachable
from kvcli.installing import pip
from kvcli.summarize.wording import Wording, wording_of

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.settings.profile import Profile

FACTS = ("info", "cautions", "profile", "tokenizer", "template_variables", "limit")


class Worker:
    """A worker process with a model, which the first call loads, so that an error of the load is that of the call."""

    def __init__(self, name: str, profile: Profile) -> None:
        self._model = cache(lambda: Setup(Environment.real(), name).load(profile, times=False))

    def call(self, act: Callable[[Model], Any]) -> Any:
        """Return what `act` returns for the model."""
        return act(self._model())


def _facts(model: Model) -> dict[str, Any]:
    about = {key: getattr(model, key) for key in FACTS}
    return {**about, "promise": model.exactness_label, "wording": wording_of(model.info)}


class RaySession(StandIn):
    """A text session of one worker. Ray repeats the answer of a dead worker once."""

    cautions: tuple[str, ...]
    profile: Profile
    wording: Wording

    def __init__(self, ray: Any, workers: Iterator[Any], n_workers: int) -> None:
        """`workers`: actors that have no session yet."""
        super().__init__()
        self.n_workers, self._ray, self._free, self._worker = n_workers, ray, workers, next(workers)
        vars(self).update(self._call(_facts))

    def with_profile(self, profile: Profile) -> RaySession:
        """Open a session of another worker, which has the same profile."""
        return RaySession(self._ray, self._free, self.n_workers)

    def answer(self, ids: Sequence[int], cancel: Cancel, **options: Any) -> Generator[End, Any, Turn]:
        """Yield the end of an answer, which is made elsewhere."""
        turn: Turn | None = self._call(lambda model: model.generate(ids, **options), cancel)
        turn = turn or Turn("", (), "interrupted", Stats())
        yield End(turn)
        return turn

    stream = answer

    def _call(self, act: Callable[[Model], Any], cancel: Cancel = never) -> Any:
        """Return the result of a call, or None after `cancel`."""
        ray, of = self._ray, self._worker.call.remote(act)
        while not ray.wait([of], timeout=0.2)[0]:
            if cancel():
                return None
        try:
            return ray.get(of)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            what, ways = str(error).partition("\n")[0], ["ray status", "a smaller --parallel"]
            raise EngineUnreachable(f"two workers died: {what}", code="engine_lost", try_=ways) from None


def open_ray(address: str, name: str, profile: Profile, n: int) -> RaySession:
    """Start a worker on each node of the cluster, `n` at least, and return the session of the first. Closing it ends
    all. `address`: ray (this machine), ray://auto, or as for `ray.init`."""
    try:
        import ray
    except ImportError:
        raise BadInput("--on ray needs Ray", code="no_ray", try_=[pip("ray")]) from None
    with StandIn() as ends:
        ends.enter_context(redirect_stdout(sys.stderr))  # Ray prints there that a worker died
        where = {"ray": "local", "ray://auto": "auto"}.get(address, address)
        try:
            ray.init(address=where, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineUnreachable(f"no Ray cluster at {address}: {error}", try_=["ray status", "--on ray"]) from None
        ends.callback(ray.shutdown)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        n, of_node = max(n, len(nodes)), -(-n // len(nodes))  # workers
        share, gpus = (min(node.get(kind, 0) for node in nodes) / of_node for kind in ("CPU", "GPU"))
        needs = {"num_cpus": share if share < 1 else int(share), "num_gpus": int(gpus >= 1)}
        actor = ray.remote(**needs, max_restarts=-1, max_task_retries=1)(Worker)
        session = RaySession(ray, iter([actor.remote(name, profile) for _ in range(n)]), n)
        session.push(ends.pop_all())
    return session
