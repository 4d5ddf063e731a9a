"""Metrics for Prometheus, under vLLM's names where vLLM has such a metric.

``vllm:spec_decode_*`` follow https://docs.vllm.ai/en/latest/design/metrics.html, with the label
``method`` besides. The mean acceptance length is 1 + accepted tokens / drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.serve.choice import FINISH_REASONS
from outrider.serve.engines import EnginePool
from outrider.serve.generation import Generation
from outrider.serve.worker import Step, Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(2**k for k in range(18))
_LABELS = ("model_name", "engine")
_METHOD = (*_LABELS, "method")


class Metrics:
    """The metrics of one server.

    Args:
        model_name: the label of all of them.
        pool: the engines, whose memory is measured.
        worker: runs them.
    """

    def __init__(self, model_name: str, pool: EnginePool, worker: Worker) -> None:
        self._registry = registry = CollectorRegistry()
        self._labels = (model_name, "0")
        registry.register(_State(self._labels, pool, worker))

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(name, what, (*_LABELS, *more), registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, _LABELS, buckets=buckets, registry=registry)

        self._drafts = Counter(
            "vllm:spec_decode_num_drafts", "Drafts verified.", _METHOD, registry=registry
        )
        self._drafted = Counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted.", _METHOD, registry=registry
        )
        self._accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Draft tokens accepted.",
            _METHOD,
            registry=registry,
        )
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the draft.",
            (*_METHOD, "position"),
            registry=registry,
        )
        self._forced = Counter(
            "outrider:forced_tokens",
            "Accepted draft tokens that a grammar had forced.",
            _METHOD,
            registry=registry,
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._success = counter(
            "vllm:request_success", "Outputs that came to their end.", "finished_reason"
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an output.", _SHORT
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS
        )
        self._prompt_length = histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self._output_length = histogram(
            "vllm:request_generation_tokens", "Tokens of an output.", _TOKENS
        )
        self._responses = Counter(
            "outrider:http_responses",
            "HTTP responses.",
            ("path", "status"),
            registry=registry,
        )
        self._last: WeakKeyDictionary[Generation, dict[int, float]] = WeakKeyDictionary()

    def observe(self, generation: Generation, step: Step) -> None:
        """Counts a round of an output."""
        labels, now = self._labels, time.perf_counter()
        last = self._last.setdefault(generation, {})
        num = len(step.event.token_ids)
        self._generation_tokens.labels(*labels).inc(num)
        self._count_draft((*labels, generation.engine.method.name), step)
        if step.index not in last:
            self._first_token.labels(*labels).observe(now - generation.began)
        elif num:
            share = (now - last[step.index]) / num
            for _ in range(num):
                self._between.labels(*labels).observe(share)
        last[step.index] = now
        if step.over:
            self._finish(generation, step, now)

    def count_response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self._registry)

    def _count_draft(self, labels: tuple[str, ...], step: Step) -> None:
        if not step.drafted:
            return
        self._drafts.labels(*labels).inc()
        self._drafted.labels(*labels).inc(step.drafted)
        self._accepted.labels(*labels).inc(step.accepted)
        self._forced.labels(*labels).inc(step.forced)
        for position in range(step.accepted):
            self._accepted_at.labels(*labels, str(position)).inc()

    def _finish(self, generation: Generation, step: Step, now: float) -> None:
        labels, request = self._labels, generation.requests[step.index]
        reason = step.event.finish_reason
        assert reason is not None
        self._success.labels(*labels, FINISH_REASONS[reason]).inc()
        self._whole.labels(*labels).observe(now - generation.began)
        self._prompt_tokens.labels(*labels).inc(len(request.prompt_ids))
        self._prompt_length.labels(*labels).observe(len(request.prompt_ids))
        self._output_length.labels(*labels).observe(len(step.row.token_ids))
        if generation.engine.prefixes is not None:
            self._prefix_queries.labels(*labels).inc(len(request.prompt_ids))
            self._prefix_hits.labels(*labels).inc(step.row.stats.reused)


class _State(Collector):
    """What is read when somebody asks: how many outputs run and wait, and their memory."""

    def __init__(self, labels: tuple[str, str], pool: EnginePool, worker: Worker) -> None:
        self._labels = labels
        self._pool = pool
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        held = most = 0
        for engine in self._pool.engines:
            if engine.kv_bytes is not None:
                held += engine.kv_bytes[0]
                most += engine.kv_bytes[1]
        yield self._gauge(
            "vllm:num_requests_running", "Outputs that have a row.", self._worker.num_running
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Outputs that wait for a row.", self._worker.num_waiting
        )
        yield self._gauge("outrider:kv_cache_bytes", "Memory of keys and values.", held)
        if most:
            yield self._gauge(
                "vllm:kv_cache_usage_perc", "Of the memory limit; 1 is all.", held / most
            )

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, what, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge
