"""Packets between the daemon and kinetod-counters, files of samples, and AMD's table of a GPU."""

import random
import struct
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from kineto_trace.errors import FileError
from kineto_trace.spool.counter_samples import (
    CounterHeader,
    CounterSamples,
    SampledMetric,
    read_counter_samples,
    row_type,
    write_header,
    write_rows,
)
from kinetod.counters import messages
from kinetod.counters.amdgpu_backend import (
    SETS,
    TableReading,
    UnknownTableError,
    known_metrics,
    of_set,
    read_table,
)
from kinetod.counters.interface import (
    MAX_METRICS,
    CounterDevice,
    CounterMetric,
    CounterPlan,
    LeftOutMetric,
)
from support.counters.gpu_metrics_tables import VERSIONS, packed

from fuzz import mutate
from fuzz.parts import changed_json

_HEAD_BYTES = 6  # magic and version of a packet
_file = Path(tempfile.mkdtemp(prefix="fuzz-counters-")) / "gpu.counters"
_DEVICE = CounterDevice(uuid="GPU-7a", index=1, name="NVIDIA H200", chip="GH100", pci_bus_id="0000:01:00.0")
_METRIC = CounterMetric(name="gr__cycles_active.avg", label="GPU busy", unit="%")
_PLAN = CounterPlan(metrics=(_METRIC,), left_out=(LeftOutMetric(name="nvlrx__bytes", why="it has no NVLink"),))
_VALUES = {
    "average_gfx_activity": 97, "average_umc_activity": 41, "curr_socket_power": 700, "average_socket_power": 300,
    "energy_accumulator": 1 << 40, "accumulation_counter": 77, "ppt_residency_acc": 2, "firmware_timestamp": 10,
    "current_gfxclk": 2100, "current_uclk": 1300, "indep_throttle_status": 11, "temperature_hotspot": 51,
}  # fmt: skip


def play(data: bytes) -> None:
    _packets(data)
    _samples(data)
    _table(data)


def _packets(data: bytes) -> None:
    try:
        asked = messages.request(data)
    except messages.BadCounterMessage as exc:
        assert len(str(exc)) < 4000
    else:
        assert len(data) <= messages.MAX_REQUEST_BYTES
        if isinstance(asked, (messages.PlanSampling, messages.StartSampling)):
            assert len(asked.metrics) <= MAX_METRICS
        assert messages.request(messages.encode(asked)) == asked
    try:
        said = messages.answer(data)
    except messages.BadCounterMessage:
        return
    assert messages.answer(messages.encode(said)) == said


def _samples(data: bytes) -> None:
    _file.write_bytes(data)
    try:
        found = read_counter_samples(_file)
    except FileError as exc:
        assert str(exc).startswith(str(_file))
        return
    assert found.values.shape == (len(found.start_ns), len(found.header.metrics))
    assert (found.start_ns >= 0).all() and (found.end_ns > found.start_ns).all()
    assert (found.start_ns[1:] >= found.end_ns[:-1]).all()
    assert found.disordered >= 0
    _file.write_bytes(_written(found))
    again = read_counter_samples(_file)
    assert again.header == found.header and again.disordered == 0
    assert np.array_equal(again.start_ns, found.start_ns) and np.array_equal(again.end_ns, found.end_ns)
    assert again.values.tobytes() == found.values.tobytes()


def _written(samples: CounterSamples) -> bytes:
    rows = np.zeros(len(samples.start_ns), dtype=row_type(len(samples.header.metrics)))
    rows["start_ns"], rows["end_ns"], rows["values"] = samples.start_ns, samples.end_ns, samples.values
    made = BytesIO()
    write_header(made, samples.header)
    write_rows(made, rows)
    return made.getvalue()


def _table(data: bytes) -> None:
    try:
        table = read_table(data)
    except UnknownTableError as exc:
        assert len(str(exc)) < 500
        return
    assert all(values for values in table.fields.values())
    reading = TableReading(table=table, time_ns=1)
    for name in SETS:
        chosen, left_out = of_set(table, name)
        assert not {each.metric.name for each in chosen} & {each.name for each in left_out}
    for metric in known_metrics(table).values():
        for before in (reading, TableReading(table=table, time_ns=0)):
            value = metric.value(before, reading)
            assert isinstance(value, float)
            assert metric.metric.unit != "%" or not value > 100


def seeds() -> Iterator[bytes]:
    """One of each message, a file with rows, and a table of each version."""
    for message in (
        messages.ListGpus(),
        messages.ListBaseMetrics(gpu="GPU-7a"),
        messages.PlanSampling(gpu="GPU-7a", set_name="overview"),
        messages.StartSampling(gpu="GPU-7a", interval_ns=10**6, most_ns=10**12, metrics=(_METRIC.name,)),
        messages.StopSampling(),
        messages.GpusReply(gpus=(_DEVICE,), backend="cupti", library_version="130001"),
        messages.BaseMetricsReply(names=("gr__cycles_active", "dram__throughput")),
        messages.PlanReply(plan=_PLAN),
        messages.SamplingStarted(gpu=_DEVICE, plan=_PLAN, interval_ns=10**6, backend="cupti", library_version="130001"),
        messages.SamplingStopped(),
        messages.CountersRefused(code="COUNTERS_BUSY", reason="ncu (process 7) has its counters"),
    ):
        yield messages.encode(message)
    header = CounterHeader(
        gpu_uuid="GPU-7a", gpu_index=0, chip="GH100", interval_ns=10**6,
        metrics=(SampledMetric(name="gr__cycles_active.avg", label="GPU busy", unit="%"),) * 2, set="overview",
        backend="cupti", library_version="130001",
    )  # fmt: skip
    rows = np.zeros(3, dtype=row_type(2))
    rows["start_ns"], rows["end_ns"] = [1000, 2000, 1500], [2000, 3000, 4000]
    rows["values"] = [[1.5, np.nan], [0, 100], [7, 7]]
    made = BytesIO()
    write_header(made, header)
    write_rows(made, rows)
    yield made.getvalue()
    yield b""
    for version in (*VERSIONS[:5], (1, 9)):  # the later ones are long, and differ in places that are not read
        yield packed(version, _VALUES)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A packet with another value, a table of another version or length that says so, or damaged bytes."""
    if data[:4] == b"KCTR" and rng.random() < 0.8:
        return data[:_HEAD_BYTES] + changed_json(data[_HEAD_BYTES:], rng)
    damaged = mutate.damaged(data, rng)
    if len(data) > 4 and data[2] == 1 and rng.random() < 0.8:
        return struct.pack("<HBB", len(damaged) & 0xFFFF, 1, rng.choice((data[3], 9))) + damaged[4:]
    return damaged
