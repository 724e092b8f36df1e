"""Recovers the hardware counters of a capture that a killed daemon left behind, from its files.

Samples since the last check of the processes on the GPU are left out, see gpu_access.
"""

from collections.abc import Callable
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.spool.counter_samples import CounterSamples, TargetGpus, cut_off, read_counter_samples, sample_files

from kinetod.base.safe_text import clean
from kinetod.captures.counters.gpu_access import SINCE, UsedGpu
from kinetod.counters.counter_recording import RecordedGpu
from kinetod.counters.interface import CounterCode, CounterPlan
from kinetod.counters.power.interface import SET_NAME

_WHY = "the daemon ended before the sampling did (killed, crashed or stopped); samples since then are missing"


def recover_counters(capture: pb.Capture, directory_of: Callable[[pb.Target], Path]) -> None:
    """Sets Capture.counters and warns the targets that have no verdict, before their files are decoded. Blocks."""
    found: dict[str, pb.RecordedCounters] = {}
    for target in capture.targets:
        if target.verdict != pb.VERDICT_UNSPECIFIED:
            continue
        directory = directory_of(target)
        for path in sample_files(directory / "raw"):
            try:
                samples, why = _permitted(path, TargetGpus.read(directory))
            except (FileError, SpoolError) as exc:
                path.unlink(missing_ok=True)
                target.warnings.append(clean(f"hardware counters: {exc}", 500))
                continue
            header = samples.header
            is_power = header.set == SET_NAME
            what = "power and clocks" if is_power else "hardware counters"
            target.warnings.append(f"{what} of GPU {header.gpu_index}: {why}")
            if is_power:
                continue
            before = found.get(header.gpu_uuid)
            if before is None or before.samples < len(samples.start_ns):
                found[header.gpu_uuid] = _recorded(samples, why)
    capture.counters.extend(sorted(found.values(), key=lambda each: (each.gpu.index, each.gpu.uuid)))


def _permitted(path: Path, gpus: TargetGpus) -> tuple[CounterSamples, str]:
    """Cuts off rows that the caller may not have. Returns the rest, and why it ends there. Raises FileError."""
    samples = read_counter_samples(path)
    until_ns = gpus.permitted_ns.get(samples.header.gpu_uuid)
    if until_ns is None or not (samples.end_ns > until_ns).any():
        return samples, _WHY
    cut_off(path, until_ns)
    return read_counter_samples(path), f"{_WHY}; {SINCE}"


def _recorded(samples: CounterSamples, why: str) -> pb.RecordedCounters:
    header = samples.header
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=header.gpu_index, uuid=clean(header.gpu_uuid, 64)),
        metrics=[
            pb.CounterMetric(name=clean(each.name, 128), label=clean(each.label, 128), unit=clean(each.unit, 32))
            for each in header.metrics
        ],
        samples=len(samples.start_ns),
        reason_code=CounterCode.FAILED,
        reason=why,
        start_ns=int(samples.start_ns[0]) if len(samples.start_ns) else 0,
        end_ns=int(samples.end_ns[-1]) if len(samples.end_ns) else 0,
    )


def metrics_of(plan: CounterPlan) -> list[pb.CounterMetric]:
    """The measured metrics."""
    return [pb.CounterMetric(name=each.name, label=each.label, unit=each.unit) for each in plan.metrics]


def left_out_metrics(plan: CounterPlan) -> list[pb.LeftOutMetric]:
    """The left-out metrics, with reasons."""
    return [pb.LeftOutMetric(name=each.name, why=each.why) for each in plan.left_out]


def recorded_counters(result: RecordedGpu, gpu: UsedGpu | None) -> pb.RecordedCounters:
    """The public result for a GPU. gpu: as known to the driver."""
    losses = result.losses
    index = result.gpu_index if result.gpu_index is not None else gpu.index if gpu is not None else 0
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=index, uuid=result.gpu_uuid, name=gpu.name if gpu is not None else ""),
        metrics=metrics_of(result.plan),
        left_out=left_out_metrics(result.plan),
        samples=losses.rows,
        gaps=losses.gaps,
        lost_ns=losses.lost_ns,
        dropped_samples=losses.dropped_rows,
        reason_code=losses.code,
        reason=losses.reason,
        start_ns=result.start_ns,
        end_ns=result.end_ns,
    )
