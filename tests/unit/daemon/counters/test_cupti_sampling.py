"""The C library and its backend against a libcupti that checks each call.

On a busy machine, a decoding may come so late that the image is full, which then is a loss that has to be counted.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kinetod.counters.cupti_backend import CuptiBackend, CuptiSampling
from kinetod.counters.interface import CounterCode, CounterError, WantedCounters
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, RingReader, RingStatus, RingWriter
from support.counters.fake_pm_sampling import UUID, FakePmSampling
from support.waiting import until

GPU = UUID.format(0)
OVERVIEW = WantedCounters(set_name="overview")
MS = 1_000_000
SEQUENCE = (
    "cuptiProfilerHostInitialize", "cuptiProfilerHostConfigAddMetrics", "cuptiProfilerHostGetConfigImageSize",
    "cuptiProfilerHostGetConfigImage", "cuptiProfilerHostGetNumOfPasses", "cuptiPmSamplingEnable",
    "cuptiPmSamplingSetConfig", "cuptiPmSamplingGetCounterDataSize", "cuptiPmSamplingCounterDataImageInitialize",
    "cuptiPmSamplingStart",
)  # fmt: skip


class Run:
    """A sampling in a thread, as kinetod-counters has it."""

    def __init__(
        self, backend: CuptiBackend, wanted: WantedCounters = OVERVIEW, *, interval_ns: int = MS, most_s: float = 60.0,
        ring_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self._most_ns, self._ring_bytes = int(most_s * 1e9), ring_bytes
        self._rings: list[RingWriter] = []
        self.sampling: CuptiSampling = backend.start(GPU, wanted, interval_ns, self._make)
        ring = self._rings[-1]
        self.reader = RingReader(os.dup(ring.descriptor), ring.metrics)
        self.thread = threading.Thread(target=self.sampling.run)
        self.thread.start()

    def _make(self, metrics: int) -> RingWriter:
        self._rings.append(RingWriter(metrics, most_ns=self._most_ns, size=self._ring_bytes))
        return self._rings[-1]

    def until(self, condition: Callable[[RingStatus], bool], what: str) -> None:
        until(lambda: condition(self.reader.status()), what, state=self.reader.status)

    def stop(self) -> RingStatus:
        """Ends it."""
        self.reader.stop()
        return self.end()

    def end(self) -> RingStatus:
        """Waits for the end, and lets go of everything but the reader."""
        self.thread.join()
        self.sampling.close()
        for ring in self._rings:
            ring.close()
        return self.reader.status()


def rows_of(run: Run) -> np.ndarray:
    taken = []
    while len(rows := run.reader.take()):
        taken.append(rows)
    return np.concatenate(taken)


def holes(rows: np.ndarray) -> list[int]:
    """The lengths of what is missing between rows, in ns."""
    between = rows["start_ns"][1:] - rows["end_ns"][:-1]
    return [int(length) for length in between if length]


@pytest.mark.parametrize("version", [26, 28, 130001, 130101, 130202, 130301, 130401, 130500])
def test_every_version_gets_the_calls_in_order_with_the_sizes_that_it_expects(
    fake: FakePmSampling, version: int
) -> None:
    fake.play(f"version={version}")
    run = Run(fake.backend())
    run.until(lambda status: status.written > 20, "there are rows")
    assert run.stop().end == STOPPED
    assert fake.wrong() == []
    assert [call for call in dict.fromkeys(fake.calls()) if call in SEQUENCE] == list(SEQUENCE)
    assert fake.calls()[-2:] == ["cuptiPmSamplingDisable", "cuptiProfilerHostDeinitialize"]


def test_a_libcupti_without_a_buffer_that_keeps_the_latest_is_refused(fake: FakePmSampling) -> None:
    fake.play("version=24")
    with pytest.raises(
        CounterError, match=r"no libcupti from CUDA 12\.8 or later: .*version 24 is older than 26"
    ) as told:
        fake.backend().open()
    assert told.value.code is CounterCode.UNAVAILABLE


def test_rows_abut_and_have_the_values_of_their_sample_in_the_clock_of_the_host(fake: FakePmSampling) -> None:
    began = time.time_ns()
    run = Run(fake.backend())
    run.until(lambda status: status.written > 200, "there are rows")
    status = run.stop()
    rows = rows_of(run)
    assert (status.dropped, status.disordered) == (0, 0)
    assert len(holes(rows)) == status.gaps <= status.full_stops
    assert (rows["end_ns"] - rows["start_ns"] == MS).all()
    assert began < rows["start_ns"][0] < rows["end_ns"][-1] < time.time_ns()
    # The first sample, number 0, covers the time since an earlier reset.
    assert rows["values"][0].tolist() == [100.0 * metric + 1 for metric in range(8)]
    number = (rows["start_ns"] - rows["start_ns"][0]) // MS + 1
    assert (rows["values"] == 100 * np.arange(8) + (number % 100)[:, None]).all()


def test_a_loop_that_never_sees_the_end_of_records_does_not_spin(fake: FakePmSampling) -> None:
    began = time.monotonic()
    run = Run(fake.backend())
    run.until(lambda status: status.written > 300, "there are rows")
    decodings = run.stop().decodings
    assert 2 < decodings <= (time.monotonic() - began) / 0.05 + 4  # a poll takes 50 ms


def test_what_does_not_fit_into_the_image_is_a_counted_loss(fake: FakePmSampling) -> None:
    fake.play("full=2")
    run = Run(fake.backend())
    run.until(lambda status: status.decodings > 3, "it has decoded")
    status = run.stop()
    assert 1 <= status.gaps <= status.full_stops
    assert status.lost_ns == sum(holes(rows_of(run)))
    assert status.lost_ns > 0 and status.lost_ns % MS == 0


def test_a_gap_of_the_hardware_is_counted_with_its_length(fake: FakePmSampling) -> None:
    fake.play("gap=40")
    run = Run(fake.backend())
    run.until(lambda status: status.gaps > 0, "there is a gap")
    status = run.stop()
    found = holes(rows_of(run))
    assert (status.gaps, status.lost_ns) == (len(found), sum(found))
    assert status.full_stops or found == [3 * MS]


def test_a_sample_that_overlaps_by_a_little_since_a_clock_was_adjusted_is_kept(fake: FakePmSampling) -> None:
    fake.play("adjust=40", "by=336")  # as seen on an H200
    run = Run(fake.backend())
    run.until(lambda status: status.written > 60, "there are samples after it")
    status, rows = run.stop(), rows_of(run)
    assert status.disordered == 0 and status.gaps <= status.full_stops
    assert status.full_stops or (np.diff(rows["values"][:, 0]) % 100 == 1).all()
    lengths = rows["end_ns"] - rows["start_ns"]
    assert sorted(set(lengths.tolist())) == [MS - 336, MS]


def test_a_sample_that_overlaps_by_more_than_half_of_it_is_left_out_and_told(fake: FakePmSampling) -> None:
    fake.play("adjust=40", f"by={MS * 3 // 4}")
    run = Run(fake.backend())
    run.until(lambda status: status.written > 60, "there are samples after it")
    assert run.stop().disordered == 1


def test_samples_that_come_faster_than_they_are_decoded_are_lost_and_told(fake: FakePmSampling) -> None:
    fake.play("lose=1")
    run = Run(fake.backend())
    run.until(lambda status: status.decodings > 4, "it has decoded")
    status = run.stop()
    assert status.gaps >= 3 and status.lost_ns > 3 * 20 * MS


@pytest.mark.parametrize("call", SEQUENCE)
def test_a_failing_step_is_named_and_leaves_nothing_held(fake: FakePmSampling, call: str) -> None:
    backend = fake.backend()
    backend.open()
    fake.play(f"fail={call}:9")
    with pytest.raises(CounterError, match=rf"{call}: FAKE_RESULT_9 \(9\)") as told:
        Run(backend)
    assert told.value.code is CounterCode.FAILED
    fake.play()
    run = Run(backend)
    run.until(lambda status: status.written > 0, "there are rows")
    assert run.stop().end == STOPPED
    assert fake.wrong() == []


@pytest.mark.parametrize(
    "call",
    ["cuptiPmSamplingDecodeData", "cuptiPmSamplingCounterDataGetSampleInfo", "cuptiProfilerHostEvaluateToGpuValues"],
)
def test_a_failure_while_sampling_ends_it_with_what_was_seen_and_frees_the_counters(
    fake: FakePmSampling, call: str
) -> None:
    backend = fake.backend()
    fake.play(f"fail={call}:8", "at=3")
    run = Run(backend)
    status = run.end()
    assert (status.ended, status.end, status.failed_call, status.failed_result) == (True, ERROR, call, 8)
    assert status.written == len(rows_of(run))
    assert fake.calls().count("cuptiPmSamplingDisable") == 1
    fake.play()
    again = Run(backend)
    again.until(lambda status: status.written > 0, "there are rows")
    assert again.stop().end == STOPPED


def test_a_stop_that_fails_is_told_after_the_counters_were_given_back(fake: FakePmSampling) -> None:
    fake.play("fail=cuptiPmSamplingStop:9")
    run = Run(fake.backend())
    status = run.stop()
    assert (status.end, status.failed_call) == (ERROR, "cuptiPmSamplingStop")
    assert fake.calls().count("cuptiPmSamplingDisable") == 1


def test_the_longest_duration_ends_a_sampling_that_nobody_stops(fake: FakePmSampling) -> None:
    run = Run(fake.backend(), most_s=0.15)
    assert run.end().end == TOO_LONG
    assert 100 < len(rows_of(run)) < 1000


def test_a_slow_reader_loses_the_newest_rows_and_nobody_waits_for_it(fake: FakePmSampling) -> None:
    run = Run(fake.backend(), ring_bytes=4096 + 10 * 48)
    run.until(lambda status: status.dropped > 50, "rows are dropped")
    rows = run.reader.take()
    run.until(lambda status: status.written > 10, "there is room again")
    status = run.stop()
    assert len(rows) == 10 and holes(rows) == [] and status.gaps <= status.full_stops


def test_an_image_of_many_bytes_a_sample_is_bounded_and_polled_more_often(fake: FakePmSampling) -> None:
    fake.play("sample_bytes=200000")  # 208 samples of a 50 ms poll would take 42 MB
    run = Run(fake.backend())
    run.until(lambda status: status.written > 200, "there are rows")
    status = run.stop()
    assert status.gaps <= status.full_stops
    assert status.decodings > status.written / 80  # its 80 places are never filled by more than that


def test_a_chip_without_a_timer_is_sampled_by_its_clock(fake: FakePmSampling) -> None:
    fake.play("chip=GA100")
    run = Run(fake.backend())
    run.until(lambda status: status.written > 20, "there are rows")
    assert run.stop().end == STOPPED
    assert fake.wrong() == []


def test_a_held_gpu_is_busy(fake: FakePmSampling) -> None:
    fake.play("fail=cuptiPmSamplingSetConfig:26")
    with pytest.raises(CounterError, match="another process is using its counters") as told:
        Run(fake.backend())
    assert told.value.code is CounterCode.BUSY


@pytest.mark.parametrize("call", ["cuptiPmSamplingEnable", "cuptiPmSamplingGetCounterAvailability"])
def test_a_driver_that_restricts_counters_is_told_with_the_way_out(
    fake: FakePmSampling, tmp_path: Path, call: str
) -> None:
    params = tmp_path / "proc/driver/nvidia/params"
    params.parent.mkdir(parents=True)
    params.write_text("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n")
    fake.play(f"fail={call}:35")
    with pytest.raises(CounterError, match=r"RmProfilingAdminOnly: 1 .* CAP_SYS_ADMIN, or .*=0") as told:
        Run(fake.backend(tmp_path / "proc"))
    assert told.value.code is CounterCode.NOT_PERMITTED


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ("mig=1", "MIG is on"),
        ("vgpu=1", "this is a virtual GPU"),
        ("vgpu=2", "administrator can enable profiling"),
        ("chip=TU102", "TU102 is too old"),
    ],
)
def test_a_gpu_that_would_give_wrong_counters_or_none_is_listed_with_the_reason_and_refused(
    fake: FakePmSampling, plan: str, problem: str
) -> None:
    fake.play(plan)
    backend = fake.backend()
    assert problem in backend.devices()[0].problem
    with pytest.raises(CounterError, match=problem) as told:
        Run(backend)
    assert told.value.code is CounterCode.UNAVAILABLE
    assert "cuptiPmSamplingEnable" not in fake.calls()


@pytest.mark.parametrize(("result", "reason"), [(100, "the driver sees no GPU"), (999, "the driver failed")])
def test_a_host_without_a_gpu_that_works_is_told_so(fake: FakePmSampling, result: int, reason: str) -> None:
    fake.play(f"cuinit={result}")
    with pytest.raises(CounterError, match=reason) as told:
        fake.backend().open()
    assert told.value.code is CounterCode.UNAVAILABLE


def test_a_host_without_a_driver_is_told_what_to_install(fake: FakePmSampling, tmp_path: Path) -> None:
    backend = CuptiBackend(str(fake.library), cuda=str(tmp_path / "libcuda.so.1"))
    with pytest.raises(CounterError, match="install the driver") as told:
        backend.open()
    assert told.value.code is CounterCode.UNAVAILABLE


def test_metrics_of_a_set_that_do_not_fit_or_exist_are_left_out_with_the_reason(fake: FakePmSampling) -> None:
    backend = fake.backend()
    assert [
        (each.name.partition(".")[0], each.why)
        for each in backend.plan(GPU, WantedCounters(set_name="tensor")).left_out
    ] == [("sm__pipe_fma_cycles_active", "it needs 2 passes together with the others")]
    links = backend.plan(GPU, WantedCounters(set_name="interconnect"))
    assert {each.why for each in links.left_out} == {"GH100 does not have it"}
    assert [metric.label for metric in links.metrics] == ["PCIe read", "PCIe write", "GPU busy", "DRAM"]


def test_where_a_chip_lacks_the_cheaper_of_two_metrics_the_other_one_is_taken(fake: FakePmSampling) -> None:
    plan = fake.backend().plan(GPU, WantedCounters(set_name="overview"))
    assert [metric.name for metric in plan.metrics if metric.label == "Tensor pipe"] == [
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
    ]


def test_instructions_are_left_out_of_the_overview_where_they_would_be_costly(fake: FakePmSampling) -> None:
    (left_out,) = fake.backend().plan(GPU, WantedCounters(set_name="overview")).left_out
    assert left_out.name.startswith("TPC.TriageCompute.sm__inst_executed_realtime")
    assert left_out.why == "GH100 does not have it"


def test_where_a_chip_has_both_metrics_the_cheaper_one_is_taken(fake: FakePmSampling) -> None:
    fake.play("triage=1")
    plan = fake.backend().plan(GPU, WantedCounters(set_name="tensor"))
    assert [metric.label for metric in plan.metrics if metric.name.startswith("TPC.")] == [
        "Tensor pipe", "Instructions", "FMA pipe",
    ]  # fmt: skip
    assert not plan.left_out


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("foo__bar.sum",), "GH100 has no metric 'foo__bar.sum'; `kinetoctl counters list --metrics` lists all"),
        (("sm__inst_executed_pipe_tensor.sum",), "needs 2 passes on GH100"),
        (("sm__pipe_fma_cycles_active.avg", "dram__throughput.avg"), "these 2 metrics need 2 passes"),
        (("dram__throughput.avg", "dram__throughput.avg"), "is named twice"),
        (("dram__throughput.avg", "overview"), "'overview' is a set; name it without other sets"),
        ((), "name either one set or individual metrics"),
    ],
)
def test_metrics_that_a_user_names_all_fit_or_are_refused(
    fake: FakePmSampling, names: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(CounterError, match=reason) as told:
        fake.backend().plan(GPU, WantedCounters(metrics=names))
    assert told.value.code is CounterCode.INVALID_METRIC


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("pcie__read_bytes.sum.per_second", "B/s"),
        ("pcie__read_bytes.sum", "B"),
        ("gpc__cycles_elapsed.avg.per_second", "Hz"),
        ("sm__cycles_active.avg", "cycle"),
        ("sm__cycles_active.avg.pct_of_peak_sustained_active", "%"),
    ],
)
def test_a_metric_has_its_unit(fake: FakePmSampling, name: str, unit: str) -> None:
    (metric,) = fake.backend().plan(GPU, WantedCounters(metrics=(name,))).metrics
    assert (metric.name, metric.unit) == (name, unit)


def test_nvlink_metrics_that_fail_only_when_they_are_started_are_left_out(
    fake: FakePmSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a virtual machine with one GPU, whose chip lists them."""
    monkeypatch.setattr("kinetod.counters.cupti_backend._MAY_BE_MISSING", "pcie")
    fake.play("fail=cuptiPmSamplingSetConfig:999", "at=1")
    run = Run(fake.backend(), WantedCounters(set_name="interconnect"))
    assert [metric.label for metric in run.sampling.plan.metrics] == ["GPU busy", "DRAM"]
    run.until(lambda status: status.written > 0, "there are rows")
    assert run.stop().end == STOPPED
