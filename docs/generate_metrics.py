"""Writes the tables of docs/metrics.md from the code: `python docs/generate_metrics.py`."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kinetod.base import metrics
from kinetod.gpus.gpu_types import Snapshot
from kinetod.telemetry.dynolog_page import GPU_METRICS, HOST_METRICS, DynologMetric, ServedIn
from kinetod.telemetry.gpu_metrics import LABELS, GpuCollector
from kinetod.telemetry.host_sample import HostCollector
from kinetod.telemetry.metrics_server import DaemonCollector, DaemonState

DOCUMENT = Path(__file__).with_name("metrics.md")
BEGIN, END = "<!-- {}: made by `python docs/generate_metrics.py` -->\n", "<!-- end -->\n"
GPU_LABELS = "the GPU's"
_OWN: dict[str, Any] = dict(metrics.REGISTRY._names_to_collectors)  # the client tells labels to nobody else


def families() -> dict[str, list[Any]]:
    """Every family by the part of the document that it belongs to."""
    loop = asyncio.new_event_loop()
    try:
        state = DaemonState(agents={}, captures_running=0)
        daemon = [*metrics.REGISTRY.collect(), *DaemonCollector(loop, lambda: state).describe()]
    finally:
        loop.close()
    own = [family for family in daemon if family.name.startswith("kineto_")]
    return {
        "daemon": sorted(own, key=lambda family: family.name),
        "host": list(HostCollector(Path("/")).describe()),
        "gpus": list(GpuCollector(lambda _deadline_s: Snapshot(), "").describe()),
    }


def _labels(family: Any) -> tuple[str, ...]:
    if hasattr(family, "_labelnames"):
        return tuple(family._labelnames)
    if not (collector := _OWN.get(family.name)):
        return ()
    return tuple(collector._value) if family.type == "info" else tuple(collector._labelnames)


def _shown(labels: tuple[str, ...]) -> str:
    if labels[: len(LABELS)] == LABELS:
        return ", ".join([GPU_LABELS, *(f"`{label}`" for label in labels[len(LABELS) :])])
    return ", ".join(f"`{label}`" for label in labels)


def table(found: Iterable[Any]) -> str:
    """A row for each family, under the name that a query has."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in found:
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        cells = (f"`{family.name}{ending}`", family.type, _shown(_labels(family)), family.documentation)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def dynolog_table(metrics_of_dynolog: Iterable[DynologMetric]) -> str:
    """A row for each metric of Dynolog's; those that are not served come last."""
    lines = ["| Dynolog | unit | served | kinetod | note |", "|---|---|---|---|---|"]
    for each in sorted(metrics_of_dynolog, key=lambda metric: metric.served is ServedIn.NOT):
        names = ", ".join(f"`{name}`" for name in each.name.split(", "))
        lines.append(f"| {names} | {each.unit} | {each.served.value} | {each.ours} | {each.note} |")
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """The tables by the part of the document that they belong to."""
    own = {part: table(found) for part, found in families().items()}
    return {**own, "dynolog host": dynolog_table(HOST_METRICS), "dynolog gpus": dynolog_table(GPU_METRICS)}


def with_tables(text: str) -> str:
    """The document with fresh tables."""
    for part, fresh in tables().items():
        head, begin, rest = text.partition(BEGIN.format(part))
        _, end, tail = rest.partition(END)
        text = f"{head}{begin}{fresh}{end}{tail}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
