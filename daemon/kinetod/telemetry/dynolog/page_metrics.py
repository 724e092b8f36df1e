"""Dynolog's names on the page /metrics: those that its Prometheus logger has, all of them gauges.

The labels are its own, too: `host_name`, and `net` for an interface. They cannot be taken for kinetod's names, which
all begin with `kineto_` or `process_`.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kinetod.telemetry.dynolog.host_values import NETWORK, Value
from kinetod.telemetry.dynolog.metric_names import HOST_METRICS, ServedIn

HOST_LABEL, INTERFACE_LABEL = "host_name", "net"


class DynologCollector(Collector):
    """values: the latest of the host, as `host_values` gives them."""

    def __init__(self, values: Callable[[], Mapping[str, Value]], hostname: str) -> None:
        self._values = values
        self._hostname = hostname

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return self._families({})

    def collect(self) -> Iterable[Metric]:
        """Every family, with the values of the last interval."""
        return self._families(self._values())

    def _families(self, values: Mapping[str, Value]) -> Iterable[Metric]:
        of_interfaces: dict[str, list[tuple[str, Value]]] = {}
        for key, value in values.items():
            name, _, interface = key.partition(".")
            of_interfaces.setdefault(name, []).append((interface, value))
        for metric in HOST_METRICS:
            if metric.served is not ServedIn.EVERYWHERE:
                continue
            labels = (HOST_LABEL, INTERFACE_LABEL) if metric.name in NETWORK else (HOST_LABEL,)
            family = GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
            for interface, value in of_interfaces.get(metric.name, ()):
                family.add_metric([self._hostname, interface][: len(labels)], float(value))
            yield family
