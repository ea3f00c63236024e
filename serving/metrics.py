"""Metrics for Prometheus, which the server offers at `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamaspec.serving.request import Engine

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine):
        """Make the metrics of HTTP, and include those of `engine`."""
        self._registry = registry = CollectorRegistry(auto_describe=True)
        registry.register(EngineFigures(engine))
        self.answered = Counter(
            "llamaspec_http_answers", "Answers by path and status.", ["path", "status"], registry=registry
        )
        self.refused = Counter("llamaspec_http_refused", "Requests that a limit refused.", ["limit"], registry=registry)
        self.abandoned = Counter(
            "llamaspec_http_left", "Answers that the client did not read to the end.", ["reason"], registry=registry
        )
        self.connections = Gauge("llamaspec_http_connections", "Open connections.", registry=registry)
        self.first_token_seconds = Histogram(
            "llamaspec_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "llamaspec_token_seconds", "Seconds between two tokens of a choice.", buckets=GAPS, registry=registry
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class EngineFigures(Collector):
    """Metrics of an engine, read at each scrape."""

    def __init__(self, engine: Engine):
        """Read the metrics from `engine`."""
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Return no metrics in advance, so that the engine is read only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the engine."""
        stats = self._engine.stats()
        for name, what, value in (
            ("waiting", "Waiting requests.", stats.waiting),
            ("running", "Running requests.", stats.running),
            ("pages_free", "Pages of the KV cache that contain nothing.", stats.pages_free),
            ("pages_held", "Pages of the KV cache that requests use.", stats.pages_held),
            ("pages_cached", "Unused pages that stay in the prefix cache.", stats.pages_cached),
        ):
            yield GaugeMetricFamily(f"llamaspec_{name}", what, value=value)
        for name, what, value in (
            ("preemptions", "Preemptions of requests.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens of all requests that began.", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("completion_tokens", "Tokens drawn.", stats.completion_tokens),
        ):
            yield CounterMetricFamily(f"llamaspec_{name}", what, value=value)
        finished = CounterMetricFamily("llamaspec_finished", "Requests that ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
