"""Metrics for Prometheus, served at `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamaspec.serving.request import Engine

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """Metrics of one server."""

    def __init__(self, engine: Engine):
        """Report metrics of `engine` and of HTTP."""
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
            "From a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "llamaspec_token_seconds", "Between two tokens of a text.", buckets=GAPS, registry=registry
        )

    def text(self) -> bytes:
        """Format all metrics as Prometheus reads them."""
        return generate_latest(self._registry)


class EngineFigures(Collector):
    """Metrics of an engine, read on demand."""

    def __init__(self, engine: Engine):
        """Read from `engine`."""
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Return no metrics in advance: the engine is asked only on a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the metrics."""
        stats = self._engine.stats()
        for name, what, value in (
            ("waiting", "Waiting requests.", stats.waiting),
            ("running", "Running requests.", stats.running),
            ("pages_free", "Empty pages of the cache.", stats.pages_free),
            ("pages_held", "Pages of the cache held by requests.", stats.pages_held),
            ("pages_cached", "Pages kept for later prompts with the same beginning.", stats.pages_cached),
        ):
            yield GaugeMetricFamily(f"llamaspec_{name}", what, value=value)
        for name, what, value in (
            ("preemptions", "Preemptions of requests.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("completion_tokens", "Tokens drawn.", stats.completion_tokens),
        ):
            yield CounterMetricFamily(f"llamaspec_{name}", what, value=value)
        finished = CounterMetricFamily("llamaspec_finished", "Requests that ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
