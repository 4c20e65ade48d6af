"""Metrics of the server in Prometheus' text format, under kvcli's names and under those of vLLM's dashboards."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from kvcli.api import End, Event, Read, Text, Thought, Waiting
from kvcli.chat.engine_status import EngineStatus
from kvcli.errors import Busy, KvcliError

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters of answers, and the engine's status when it is read."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status
        registry = self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(name, help, buckets=SECONDS, registry=registry)

        self._requests = counter("kvcli_requests", "Requests by route and status.", "route", "code")
        self._request_seconds = seconds("kvcli_request_seconds", "Time from the head of a request to its end.")
        self._generated = counter("kvcli_generated_tokens", "Tokens of answers.", "profile")
        self._cancelled = counter("kvcli_cancelled", "Answers that clients left.", "phase")
        self._refused = counter("kvcli_refused", "Requests that were not answered.", "why")
        # token counters, each under two names
        pairs = {
            "prompt": ("kvcli_prompt_tokens", "vllm:prompt_tokens"),
            "cached": ("kvcli_cached_tokens", "vllm:prefix_cache_hits"),
            "asked": ("kvcli_looked_up_tokens", "vllm:prefix_cache_queries"),
            "new": ("kvcli_answer_tokens", "vllm:generation_tokens"),
            "drafted": ("kvcli_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
            "accepted": ("kvcli_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
        }
        self._tokens = {key: [counter(name, f"Tokens: {key}.") for name in names] for key, names in pairs.items()}
        first = ("kvcli_first_token_seconds", "vllm:time_to_first_token_seconds")
        gap = ("kvcli_token_gap_seconds", "vllm:inter_token_latency_seconds")
        self._first = [seconds(name, "Time from a request to its first token.") for name in first]
        self._gap = [seconds(name, "Time between two pieces of text, per token.") for name in gap]
        registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request. Status 499: the client left; 0: the server ended."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.observe(seconds)

    async def watched(self, profile: str, events: AsyncGenerator[Event | Waiting]) -> AsyncGenerator[Event | Waiting]:
        """Yield the events of an answer, and count it."""
        phase, began, last = "waiting", time.monotonic(), 0.0
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Read) and phase == "waiting":
                        phase = "reading"
                    elif isinstance(event, Text | Thought):
                        now, n = time.monotonic(), max(1, len(event.ids))
                        for each in self._first if phase != "writing" else self._gap:
                            each.observe(now - began if phase != "writing" else (now - last) / n)
                        phase, last = "writing", now
                    elif isinstance(event, End):
                        phase = "ended"
                        self._count(profile, event.turn.stats)
                    yield event
        except KvcliError as error:
            self._refused.labels(error.code if isinstance(error, Busy) or phase == "waiting" else "failed").inc()
            raise
        except BaseException:  # the task was cancelled, or the generator closed
            if phase != "ended":
                self._cancelled.labels(phase).inc()
            raise

    def _count(self, profile: str, stats: Any) -> None:
        found = {
            "prompt": stats.prompt,
            "cached": stats.cached,
            "asked": stats.prompt,
            "new": stats.new,
            "drafted": stats.draft_tokens,
            "accepted": stats.accepted_tokens,
        }
        for key, n in found.items():
            for each in self._tokens[key]:
                each.inc(n)
        self._generated.labels(profile).inc(stats.new)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the engine's present status, for prometheus_client."""
        status = self._status()
        used, most = sum(status.kv_bytes.values()), status.pool_bytes
        states = {"running": status.running, "waiting": status.waiting, "idle": status.idle}
        sessions = GaugeMetricFamily("kvcli_sessions", "Answers and open sessions by state.", labels=["state"])
        for state, n in states.items():
            sessions.add_metric([state], n)
        kv = GaugeMetricFamily("kvcli_kv_bytes", "Bytes of KV.", labels=["tier", "state"])
        for (tier, state), n in status.kv_bytes.items():
            kv.add_metric([tier, state], n)
        reused = GaugeMetricFamily("kvcli_reused_tokens", "Prompt tokens that were not computed.", labels=["from"])
        for source, n in status.reused.items():
            reused.add_metric([source], n)
        yield from (sessions, kv, reused)
        numbers = {
            "kvcli_kv_budget_bytes": most or 0,
            "kvcli_kv_promised_bytes": status.promised_bytes,
            "kvcli_engine_step_age_seconds": status.step_age or 0.0,
            "kvcli_engine_step_seconds": status.steps[-1].seconds if status.steps else 0.0,
            "kvcli_rows_per_step": status.steps[-1].rows if status.steps else 0,
            "kvcli_preempted": status.preempted,
            "vllm:num_requests_running": status.running,
            "vllm:num_requests_waiting": status.waiting,
            "vllm:num_preemptions": status.preempted,
            "vllm:kv_cache_usage_perc": used / most if most else 0.0,
        }
        for name, value in numbers.items():
            yield GaugeMetricFamily(name, "Status of the engine.", value=value)
