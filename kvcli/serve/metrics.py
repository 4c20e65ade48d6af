"""Metrics of the server in Prometheus' text format: under vLLM's names, which dashboards know, where it has them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from kvcli.api import End, Event, Read, Text, Thought
from kvcli.chat.engine_status import EngineStatus
from kvcli.errors import KvcliError

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # upper ends of the histograms
TOKENS = {  # metric -> the field of Stats that it sums
    "vllm:prompt_tokens": "prompt",
    "vllm:prefix_cache_queries": "prompt",
    "vllm:prefix_cache_hits": "cached",
    "vllm:generation_tokens": "new",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


class Metrics:
    """Counters of answers, and the engine's status when it is read."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status
        registry = self._registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, buckets=SECONDS, registry=registry)
        self._requests = counter("kvcli_requests", "Requests.", ["route", "code"])
        self._request_seconds = seconds("kvcli_request_seconds", "Time from the head of a request to its end.")
        self._cancelled = counter("kvcli_cancelled", "Answers whose clients left.", ["phase"])
        self._refused = counter("kvcli_refused", "Answers that ended with an error.", ["why"])
        self._tokens = {name: counter(name, "Tokens of finished answers.", ["model_name"]) for name in TOKENS}
        self._first = seconds("vllm:time_to_first_token_seconds", "Time from a request to its first token.")
        self._gap = seconds("vllm:inter_token_latency_seconds", "Time between two pieces of text, per token.")
        registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request. Status 499: the client left; 0: the server ended."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.observe(seconds)

    async def watched(self, model: str, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """Yield the events of an answer, and count it. `model`: its name, with the profile."""
        phase, last = "waiting", time.monotonic()
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Read) and phase == "waiting":
                        phase = "reading"
                    elif isinstance(event, Text | Thought):
                        now, is_first = time.monotonic(), phase != "writing"
                        each = self._first if is_first else self._gap
                        each.observe((now - last) / (1 if is_first else max(1, len(event.ids))))
                        phase, last = "writing", now
                    elif isinstance(event, End):
                        phase = "ended"
                        for name, counter in self._tokens.items():
                            counter.labels(model).inc(getattr(event.turn.stats, TOKENS[name]))
                    yield event
        except KvcliError as error:
            self._refused.labels(error.code).inc()
            raise
        except BaseException:  # the task was cancelled, or the generator closed
            if phase != "ended":
                self._cancelled.labels(phase).inc()
            raise

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the engine's present status, for prometheus_client."""
        status = self._status()
        used, most = sum(status.kv_bytes.values()), status.pool_bytes or 0
        states = {(name,): getattr(status, name) for name in ("running", "waiting", "idle")}
        reused = {(source,): n for source, n in status.reused.items()}
        for name, labels, values in (
            ("kvcli_sessions", ["state"], states),
            ("kvcli_kv_bytes", ["tier", "state"], status.kv_bytes),
            ("kvcli_reused_tokens", ["from"], reused),
            ("kvcli_kv_budget_bytes", [], {(): most}),
            ("kvcli_kv_promised_bytes", [], {(): status.promised_bytes}),
            ("kvcli_step_age_seconds", [], {(): status.step_age or 0.0}),
            ("kvcli_step_seconds", [], {(): status.step_seconds}),
            ("kvcli_rows_per_step", [], {(): status.step_rows}),
            ("vllm:num_requests_running", [], {(): status.running}),
            ("vllm:num_requests_waiting", [], {(): status.waiting}),
            ("vllm:num_preemptions", [], {(): status.preempted}),
            ("vllm:kv_cache_usage_perc", [], {(): used / most if most else 0.0}),
        ):
            gauge = GaugeMetricFamily(name, "Status of the engine.", labels=labels)
            for key, value in values.items():
                gauge.add_metric(key, value)
            yield gauge
