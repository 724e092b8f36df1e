"""What a capture sampled of the hardware counters of each GPU, what was lost, and what was refused. Pure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kineto_protos.units import format_duration

from kinetoctl.output import units

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def counter_lines(capture: "pb.Capture") -> Iterator[str]:
    """One line for each GPU, and one for each metric that it left out."""
    for each in capture.counters:
        name = f" ({each.gpu.name})" if each.gpu.name else ""
        yield f"counters of GPU {each.gpu.index}{name}: {_figures(each)}"
        for metric in each.left_out:
            yield f"counters of GPU {each.gpu.index} without {metric.name}: {metric.why}"


def _figures(each: "pb.RecordedCounters") -> str:
    parts = []
    if each.metrics:
        parts += [f"{_counted(each.samples, 'sample')} of {', '.join(metric.label for metric in each.metrics)}"]
        lost = [f"{format_duration(each.lost_ns)} in {_counted(each.gaps, 'gap')}"] if each.gaps else []
        lost += [f"{_counted(each.dropped_samples, 'sample')} dropped"] if each.dropped_samples else []
        if lost or not each.reason_code:  # what came after an early end is lost, too
            parts.append(f"lost {', '.join(lost) or 'nothing'}")
    if each.reason_code:
        parts.append(f"{each.reason} [{each.reason_code}]")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{units.count(number)} {noun if number == 1 else noun + 's'}"
