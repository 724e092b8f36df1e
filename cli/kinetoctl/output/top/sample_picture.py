"""One sample of a host as `kinetoctl top` prints it. Pure: protobuf in, rich tables out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.cell_values import NOTHING
from kinetoctl.output.lists.process_table import rate
from kinetoctl.output.top.orders import gpu_memory, gpu_share, ordered

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

GPU_COLUMNS = (
    "GPU",
    "NAME",
    "UTIL",
    "SM",
    "TENSOR",
    "DRAM",
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
    "PID", "USER", "RANK", "JOB", "GPU", "GPU MEM", "GPU UTIL", "CPU", "RSS", "AGENT", "CAPTURE", "ITER", "ITER/S",
    "POD", "COMMAND",
)  # fmt: skip
# What is left out of a narrow terminal, in this order; KEPT stays even without any value.
LEAST_WANTED = (
    "POD", "CAPTURE", "RSS", "NVLINK RX/TX", "PCIE RX/TX", "SM CLOCK", "CPU", "JOB", "GPU UTIL", "USER", "GPU MEM",
    "MEM", "DRAM", "SM", "POWER", "TENSOR", "NAME", "AGENT", "TREND", "ITER/S",
)  # fmt: skip
KEPT = ("PID", "RANK", "GPU", "ITER")
_POD = PROCESS_COLUMNS.index("POD")
COMMAND_WANTED = 40  # characters of the last column, for which GIVING_WAY and columns without any value are left out
GIVING_WAY = ("POD", "CAPTURE")
_GAP = 2
EIGHTHS = " ▏▎▍▌▋▊▉"
TRACED = "●"  # before a process in which a capture is running


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveColumns:
    """What only the live view shows. trend: of a process; selected: the place of a row among those that are shown."""

    trend: "Callable[[pb.ProcessSample], str]"
    selected: int | None


def render(sample: "pb.HostSample", *, order: str, reverse: bool = False, width: int | None = None) -> RenderableType:
    """The whole picture. width: of the terminal, None for a pipe."""
    parts: list[RenderableType] = [*head(sample), Text("")]
    if sample.gpus:
        parts += [gpu_table(sample, sample.gpus, width), Text("")]
    parts += notes(sample)
    parts.append(process_table(sample, ordered(sample.processes, order, reverse=reverse), width))
    return Group(*parts)


def gpu_table(sample: "pb.HostSample", gpus: "Sequence[pb.GpuSample]", width: int | None, *, bars: int = 0) -> Table:
    """These GPUs of the sample. bars: length of the bars beside shares, in characters."""
    return _table(GPU_COLUMNS, [gpu_row(gpu, sample, bars) for gpu in gpus], width)


def process_table(
    sample: "pb.HostSample",
    processes: "Sequence[pb.ProcessSample]",
    width: int | None,
    live: LiveColumns | None = None,
) -> Table:
    """These processes of the sample, in this order."""
    columns, cells = list(PROCESS_COLUMNS), [list(process_row(process, sample)) for process in processes]
    if not any(process.process.pod_name for process in processes):  # no node of Kubernetes, or one that tells no names
        for each in (columns, *cells):
            del each[_POD]
    if live is None:
        return _table(columns, [tuple(each) for each in cells], width)
    place = columns.index("ITER/S") + 1
    columns.insert(place, "TREND")
    columns.insert(0, "")
    for each, process in zip(cells, processes, strict=True):
        each[-1] = _short_command(process.process)
        each.insert(place, live.trend(process))
        each.insert(0, TRACED if process.process.busy_capture_id else " ")
    return _table(columns, [tuple(each) for each in cells], width, selected=live.selected)


def head(sample: "pb.HostSample") -> list[Text]:
    """The host, in three lines."""
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


def notes(sample: "pb.HostSample") -> list[Text]:
    """Why GPUs are missing: nothing to say of a library that is not needed beside one that works."""
    libraries = sample.gpu_libraries
    works = any(each.state == "ok" for each in libraries)
    told = {each.detail: None for each in libraries if each.state in ("failed", "late") or (not works and each.detail)}
    return [Text(f"GPUs: {one_line(detail)}") for detail in told]


def bar(share: float, length: int) -> str:
    """A bar of `length` characters, filled to an eighth of one, and a blank; empty without a length."""
    if not length:
        return ""
    whole, rest = divmod(round(min(max(share, 0.0), 1.0) * length * 8), 8)
    return f"{'█' * whole}{EIGHTHS[rest]}".rstrip().ljust(length, "·") + " "


def gpu_row(gpu: "pb.GpuSample", sample: "pb.HostSample", bars: int = 0) -> tuple[str, ...]:
    """The cells of GPU_COLUMNS."""
    if not gpu.works:
        return (str(gpu.gpu.index), one_line(gpu.gpu.name), "LOST", *[NOTHING] * (len(GPU_COLUMNS) - 3))
    filled = gpu.memory_used_bytes / gpu.gpu.memory_bytes if gpu.gpu.memory_bytes else 0.0
    memory = (
        f"{bar(filled, bars)}{units.size(gpu.memory_used_bytes)} / {units.size(gpu.gpu.memory_bytes)}"
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
        f"{bar(gpu.utilization, bars)}{_percent(gpu.utilization)}" if gpu.HasField("utilization") else NOTHING,
        _share(gpu, "sm_active"),
        _share(gpu, "tensor_active"),
        _share(gpu, "dram_active"),
        _share(gpu, "memory_utilization"),
        memory,
        f"{gpu.power_watts:.0f}{limit} W" if gpu.HasField("power_watts") else NOTHING,
        f"{gpu.temperature_celsius:.0f} °C" if gpu.HasField("temperature_celsius") else NOTHING,
        f"{gpu.sm_clock_hertz / 1e6:.0f} MHz" if gpu.HasField("sm_clock_hertz") else NOTHING,
        _both(gpu, "pcie"),
        _both(gpu, "nvlink"),
        str(count),
    )


def _share(gpu: "pb.GpuSample", field: str) -> str:
    return _percent(getattr(gpu, field)) if gpu.HasField(field) else NOTHING


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
        rate(process),
        one_line(enum_names.pod(process)) or NOTHING,
        one_line(" ".join(process.command)),
    )


def _short_command(process: "pb.Process") -> str:
    """The command without the folder of its program, so that a narrow column shows what follows."""
    return one_line(" ".join([*(each.rpartition("/")[2] for each in process.command[:1]), *process.command[1:]]))


def _percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def _rate(per_second: float) -> str:
    return f"{units.size(int(per_second))}/s"


def _table(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int | None, *, selected: int | None = None
) -> Table:
    """The last column is cut where the width does not do. Before that, columns are left out: those without any value,
    then those of LEAST_WANTED.
    """
    widths = [max([len(column), *(len(row[place]) for row in rows)]) for place, column in enumerate(columns)]
    shown = list(range(len(columns)))
    empty = [place for place in shown if columns[place] not in KEPT and all(row[place] == NOTHING for row in rows)]
    unwanted = [columns.index(column) for column in LEAST_WANTED if column in columns]
    for place in [*empty, *unwanted]:
        gives_way = place in empty or columns[place] in GIVING_WAY
        last = min(widths[-1], COMMAND_WANTED) if gives_way else len(columns[-1])
        needed = sum(widths[each] + _GAP for each in shown[:-1]) + last + _GAP
        if width is not None and needed > width:
            shown = [each for each in shown if each != place]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for place in shown:
        least = len(columns[place]) if place == shown[-1] else widths[place]
        table.add_column(columns[place], no_wrap=True, overflow="ellipsis", min_width=least)
    *others, last = shown
    room = None if width is None else max(width - sum(widths[each] + _GAP for each in others), len(columns[last]))
    for number, row in enumerate(rows):
        command = Text(row[last])
        if room is not None:
            command.truncate(room, overflow="ellipsis")  # Rich would take from every column
        style = "reverse" if number == selected else None
        table.add_row(*(Text(row[place]) for place in others), command, style=style)
    return table
