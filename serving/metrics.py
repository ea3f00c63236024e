"""Figures for Prometheus, at `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamaspec.serving.request import Engine

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """Figures of one server; each server has its own."""

    def __init__(self, engine: Engine):
        """Report `engine`'s figures beside those of HTTP."""
        self._registry = registry = CollectorRegistry(auto_describe=True)
        registry.register(EngineFigures(engine))
        self.answered = Counter(
            "llamaspec_http_answers", "Answers by path and status.", ["path", "status"], registry=registry
        )
        self.refused = Counter("llamaspec_http_refused", "Requests that a limit refused.", ["limit"], registry=registry)
        self.left = Counter(
            "llamaspec_http_left", "Answers that nobody read to the end.", ["reason"], registry=registry
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
        """Format all figures as Prometheus reads them."""
        return generate_latest(self._registry)


class EngineFigures(Collector):
    """An engine's own figures, read when they are asked for."""

    def __init__(self, engine: Engine):
        """Read from `engine`."""
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Name nothing beforehand: the engine is asked only when somebody reads."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the figures."""
        stats = self._engine.stats()
        for name, what, value in (
            ("waiting", "Requests that wait.", stats.waiting),
            ("running", "Requests that run.", stats.running),
            ("pages_free", "Pages of the cache that hold nothing.", stats.pages_free),
            ("pages_held", "Pages of the cache that requests hold.", stats.pages_held),
            ("pages_cached", "Pages of the cache that are kept for prompts that begin alike.", stats.pages_cached),
        ):
            yield GaugeMetricFamily(f"llamaspec_{name}", what, value=value)
        for name, what, value in (
            ("preemptions", "Times that a request gave way.", stats.preemptions),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that the cache held already.", stats.cached_tokens),
            ("completion_tokens", "Tokens that were drawn.", stats.completion_tokens),
        ):
            yield CounterMetricFamily(f"llamaspec_{name}", what, value=value)
        finished = CounterMetricFamily("llamaspec_finished", "Requests that ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
