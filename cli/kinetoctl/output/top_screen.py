"""One sample of a host as `kinetoctl top` shows it. Pure: protobuf in, rich tables out."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.cell_values import NOTHING

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

GPU_COLUMNS = (
    "GPU",
    "NAME",
    "UTIL",
    "MEM",
    "MEMORY",
    "POWER",
    "TEMP",
    "SM CLOCK",
    "PCIE RX/TX",
    "NVLINK RX/TX",
    "PROC",
)
PROCESS_COLUMNS = (
    "PID", "USER", "RANK", "JOB", "GPU", "GPU MEM", "GPU UTIL", "CPU", "RSS", "AGENT", "CAPTURE", "ITER", "POD",
    "COMMAND",
)  # fmt: skip
# What is left out of a narrow terminal, in this order; KEPT stays even without any value.
LEAST_WANTED = (
    "POD", "RSS", "NVLINK RX/TX", "PCIE RX/TX", "SM CLOCK", "CPU", "CAPTURE", "JOB", "GPU UTIL", "USER", "GPU MEM",
    "POWER", "MEM", "NAME", "AGENT",
)  # fmt: skip
KEPT = ("PID", "RANK", "GPU", "ITER")
_POD = PROCESS_COLUMNS.index("POD")
_GAP = 2


def gpu_memory(sample: "pb.ProcessSample") -> int:
    """Bytes on all GPUs."""
    return sum(use.memory_bytes for use in sample.gpus)


def gpu_share(sample: "pb.ProcessSample") -> float:
    """GPUs that it keeps busy."""
    return sum(use.utilization for use in sample.gpus)


# What --sort names: the key, and whether the largest comes first.
ORDERS: "dict[str, tuple[Callable[[pb.ProcessSample], tuple[object, ...]], bool]]" = {
    "gpu": (lambda each: (gpu_share(each), gpu_memory(each), each.cpu), True),
    "gpu-memory": (lambda each: (gpu_memory(each),), True),
    "cpu": (lambda each: (each.cpu,), True),
    "memory": (lambda each: (each.memory_bytes,), True),
    "pid": (lambda each: (each.process.pid,), False),
    "rank": (lambda each: (not each.process.HasField("rank"), each.process.rank, each.process.pid), False),
    "user": (lambda each: (each.process.user, each.process.pid), False),
    "job": (lambda each: (each.process.job_id == "", each.process.job_id, each.process.rank), False),
}


def ordered(processes: "Sequence[pb.ProcessSample]", order: str, *, reverse: bool = False) -> "list[pb.ProcessSample]":
    """The processes by one of ORDERS; those that are equal stay by pid."""
    key, largest_first = ORDERS[order]
    return sorted(processes, key=key, reverse=largest_first is not reverse)


def render(
    sample: "pb.HostSample", *, order: str, reverse: bool = False, rows: int | None = None, width: int | None = None
) -> RenderableType:
    """The whole picture; at most `rows` lines of processes. width: of the terminal, None for a pipe."""
    parts: list[RenderableType] = [*_head(sample), Text("")]
    if sample.gpus:
        parts += [_table(GPU_COLUMNS, [gpu_row(gpu, sample) for gpu in sample.gpus], width), Text("")]
    parts += [Text(note) for note in _notes(sample)]
    processes = ordered(sample.processes, order, reverse=reverse)
    shown = processes if rows is None else processes[: max(rows, 1)]
    columns, cells = list(PROCESS_COLUMNS), [list(process_row(process, sample)) for process in shown]
    if not any(process.process.pod_name for process in shown):  # no node of Kubernetes, or one that tells no names
        for each in (columns, *cells):
            del each[_POD]
    parts.append(_table(columns, [tuple(each) for each in cells], width))
    if len(shown) < len(processes):
        parts.append(Text(f"… {len(processes) - len(shown)} more processes"))
    return Group(*parts)


def _head(sample: "pb.HostSample") -> list[Text]:
    at = datetime.fromtimestamp(sample.time_ns / 1e9).astimezone().strftime("%H:%M:%S")
    used = sample.memory_total_bytes - sample.memory_available_bytes
    captures, agents = sample.captures_running, sample.agents
    lines = [
        f"{one_line(sample.hostname)}  {at}  kinetod {one_line(sample.version)}  agents {agents}  captures {captures}",
        f"cpu {_percent(sample.cpu_busy)} of {sample.cpus}, waiting for disks {_percent(sample.cpu_iowait)}, "
        f"load {sample.load_1m:.1f}   memory {units.size(used)} of {units.size(sample.memory_total_bytes)}"
        + (f"   swap {units.size(sample.swap_used_bytes)}" if sample.swap_used_bytes else ""),
        f"disk read {_rate(sample.disk_read_bytes_per_second)} write {_rate(sample.disk_written_bytes_per_second)}   "
        f"network in {_rate(sample.network_receive_bytes_per_second)} "
        f"out {_rate(sample.network_transmit_bytes_per_second)}   store free {units.size(sample.store_free_bytes)}",
    ]
    return [Text(lines[0], style="bold"), *map(Text, lines[1:])]


def _notes(sample: "pb.HostSample") -> list[str]:
    """Why GPUs are missing: nothing to say of a library that is not needed beside one that works."""
    libraries = sample.gpu_libraries
    works = any(each.state == "ok" for each in libraries)
    told = {each.detail: None for each in libraries if each.state in ("failed", "late") or (not works and each.detail)}
    return [f"GPUs: {one_line(detail)}" for detail in told]


def gpu_row(gpu: "pb.GpuSample", sample: "pb.HostSample") -> tuple[str, ...]:
    """The cells of GPU_COLUMNS."""
    if not gpu.works:
        return (str(gpu.gpu.index), one_line(gpu.gpu.name), "LOST", *[NOTHING] * 8)
    memory = (
        f"{units.size(gpu.memory_used_bytes)} / {units.size(gpu.gpu.memory_bytes)}"
        if gpu.HasField("memory_used_bytes")
        else NOTHING
    )
    limit = f" / {gpu.power_limit_watts:.0f}" if gpu.HasField("power_limit_watts") else ""
    count = sum(
        any(use.gpu == gpu.gpu.index and use.vendor == gpu.vendor for use in process.gpus)
        for process in sample.processes
    )
    return (
        str(gpu.gpu.index),
        one_line(gpu.gpu.name),
        _percent(gpu.utilization) if gpu.HasField("utilization") else NOTHING,
        _percent(gpu.memory_utilization) if gpu.HasField("memory_utilization") else NOTHING,
        memory,
        f"{gpu.power_watts:.0f}{limit} W" if gpu.HasField("power_watts") else NOTHING,
        f"{gpu.temperature_celsius:.0f} °C" if gpu.HasField("temperature_celsius") else NOTHING,
        f"{gpu.sm_clock_hertz / 1e6:.0f} MHz" if gpu.HasField("sm_clock_hertz") else NOTHING,
        _both(gpu, "pcie"),
        _both(gpu, "nvlink"),
        str(count),
    )


def _both(gpu: "pb.GpuSample", link: str) -> str:
    fields = [f"{link}_{direction}_bytes_per_second" for direction in ("receive", "transmit")]
    if not all(gpu.HasField(field) for field in fields):
        return NOTHING
    return " / ".join(_rate(getattr(gpu, field)) for field in fields)


def process_row(sample: "pb.ProcessSample", host: "pb.HostSample") -> tuple[str, ...]:
    """The cells of PROCESS_COLUMNS."""
    process = sample.process
    gpus = sorted({use.gpu for use in sample.gpus}) or sorted(process.gpus)
    utilization = any(use.HasField("utilization") for use in sample.gpus)
    memory = any(use.HasField("memory_bytes") for use in sample.gpus)
    return (
        str(process.pid),
        one_line(process.user) or str(process.uid),
        str(process.rank) if process.HasField("rank") else NOTHING,
        one_line(process.job_id) or NOTHING,
        ",".join(map(str, gpus)) or NOTHING,
        units.size(gpu_memory(sample)) if memory else NOTHING,
        _percent(gpu_share(sample)) if utilization else NOTHING,
        _percent(sample.cpu),
        units.size(sample.memory_bytes),
        enum_names.agent_state(process.agent_state),
        one_line(process.busy_capture_id) or NOTHING,
        str(process.iterations) if process.iterations > 0 else NOTHING,
        one_line(enum_names.pod(process)) or NOTHING,
        one_line(" ".join(process.command)),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def _rate(per_second: float) -> str:
    return f"{units.size(int(per_second))}/s"


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int | None) -> Table:
    """The last column is cut where the width does not do. Before that, columns are left out: those without any value,
    then those of LEAST_WANTED.
    """
    widths = [max([len(column), *(len(row[place]) for row in rows)]) for place, column in enumerate(columns)]
    shown = list(range(len(columns)))
    empty = [place for place in shown if columns[place] not in KEPT and all(row[place] == NOTHING for row in rows)]
    unwanted = [columns.index(column) for column in LEAST_WANTED if column in columns]
    for place in [*empty, *unwanted]:
        needed = sum(widths[each] + _GAP for each in shown[:-1]) + len(columns[-1]) + _GAP
        if width is None or needed <= width:
            break
        shown = [each for each in shown if each != place]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for place in shown:
        least = len(columns[place]) if place == shown[-1] else widths[place]
        table.add_column(columns[place], no_wrap=True, overflow="ellipsis", min_width=least)
    *others, last = shown
    room = None if width is None else max(width - sum(widths[each] + _GAP for each in others), len(columns[last]))
    for row in rows:
        command = Text(row[last])
        if room is not None:
            command.truncate(room, overflow="ellipsis")  # Rich would take from every column
        table.add_row(*(Text(row[place]) for place in others), command)
    return table
