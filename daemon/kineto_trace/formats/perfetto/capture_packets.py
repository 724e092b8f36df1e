"""Builds the parts of a Perfetto trace from the tables of a capture."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kineto_trace.arrays.codec import PreparedTexts
from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.collectives.nccl import COLUMN, collective_columns
from kineto_trace.formats.chrome.chrome_events import EVENT_TYPES, ONE_DEVICE, TWO_DEVICES
from kineto_trace.formats.chrome.chrome_writer import OVERHEAD_PID, nested_python, sync_devices
from kineto_trace.formats.counter_series import HardwareSeries
from kineto_trace.formats.perfetto.packet_sections import (
    OVERHEAD_RANK,
    FieldList,
    Numbers,
    PacketPart,
    Place,
    Tracks,
    counter_part,
    hardware_counters,
)
from kineto_trace.formats.perfetto_proto import INSTANT, SLICE, UNIT_BYTES, Annotations, Counter
from kineto_trace.formats.viewer_rows import NESTING, LaunchShapes, base_rows, sync_base_rows
from kineto_trace.model.activity_tables import (
    END_MOVED,
    NO_PRIORITY,
    OWN_ROWS,
    SAMPLED_ARGUMENTS,
    START_MOVED,
    ActivityTable,
    ViewerRow,
    arguments_of,
    numbers_of,
)
from kineto_trace.model.trace import (
    API_TABLES,
    GPU_TABLES,
    NO_MODULE,
    NO_ROW,
    NO_SEQUENCE,
    OP_TABLES,
    Table,
    Trace,
    own_tables,
)
from kineto_trace.structure.captured_graphs import CAPTURED_OP, captured_columns

CPU_DEVICE = 0  # device_type
_GRAPH = (("graph_id", "graph id"), ("graph_node_id", "graph node id"))
_CHANNEL = (("channel", "channel"), ("channel_type", "channel_type"))


class CaptureParts:
    """Builds the parts; `tracks` then holds the tracks that they are on."""

    def __init__(self, trace: Trace, tracks: Tracks, annotations: Annotations) -> None:
        self._trace, self._tracks, self._annotations = trace, tracks, annotations
        self._captured_ops = captured_columns(trace)
        target = trace.target
        self.notes: list[str] = []
        self.ids: dict[int, list[str]] = {}  # track -> pid and tid of Kineto's rows
        self._process = tracks.process(target.pid, target.process_name or "process")

    def all(self) -> list[PacketPart]:
        """Returns all parts that have rows. For equal intervals, rows of the earlier part enclose the others."""
        makers: dict[str, Callable[[Table], PacketPart]] = {
            "python_function": self._python,
            **dict.fromkeys(OP_TABLES, self._op),
            **dict.fromkeys(API_TABLES, self._call),
            "cpu_instant_event": self._memory,
            "gpu_user_annotation": self._gpu_annotation,
            **dict.fromkeys(GPU_TABLES, self._gpu_work),
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._copy,
            "cuda_sync": self._sync,
            "overhead": self._overhead,
        }
        parts = [makers[kind](self._trace.table(kind)) for kind in NESTING if len(self._trace.table(kind))]
        own = [self._trace.table(kind) for kind in own_tables(self._trace.tables, *OWN_ROWS)]
        parts += [self._declared(table, table.declared) for table in own if len(table) and table.declared is not None]
        return [*parts, *self._counters()]

    # ---- tracks

    def _threads(self, table: Table) -> Numbers:
        """Returns the track of each row's thread."""
        names = self._trace.target.threads
        threads, place = np.unique(table["thread"], return_inverse=True)
        numbers = []
        for tid in threads.tolist():
            name = names.get(tid, self._trace.target.process_name or f"thread {tid}")
            if tid == 0:
                name = "unknown thread"
            numbers.append(self._tracks.thread(self._process, tid, name))
            self.ids[numbers[-1]] = [str(self._trace.target.pid), str(tid)]
        found: Numbers = np.array(numbers, np.uint32)[place.reshape(-1)]
        return found

    def _streams(self, device: AnyArray, row: Ints) -> Numbers:
        """Returns the track of each GPU row."""
        keys, place = np.unique(device.astype(np.int64) << 32 | row + 1, return_inverse=True)
        numbers = []
        for key in keys.tolist():
            place_of = key >> 32, (key & 0xFFFFFFFF) - 1
            numbers.append(self._tracks.stream(self._process, *place_of))
            self.ids[numbers[-1]] = [str(value) for value in place_of]
        found: Numbers = np.array(numbers, np.uint32)[place.reshape(-1)]
        return found

    # ---- parts

    def _part(self, table: Table, track: Numbers, fields: FieldList, **more: object) -> PacketPart:
        part = PacketPart(
            type=SLICE,
            category=self._trace.category(table.kind),
            kind=table.kind,
            start=table["start"],
            end=table.end(),
            track=track,
            name=table["name"],
            fields=fields.fields,
            readies=fields.readies,
        )
        return replace(part, **more)  # type: ignore[arg-type]

    def _fields(self) -> FieldList:
        return FieldList(self._annotations)

    def _op(self, table: Table) -> PacketPart:
        fields = self._fields()
        fields.signed("External id", table["id"])
        fields.optional("Sequence number", table["sequence"], NO_SEQUENCE)
        forward = np.where(table["sequence"] == NO_SEQUENCE, -1, table["forward_thread"].astype(np.int64))
        fields.optional("Fwd thread id", forward, -1)
        fields.members(table["inputs"], self._trace.strings)
        if not table["finished"].all():
            fields.ready(table["finished"], [self._annotations.ready({"finished": False})])
        return self._part(table, self._threads(table), fields)

    def _python(self, table: Table) -> PacketPart:
        fields = self._fields()
        row = np.arange(1, len(table) + 1)
        fields.signed("Python id", row)
        fields.optional("Python parent id", np.where(table["parent"] == NO_ROW, -1, table["parent"] + 1), -1)
        start, end = table["start"], table.end()
        if self._trace.sample_period_ns:
            fields.signed("samples", table["samples"])
            fields.signed("self samples", table["self_samples"])
            fields.optional("running samples", table["running"])
            fields.optional("samples waiting for the GIL", table["waiting"])
            fields.optional("idle samples", table["idle"])
            fields.optional("line", table["line"])
            for column, key in SAMPLED_ARGUMENTS.items():
                fields.optional(key, table[column])
            fields.texts("lines", table["lines"], self._trace.strings)
            fields.texts("callees", table["callees"], self._trace.strings)
            times = nested_python(self._trace, table)
            start, end = times.get("start", start), start + table["duration"]
            if times:
                end = start + times["duration"]
            fields.optional(START_MOVED, start - table["start"])
            fields.optional(END_MOVED, end - table.end())
        fields.optional("Python module id", np.where(table["samples"] == 0, table["module"], NO_MODULE), NO_MODULE)
        return self._part(table, self._threads(table), fields, start=start, end=end)

    def _call(self, table: Table) -> PacketPart:
        fields = self._fields()
        fields.unsigned("cbid", table["cbid"])
        fields.unsigned("correlation", table["correlation"])
        fields.optional("External id", table["external_id"])
        return self._part(table, self._threads(table), fields)

    def _gpu_annotation(self, table: Table) -> PacketPart:
        fields = self._fields()
        fields.signed("External id", table["external_id"])
        return self._part(table, self._streams(table["device"], base_rows(table)), fields)

    def _gpu_work(self, table: Table) -> PacketPart:
        """Returns the part for GPU work of any table, with its numeric arguments."""
        fields = self._fields()
        for column, key in numbers_of(table.kind).items():
            fields.number(key, table[column])
        return self._on_stream(table, fields)

    def _declared(self, table: Table, declared: ActivityTable) -> PacketPart:
        """Returns the part for a vendor's own activity type, with its columns as annotations."""
        fields = self._fields()
        for column in arguments_of(declared):
            if column.text:
                fields.texts(column.name, table[column.name], self._trace.strings)
            elif column.dtype == "float64":
                fields.double(column.name, table[column.name])
            else:
                fields.number(column.name, table[column.name])
        if declared.row is ViewerRow.GPU:
            return self._on_stream(table, fields)
        fields.optional("External id", table["external_id"])
        return self._part(table, self._threads(table), fields)

    def _on_stream(self, table: Table, fields: FieldList) -> PacketPart:
        fields.optional("External id", table["external_id"])
        return self._part(table, self._streams(table["device"], base_rows(table)), fields, leaf=True)

    def _kernel(self, table: Table) -> PacketPart:
        fields = self._fields()
        fields.optional("queued", table["queued"])
        for name in ("device", "context", "stream", "correlation"):
            fields.unsigned(name, table[name])
        numbers, texts = LaunchShapes(self._trace.devices).texts(table.columns)
        fields.ready(numbers, [self._annotations.ready_text(text) for text in _decoded(texts)])
        for column, key in _GRAPH:
            fields.optional(key, table[column])
        fields.optional("priority", table["priority"], NO_PRIORITY)
        for column, key in _CHANNEL:
            fields.optional(key, table[column])
        if COLUMN in (collective := collective_columns(self._trace)):
            fields.members(collective[COLUMN], self._trace.strings)
        fields.members(table["hlo"], self._trace.strings)
        self._captured(table, fields)
        return self._on_stream(table, fields)

    def _copy(self, table: Table) -> PacketPart:
        """Returns the part for copies and sets."""
        fields = self._fields()
        self._place(table, fields)
        for name in ("stream", "correlation", "bytes"):
            fields.unsigned(name, table[name])
        fields.double("memory bandwidth (GB/s)", table["bytes"] / np.maximum(table["duration"], 1))
        for column, key in (*_GRAPH, *_CHANNEL):
            fields.optional(key, table[column])
        self._captured(table, fields)
        return self._on_stream(table, fields)

    def _captured(self, table: Table, fields: FieldList) -> None:
        if table.kind in self._captured_ops:
            fields.texts("captured op", self._captured_ops[table.kind][CAPTURED_OP], self._trace.strings)

    def _place(self, table: Table, fields: FieldList) -> None:
        """Adds where the work ran; copies between two devices also state the source and the destination."""
        peer = table["peer"] == 1 if table.kind == "gpu_memcpy" else np.zeros(len(table), np.bool_)
        if not peer.any():
            fields.unsigned("device", table["device"])
            fields.unsigned("context", table["context"])
            return
        for ends, mask in ((ONE_DEVICE, ~peer), (TWO_DEVICES, peer)):
            for name, column in ends.items():
                fields.optional(name, np.where(mask, table[column].astype(np.int64), -1), -1)

    def _sync(self, table: Table) -> PacketPart:
        fields = self._fields()
        device = sync_devices(self._trace)
        kinds, place = np.unique(table["name"], return_inverse=True)
        named = [self._annotations.ready({"cuda_sync_kind": self._trace.strings[kind]}) for kind in kinds.tolist()]
        fields.ready(place.reshape(-1).astype(np.uint32), named)
        event = np.isin(table["type"], EVENT_TYPES)
        for name, column in (
            ("wait_on_stream", table["wait_on_stream"]),
            ("wait_on_cuda_event_record_corr_id", table["wait_on_correlation"]),
            ("wait_on_cuda_event_id", table["event"].astype(np.int64)),
        ):
            fields.optional(name, np.where(event, column, -(2**63)), -(2**63))
        fields.signed("stream", table["stream"].view(np.int32))
        fields.unsigned("correlation", table["correlation"])
        fields.signed("device", device)
        fields.unsigned("context", table["context"])
        return self._part(table, self._streams(device, sync_base_rows(table)), fields, leaf=True)

    def _overhead(self, table: Table) -> PacketPart:
        track = self._tracks.group("overhead", "CUPTI overhead", self._process, OVERHEAD_RANK)
        self.ids[track] = [str(OVERHEAD_PID), "0"]
        return self._part(table, np.full(len(table), track, np.uint32), self._fields())

    def _memory(self, table: Table) -> PacketPart:
        fields = self._fields()
        fields.signed("Bytes", table["bytes"])
        fields.optional("Total Reserved", table["total_reserved"], -1)
        fields.optional("Total Allocated", table["total_allocated"], -1)
        fields.signed("Device Id", table["device"])
        fields.signed("Device Type", table["device_type"])
        fields.unsigned("Addr", table["address"])
        return self._part(table, self._threads(table), fields, type=INSTANT, end=table["start"])

    # ---- counters

    def _counters(self) -> list[PacketPart]:
        """Returns the samples of hardware counters, and the memory of each device if the records state it."""
        memory = memory_counters(self._trace.table("cpu_instant_event"), self._tracks, self._process)
        return [*memory, *hardware_counters(self._trace, self._tracks, self.ids, self._below_gpu)]

    def _below_gpu(self, series: HardwareSeries) -> Place:
        device = str(series.device)
        return self._tracks.gpu(self._process, series.device), device, device


def memory_counters(table: Table, tracks: Tracks, process: int) -> list[PacketPart]:
    """Returns counter tracks of the bytes allocated and reserved on each device."""
    if not len(table):
        return []
    parts = []
    places, which = np.unique(np.stack([table["device_type"], table["device"]], axis=1), axis=0, return_inverse=True)
    for number, (device_type, device) in enumerate(places.tolist()):
        parent = process if device_type == CPU_DEVICE else tracks.gpu(process, device)
        label = "CPU" if device_type == CPU_DEVICE else f"GPU {device}"
        for column, word in (("total_allocated", "allocated"), ("total_reserved", "reserved")):
            rows = np.flatnonzero((which.reshape(-1) == number) & (table[column] >= 0))
            if len(rows):
                track = tracks.counter(parent, f"{label} memory {word}", Counter(UNIT_BYTES))
                parts.append(counter_part(table["start"][rows], table[column][rows], track))
    return parts


def _decoded(texts: PreparedTexts) -> list[str]:
    """Returns the texts as strings."""
    data, ends = texts.data.tobytes(), texts.ends.tolist()
    return [data[first:last].decode() for first, last in zip(ends[:-1], ends[1:], strict=True)]
