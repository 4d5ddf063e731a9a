"""Metrics for Prometheus, under vLLM's names where vLLM has such a metric.

``vllm:spec_decode_*`` follow https://docs.vllm.ai/en/latest/design/metrics.html, with the label
``method`` besides. The mean acceptance length is 1 + accepted tokens / drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.serve.choice import FINISH_REASONS
from outrider.serve.engines import EnginePool
from outrider.serve.generation import Generation
from outrider.serve.worker import RoundDone, Step, Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(2**k for k in range(18))
_TOGETHER = 64  # steps
_LABELS = ("model_name", "engine")


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

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, _LABELS, registry=registry).labels(*self._labels)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, what, _LABELS, buckets=buckets, registry=registry)
            return family.labels(*self._labels)

        self._drafting = _Drafting(registry, self._labels)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._success = Counter(
            "vllm:request_success",
            "Outputs that came to their end.",
            (*_LABELS, "finished_reason"),
            registry=registry,
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
        self._uncounted: list[tuple[Generation, Step]] = []

    def observe(self, generation: Generation, step: Step) -> None:
        """Counts the rounds of an output: together with those of others, and before anybody reads
        the metrics, since counting them one by one takes time from the rounds."""
        self._uncounted.append((generation, step))
        if len(self._uncounted) >= _TOGETHER:
            self._count()

    def _count(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for generation, step in uncounted:
            self._count_step(generation, step)

    def _count_step(self, generation: Generation, step: Step) -> None:
        ends = generation.last_rounds
        counts = self._drafting.of(generation.engine.method.name)
        for done in step.done:
            self._generation_tokens.inc(done.emitted)
            counts.add(done)
            if step.output not in ends:
                self._first_token.observe(done.at - generation.began)
            elif done.emitted:
                share = (done.at - ends[step.output]) / done.emitted
                for _ in range(done.emitted):
                    self._between.observe(share)
            ends[step.output] = done.at
        if step.over:
            self._finish(generation, step)

    def count_response(self, path: str, status: int) -> None:
        """Counts an HTTP response."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        self._count()
        return generate_latest(self._registry)

    def _finish(self, generation: Generation, step: Step) -> None:
        request, reason = generation.requests[step.output], step.event.finish_reason
        assert reason is not None
        self._success.labels(*self._labels, FINISH_REASONS[reason]).inc()
        self._whole.observe(step.done[-1].at - generation.began)
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._prompt_length.observe(len(request.prompt_ids))
        self._output_length.observe(len(step.row.token_ids))
        if generation.engine.prefixes is not None:
            self._prefix_queries.inc(len(request.prompt_ids))
            self._prefix_hits.inc(step.row.stats.reused)


class _Drafting:
    """Counters of drafts, by method.

    Args:
        registry: lists them.
        labels: of all of them.
    """

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(name, what, (*_LABELS, "method", *more), registry=registry)

        self._labels = labels
        self._counters = (
            counter("vllm:spec_decode_num_drafts", "Drafts verified."),
            counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
            counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
            counter("outrider:forced_tokens", "Accepted draft tokens that a grammar had forced."),
        )
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the draft.",
            "position",
        )
        self._by_method: dict[str, _MethodCounters] = {}

    def of(self, method: str) -> _MethodCounters:
        """The counters of a method."""
        if method not in self._by_method:
            labels = (*self._labels, method)
            counters = [each.labels(*labels) for each in self._counters]
            self._by_method[method] = _MethodCounters(counters, self._accepted_at, labels)
        return self._by_method[method]


class _MethodCounters:
    """The counters of one method's drafts, whose labels have been looked up.

    Args:
        counters: of drafts, of drafted, of accepted and of forced tokens.
        accepted_at: of accepted tokens, by their position besides ``labels``.
        labels: the method's.
    """

    def __init__(
        self, counters: Sequence[Counter], accepted_at: Counter, labels: tuple[str, ...]
    ) -> None:
        self._counters = counters
        self._accepted_at = accepted_at
        self._labels = labels
        self._positions: list[Counter] = []

    def add(self, done: RoundDone) -> None:
        """Counts a round, if anything was drafted."""
        if not done.drafted:
            return
        numbers = (1, done.drafted, done.accepted, done.forced)
        for counter, number in zip(self._counters, numbers, strict=True):
            if number:
                counter.inc(number)
        while len(self._positions) < done.accepted:
            position = str(len(self._positions))
            self._positions.append(self._accepted_at.labels(*self._labels, position))
        for counter in self._positions[: done.accepted]:
            counter.inc()


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
