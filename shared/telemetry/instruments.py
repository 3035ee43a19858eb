"""Prometheus instruments of one service, in a registry of its own, so that five can live in one process."""

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_UNITS: Final = ("_seconds", "_bytes", "_total", "_ratio", "_events", "_connections", "_info")
M = TypeVar("M", bound=MetricWrapperBase)


class Instruments:
    """Makes counters, gauges and histograms named ``tidewright_<service>_<name>``.

    Asking twice for one name gives the same instrument. Labels come from closed enumerations, never ids.
    The attributes are those that every service has.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._prefix = f"tidewright_{service}_"
        self._made: dict[str, MetricWrapperBase] = {}
        self.handler_seconds = self.histogram("handler_seconds", "One batch, from its first record to the commit.")
        self.batch_events = self.counter("handled_events_total", "Events whose batch is committed.", ("topic",))
        self.published_events = self.counter("published_events_total", "Events added to the outbox.", ("topic",))
        self.consumer_lag_events = self.gauge(
            "consumer_lag_events", "Rows of the log not yet handled (at most 10000)."
        )
        self.oldest_unread_seconds = self.gauge(
            "oldest_unread_seconds", "Age of the oldest row of the log that is not yet handled; 0 if there is none."
        )
        self.decisions = self.counter("decisions_total", "Decisions taken, by their reason.", ("reason",))
        self.fenced_writes = self.counter("fenced_writes_total", "Transactions refused since the lease was lost.")
        self.quarantined_records = self.counter("quarantined_records_total", "Records set aside.", ("cause",))
        self.handler_failures = self.counter("handler_failures_total", "Batches that failed, by error.", ("kind",))
        self.lease_held = self.gauge("lease_held_info", "1 while this process is the active one.")
        self.http_seconds = self.histogram(
            "http_request_seconds", "One HTTP request until its answer began.", ("method", "route", "status")
        )

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        return self._once(Counter, name, documentation, labels)

    @staticmethod
    def begin_at_zero(counter: Counter, values: Iterable[str]) -> None:
        """Show a counter's series before anything was counted: Prometheus sees an increase only from what it saw."""
        for value in values:
            counter.labels(value)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return self._once(Gauge, name, documentation, labels)

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        if name not in self._made:
            self._check(name)
            self._made[name] = Histogram(
                self._prefix + name, documentation, labels, registry=self.registry, buckets=buckets
            )
        made = self._made[name]
        assert isinstance(made, Histogram), f"{name} exists as another kind of instrument"
        return made

    def render(self) -> bytes:
        """The text format of ``/metrics`` (``CONTENT_TYPE``)."""
        return generate_latest(self.registry)

    def _once(self, kind: type[M], name: str, documentation: str, labels: Sequence[str]) -> M:
        if name not in self._made:
            self._check(name)
            self._made[name] = kind(self._prefix + name, documentation, labels, registry=self.registry)
        made = self._made[name]
        assert isinstance(made, kind), f"{name} exists as another kind of instrument"
        return made

    def _check(self, name: str) -> None:
        assert name.endswith(_UNITS), f"an instrument's name ends in its unit {_UNITS}: {name}"
