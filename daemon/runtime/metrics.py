"""Prometheus metrics, in a registry of our own; metrics.md has the stable names and meanings."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sealane import __version__
from sealane._native import latencies, latency_bounds
from sealane.daemon.runtime.listeners import Listen, join_address, listen_tcp, split_address
from sealane.daemon.runtime.statistics import CATALOGUE, LATENCIES, UNKNOWN, Statistic, scale_of
from sealane.errors import UnavailableError

# Control calls take from a tenth of a millisecond (local) to seconds (a drain).
_CALL_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

# A counter's time of creation adds nothing to its value, and doubles the amount scraped.
disable_created_metrics()  # type: ignore[no-untyped-call]

# A scraper that connects and sends nothing must not occupy a thread for ever.
_SCRAPE_SECONDS: Final = 10


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_SECONDS

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()


ReadStatistics = Callable[[], Mapping[tuple[str, ...], Mapping[str, int]]]
ReadLatencies = Callable[[], Mapping[str, Mapping[str, tuple[list[int], int]]]]

NANOS: Final = 1e9


def by_owner(
    statistics: Mapping[str, Mapping[str, int]],
) -> dict[tuple[str, ...], Mapping[str, int]]:
    """Return statistics keyed by names as statistics keyed by the values of one label."""
    return {(owner,): counters for owner, counters in statistics.items()}


class BrokerMetrics:
    """Metrics that only a broker has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.authorizations_refused = Counter(
            "sealane_broker_authorizations_refused",
            "Peers that were not authorized, by reason id.",
            ["reason"],
            registry=registry,
        )
        self.revocations = Counter(
            "sealane_broker_revocations",
            "Roles of nodes revoked and restored by operators.",
            ["change"],
            registry=registry,
        )
        self.attestations = Counter(
            "sealane_broker_attestations",
            "Attestations appraised, by outcome and reason id.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.collateral_refusals = Gauge(
            "sealane_broker_collateral_refusals",
            "Items of collateral refused at its last load.",
            registry=registry,
        )
        self.collateral_next_update = Gauge(
            "sealane_broker_collateral_next_update_timestamp_seconds",
            "When the first list or document of the collateral expires, Unix time; 0 if none.",
            registry=registry,
        )
        self.audit_log_low = Gauge(
            "sealane_broker_audit_log_low",
            "1 while the audit log has no space left but its reserve.",
            registry=registry,
        )
        self.audit_forwarded_sequence = Gauge(
            "sealane_broker_audit_forwarded_sequence",
            "Number of the last audit record that the collector has; 0 without one.",
            registry=registry,
        )
        self.audit_forward_lag = Gauge(
            "sealane_broker_audit_forward_lag_records",
            "Audit records that wait to be forwarded.",
            registry=registry,
        )
        self.policy_version = Gauge(
            "sealane_broker_policy_version", "Version of the policy in force.", registry=registry
        )
        self.records_under_previous_key = Gauge(
            "sealane_broker_records_under_previous_key",
            "Records still wrapped under the previous key encryption key; 0: no rotation.",
            registry=registry,
        )
        self.authorities = Gauge(
            "sealane_broker_authorities",
            "Authorities that nodes trust; 2: one is being replaced.",
            registry=registry,
        )
        self.leases_granted = Counter(
            "sealane_broker_leases_granted", "Counter leases granted.", registry=registry
        )
        self.leases_returned = Counter(
            "sealane_broker_leases_returned", "Counter leases returned.", registry=registry
        )
        self.anchors_advanced = Counter(
            "sealane_broker_anchors_advanced",
            "Changes of devices' anchor records.",
            registry=registry,
        )
        self.keys_released = Counter(
            "sealane_broker_keys_released", "Volume keys released.", registry=registry
        )
        self.snapshots = Counter(
            "sealane_broker_snapshots", "Snapshots of the store taken.", registry=registry
        )
        self.last_snapshot = Gauge(
            "sealane_broker_last_snapshot_timestamp_seconds",
            "When the last snapshot of the store was taken, Unix time; 0: none since the start.",
            registry=registry,
        )


class Metrics:
    """All metrics of a daemon; only a broker exports those in `broker`."""

    def __init__(self, *, is_broker: bool = True) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        _ProcessCollector(registry=r)
        Gauge("sealane_build_info", "Version.", ["version"], registry=r).labels(__version__).set(1)
        self.broker = BrokerMetrics(r if is_broker else CollectorRegistry())
        self.calls = Counter(
            "sealane_grpc_calls", "Calls answered.", ["method", "code"], registry=r
        )
        self.call_seconds = Histogram(
            "sealane_grpc_call_seconds",
            "Duration of unary calls.",
            ["method"],
            buckets=_CALL_SECONDS,
            registry=r,
        )
        self.refusals = Counter(
            "sealane_refusals", "Calls refused, by reason id.", ["reason"], registry=r
        )
        self.spans_lost = Counter(
            "sealane_spans_lost",
            "Spans that the collector of traces didn't take.",
            registry=r,
        )
        self.job_callers_refused = Counter(
            "sealane_job_callers_refused",
            "Connections to the sockets for other users that were refused, by reason id.",
            ["reason"],
            registry=r,
        )
        self.nvme_faults = Counter(
            "sealane_nvme_faults",
            "Faults of NVMe/TCP hosts, by listener and reason id.",
            ["listener", "reason"],
            registry=r,
        )
        self.certificate_expiry = Gauge(
            "sealane_certificate_expiry_timestamp_seconds",
            "When the node's certificate expires, Unix time.",
            ["role"],
            registry=r,
        )
        self.enrolments = Counter(
            "sealane_enrolments", "Enrolments of this node, by result.", ["result"], registry=r
        )
        self.token_refusals = Counter(
            "sealane_token_refusals",
            "Calls refused for their attestation result, by reason id.",
            ["reason"],
            registry=r,
        )
        self.barred = Counter(
            "sealane_role_barred",
            "Times a role gave up its certificate, by reason id.",
            ["role", "reason"],
            registry=r,
        )
        self.authorizations_lost = Counter(
            "sealane_authorizations_lost",
            "Peers whose queues or sessions were ended here, by reason id.",
            ["role", "reason"],
            registry=r,
        )
        self.channels = Gauge("sealane_channels", "Open channels to peers.", ["role"], registry=r)
        self.accelerator_state = Gauge(
            "sealane_accelerator_state",
            "1 for the state of the gateway's card, 0 for its other states.",
            ["label", "state"],
            registry=r,
        )
        self.gateway_journals_bytes = Gauge(
            "sealane_gateway_journals_bytes",
            "Room that journals of volumes have taken, beyond the 1 MiB that each has of its own.",
            registry=r,
        )
        self.gateway_journals_limit_bytes = Gauge(
            "sealane_gateway_journals_limit_bytes",
            "Most that they may take together, gateway.journals_bytes_max; 0 without a gateway.",
            registry=r,
        )
        self.node_draining = Gauge(
            "sealane_node_draining",
            "1 from `sealanectl node drain` to `node undrain`, also when it is drained.",
            registry=r,
        )
        self.node_drained = Gauge(
            "sealane_node_drained",
            "1 while the drained daemon has nothing in use and may be stopped.",
            registry=r,
        )
        self.broker_away = Gauge(
            "sealane_broker_away",
            "1 while the broker doesn't answer whether this role's peers may act.",
            ["role"],
            registry=r,
        )

    def add_statistics(self, prefix: str, labels: Sequence[str], read: ReadStatistics) -> None:
        """Export `sealane_<prefix>_<name>{<labels>}` from `read`, called on the metrics thread.

        `read` returns statistics by name, for each tuple of label values; `CATALOGUE` has them all.
        """
        self.registry.register(_StatisticsCollector(prefix, labels, read))

    def add_latencies(self, role: str, read: ReadLatencies = latencies) -> None:
        """Export the histogram of `role`, one of `LATENCIES`, from `read`."""
        self.registry.register(_LatencyCollector(role, read))


class _ProcessCollector(ProcessCollector):
    """Also works where /proc has nothing but processes, as in the unit (ProcSubset=pid)."""

    def _boot_time(self) -> float:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class _StatisticsCollector(Collector):
    """Reads statistics when it is scraped; `statistics.CATALOGUE` says what they are."""

    def __init__(self, prefix: str, labels: Sequence[str], read: ReadStatistics) -> None:
        self._prefix = prefix
        self._labels = labels
        self._read = read
        self._known = CATALOGUE[prefix]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for values, statistics in sorted(self._read().items()):
            is_idle = not statistics.get("queues_running", 1)
            for figure, value in statistics.items():
                known = self._known.get(figure, UNKNOWN)
                if is_idle and not known.is_always:
                    continue
                name = known.name_of(figure)
                more = () if known.label is None else (known.label[1],)
                family = families.setdefault(name, self._family(name, known))
                family.add_metric((*values, *more), value * scale_of(figure))
        yield from families.values()

    def _family(self, name: str, known: Statistic) -> GaugeMetricFamily | CounterMetricFamily:
        make = CounterMetricFamily if known.kind == "counter" else GaugeMetricFamily
        more = [] if known.label is None else [known.label[0]]
        return make(f"sealane_{self._prefix}_{name}", known.help, labels=[*self._labels, *more])

    def describe(self) -> Iterator[Metric]:
        return iter(())


class _LatencyCollector(Collector):
    """Reads the engine's histograms of a role when it is scraped."""

    def __init__(self, role: str, read: ReadLatencies) -> None:
        self._role = role
        self._read = read
        self._bounds = [repr(nanos / NANOS) for nanos in latency_bounds()]

    def collect(self) -> Iterator[Metric]:
        name, text = LATENCIES[self._role]
        family = HistogramMetricFamily(name, text, labels=["operation"])
        for operation, (counts, nanos) in self._read()[self._role].items():
            buckets = zip([*self._bounds, "+Inf"], accumulate(counts), strict=True)
            family.add_metric([operation], [*buckets], sum_value=nanos / NANOS)
        yield family

    def describe(self) -> Iterator[Metric]:
        return iter(())


class MetricsServer:
    """The HTTP endpoint, on a thread of its own, listening at `address`; `open_listener` opens it.

    UnavailableError `listen.refused` if it can't be bound.
    """

    def __init__(
        self, metrics: Metrics, listen: str, *, open_listener: Listen = listen_tcp
    ) -> None:
        host, port = split_address(listen)
        try:
            listening = open_listener(host, port)
        except OSError as error:
            raise UnavailableError(
                "listen.refused", f"metrics.listen {listen}: {error.strerror}"
            ) from error
        self._server = _Server(listening)
        self._server.set_app(make_wsgi_app(metrics.registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics")
        self._thread.daemon = True
        self._thread.start()
        self.address = join_address(host, self._server.server_port)

    def close(self) -> None:
        """Stop and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
