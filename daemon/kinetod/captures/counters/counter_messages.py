"""Plans and results of samplings as clients see them."""

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.captures.counters.gpu_access import UsedGpu
from kinetod.counters.counter_recording import RecordedGpu
from kinetod.counters.interface import CounterPlan


def metrics_of(plan: CounterPlan) -> list[pb.CounterMetric]:
    """What is measured."""
    return [pb.CounterMetric(name=each.name, label=each.label, unit=each.unit) for each in plan.metrics]


def left_out_of(plan: CounterPlan) -> list[pb.LeftOutMetric]:
    """What is not, and why."""
    return [pb.LeftOutMetric(name=each.name, why=each.why) for each in plan.left_out]


def recorded_counters(result: RecordedGpu, gpu: UsedGpu | None) -> pb.RecordedCounters:
    """What became of a GPU. gpu: as the driver knows it."""
    losses = result.losses
    index = result.gpu_index if result.gpu_index is not None else gpu.index if gpu is not None else 0
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=index, uuid=result.gpu_uuid, name=gpu.name if gpu is not None else ""),
        metrics=metrics_of(result.plan),
        left_out=left_out_of(result.plan),
        samples=losses.rows,
        gaps=losses.gaps,
        lost_ns=losses.lost_ns,
        dropped_samples=losses.dropped_rows,
        reason_code=losses.code,
        reason=losses.reason,
        start_ns=result.start_ns,
        end_ns=result.end_ns,
    )
