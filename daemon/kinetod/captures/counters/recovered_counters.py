"""The hardware counters of a capture that a killed daemon left behind: what is in its files, and that it ends there."""

from collections.abc import Callable
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.errors import FileError
from kineto_trace.spool.counter_samples import SUFFIX, CounterSamples, read_counter_samples

from kinetod.base.safe_text import clean
from kinetod.counters.interface import CounterCode
from kinetod.counters.power.interface import SET_NAME

_WHY = "the daemon ended before the sampling did (killed, crashed or stopped); samples since then are missing"


def recover_counters(capture: pb.Capture, directory_of: Callable[[pb.Target], Path]) -> None:
    """Sets Capture.counters and warns the targets that have no verdict, before their files are decoded. Blocks."""
    found: dict[str, pb.RecordedCounters] = {}
    for target in capture.targets:
        if target.verdict != pb.VERDICT_UNSPECIFIED:
            continue
        for path in sorted((directory_of(target) / "raw").glob(f"*{SUFFIX}")):
            try:
                samples = read_counter_samples(path)
            except FileError as exc:
                target.warnings.append(clean(f"hardware counters: {exc}", 500))
                continue
            header = samples.header
            is_power = header.set == SET_NAME
            what = "power and clocks" if is_power else "hardware counters"
            target.warnings.append(f"{what} of GPU {header.gpu_index}: {_WHY}")
            if is_power:
                continue
            before = found.get(header.gpu_uuid)
            if before is None or before.samples < len(samples.start_ns):
                found[header.gpu_uuid] = _recorded(samples)
    capture.counters.extend(sorted(found.values(), key=lambda each: (each.gpu.index, each.gpu.uuid)))


def _recorded(samples: CounterSamples) -> pb.RecordedCounters:
    header = samples.header
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=header.gpu_index, uuid=clean(header.gpu_uuid, 64)),
        metrics=[
            pb.CounterMetric(name=clean(each.name, 128), label=clean(each.label, 128), unit=clean(each.unit, 32))
            for each in header.metrics
        ],
        samples=len(samples.start_ns),
        reason_code=CounterCode.FAILED,
        reason=_WHY,
        start_ns=int(samples.start_ns[0]) if len(samples.start_ns) else 0,
        end_ns=int(samples.end_ns[-1]) if len(samples.end_ns) else 0,
    )
