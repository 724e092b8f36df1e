"""The counters of a capture: who may have them, and that nothing waits for them longer than it may."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.counter_samples import (
    CounterHeader,
    SampledMetric,
    TargetGpus,
    read_counter_samples,
    row_type,
    write_header,
    write_rows,
)
from kinetod.captures.counters import capture_counters
from kinetod.captures.counters.capture_counters import (
    CaptureCounters,
    CounterSource,
    TargetSampling,
    file_bytes,
    recover_counters,
)
from kinetod.captures.counters.counter_request import GpuAccess, SamplingRequest
from kinetod.counters import counter_client, sampler_server
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import CounterCode, CounterError, Sampling, WantedCounters
from kinetod.counters.power.power_recording import PowerRecording
from kinetod.counters.sampler_server import SamplerService
from kinetod.permissions.role_policy import Caller, Role, Via
from support.counters.in_process import InProcess
from support.counters.memory_backend import MemoryBackend
from support.counters.shared_gpus import SharedGpus
from support.waiting import scaled, soon

ME, OTHER = 1000, 1001
FIRST, SECOND, STRANGER = 11, 12, 13
OWNERS = {FIRST: ME, SECOND: ME, STRANGER: OTHER}
ASKED = SamplingRequest(WantedCounters(set_name="overview"), 1_000_000)
ENDED = "the daemon ended before the sampling did (killed, crashed or stopped); later samples are missing"


def left_behind(folder: Path, gpus: TargetGpus) -> Path:
    """A file with a sample of 100 ns to 110 ns, and so on to 200 ns."""
    (folder / "raw").mkdir()
    gpus.write(folder)
    header = CounterHeader(
        gpu_uuid="GPU-0", gpu_index=0, chip="GH100", interval_ns=10,
        metrics=(SampledMetric(name="dram", label="DRAM", unit="%"),), set="", backend="cupti", library_version="1",
    )  # fmt: skip
    rows = np.zeros(10, row_type(1))
    rows["start_ns"] = np.arange(100, 200, 10)
    rows["end_ns"] = rows["start_ns"] + 10
    path = folder / "raw" / "GPU-0.counters"
    with path.open("wb") as file:
        write_header(file, header)
        write_rows(file, rows)
    return path


def recovered(folder: Path) -> tuple[list[str], list[tuple[int, str]]]:
    """The target's warnings, and samples and reason of each GPU."""
    capture = pb.Capture(targets=[pb.Target(pid=1)])
    recover_counters(capture, lambda _: folder)
    return list(capture.targets[0].warnings), [(each.samples, each.reason) for each in capture.counters]


def test_samples_since_the_last_look_at_who_is_on_the_gpu_are_left_out(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus(contexts=("GPU-0",), permitted_ns={"GPU-0": 150}))
    why = f"{ENDED}; samples since its processes were last checked are left out"
    assert recovered(tmp_path) == ([f"hardware counters of GPU 0: {why}"], [(5, why)])
    assert read_counter_samples(path).end_ns.tolist() == [110, 120, 130, 140, 150]


def test_all_samples_are_an_administrators(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus(contexts=("GPU-0",)))
    assert recovered(tmp_path) == ([f"hardware counters of GPU 0: {ENDED}"], [(10, ENDED)])
    assert len(read_counter_samples(path).end_ns) == 10


def test_where_it_is_not_known_whose_samples_they_are_nobody_has_them(tmp_path: Path) -> None:
    path = left_behind(tmp_path, TargetGpus())
    (tmp_path / "raw" / "gpus.json").write_text("[")
    warnings, gpus = recovered(tmp_path)
    assert (len(warnings), "gpus.json" in warnings[0], gpus, path.exists()) == (1, True, [], False)


@pytest.fixture(autouse=True)
def no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose drivers tell nothing of power and clocks, which have tests of their own."""

    async def none(*_arguments: object, **_options: object) -> PowerRecording:
        return PowerRecording({}, {})

    monkeypatch.setattr(capture_counters, "record_power", none)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are late are no losses here; a test that is about a deadline has its own."""
    for name in ("HOLDERS_DEADLINE_S", "COVER_S", "END_S"):
        monkeypatch.setattr(capture_counters, name, scaled(20))
    monkeypatch.setattr(counter_client, "STOP_S", scaled(30))
    monkeypatch.setattr(sampler_server, "STOP_S", scaled(20))


gpus_with = partial(SharedGpus, owners=OWNERS)


class Sampled:
    """A capture of the processes FIRST and SECOND."""

    def __init__(
        self, gpus: SharedGpus, folder: Path, service: SamplerService, check: Callable[[], None], role: Role
    ) -> None:
        self.capture = pb.Capture(id="a-capture")
        self.changes = 0
        self.service = service
        source = CounterSource(
            CounterClient(InProcess(service)), GpuAccess(cast(Any, gpus), cast(Any, gpus)), cast(Any, gpus)
        )
        caller = Caller(uid=ME, user="me", roles=frozenset([role]), via=Via.UNIX)
        self.counters = CaptureCounters(
            source, ASKED, capture=self.capture, caller=caller, max_bytes=1 << 20, check=check, on_change=self._changed
        )
        self.first, self.second = (self.counters.add(pid, folder / str(pid)) for pid in (FIRST, SECOND))

    def _changed(self) -> None:
        self.changes += 1

    def held(self) -> set[str]:
        """The GPUs that are being sampled, or were and are not free yet."""
        return set(self.service.held)

    def codes(self) -> dict[int, str]:
        return {each.gpu.index: each.reason_code for each in self.capture.counters}


def run(
    gpus: SharedGpus,
    folder: Path,
    body: Callable[[Sampled], Awaitable[None]],
    backend: MemoryBackend | None = None,
    check: Callable[[], None] = lambda: None,
    role: Role = Role.OWN,
) -> None:
    async def ask() -> None:
        service = SamplerService(backend or MemoryBackend(), may_ask=lambda _: True, holder_of=lambda _: "ncu")
        try:
            await body(Sampled(gpus, folder, service, check, role))
        finally:
            await service.stop()

    asyncio.run(ask())


def rows(target: TargetSampling, gpu: int) -> int:
    return len(read_counter_samples(target.folder / f"GPU-{gpu}.counters").start_ns)


def test_each_target_has_the_gpus_that_it_uses_and_the_last_one_ends_them(tmp_path: Path) -> None:
    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        assert sampled.codes() == {0: "", 1: ""}
        assert await sampled.first.collected(1000, 2000) == []
        assert await sampled.first.collected(1000, 2000) == []  # it is over
        assert (rows(sampled.first, 0), TargetGpus.read(sampled.first.directory).contexts) == (1, ("GPU-0",))
        assert await sampled.second.collected(1000, 2000) == []
        await sampled.counters.ended()
        assert [(each.gpu.index, each.samples) for each in sampled.capture.counters] == [(0, 1), (1, 1)]
        assert (rows(sampled.second, 0), rows(sampled.second, 1), sampled.changes) == (1, 1, 2)
        assert sampled.counters.bytes_written == 3 * 24

    run(gpus_with((FIRST, SECOND), (SECOND,)), tmp_path, body)


def test_a_target_that_is_done_does_not_end_the_sampling_of_one_that_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_counters, "COVER_S", scaled(1))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        waiting = asyncio.create_task(sampled.second.collected(1000, 2000 + 10**10))
        await soon(lambda: sampled.second.over, "it waits")
        assert await sampled.first.collected(1000, 2000) == []
        assert sampled.counters._stopping is None
        (warning,) = await waiting
        assert warning == "hardware counters of GPU 0: samples of the last 10 s are missing"
        await sampled.counters.ended()
        assert sampled.codes() == {0: ""}

    run(gpus_with((FIRST, SECOND)), tmp_path, body)


def test_a_gpu_of_somebody_else_too_is_not_sampled_and_says_so(tmp_path: Path) -> None:
    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        assert sampled.codes() == {0: "", 1: "COUNTERS_NOT_PERMITTED"}
        assert await sampled.first.collected(1000, 2000) == []
        (warning,) = await sampled.second.collected(1000, 2000)
        assert (
            warning.startswith("hardware counters of GPU 1: none were sampled: ")
            and "is not allowed to sample GPU 1" in warning
        )
        assert TargetGpus.read(sampled.second.directory).notes == (warning,)
        await sampled.counters.ended()

    run(gpus_with((FIRST,), (SECOND, STRANGER)), tmp_path, body)


def test_a_process_of_somebody_else_ends_the_sampling_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_counters, "LOOK_S", 0.01)
    gpus = gpus_with((FIRST,), (SECOND,))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        gpus.on = ((FIRST,), (SECOND, STRANGER))
        recording = sampled.counters._recording
        assert recording is not None
        await soon(lambda: any(each.losses.code for each in recording.results()), "it has ended")
        (warning,) = await sampled.second.collected(1000, 2000)
        assert "is not allowed to sample GPU 1" in warning
        assert await sampled.first.collected(1000, 2000) == []
        await sampled.counters.ended()
        assert sampled.codes() == {0: "", 1: "COUNTERS_NOT_PERMITTED"}

    run(gpus, tmp_path, body)


class OneComes(MemoryBackend):
    """Its samples are of before the capture and of an hour later."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_ns = (1000, time.time_ns() + 3600 * 10**9)


def test_a_process_that_came_in_a_short_capture_is_found_at_its_end_and_the_samples_since_then_are_left_out(
    tmp_path: Path,
) -> None:
    gpus = gpus_with((FIRST,), (SECOND,))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        gpus.on = ((FIRST,), (SECOND, STRANGER))
        (warning,) = await sampled.second.collected(1000, 2000)
        assert warning.startswith("hardware counters of GPU 1: me ")
        assert warning.endswith("; samples since its processes were last checked are left out")
        assert await sampled.first.collected(1000, 2000) == []
        assert (rows(sampled.first, 0), rows(sampled.second, 1)) == (2, 1)
        assert TargetGpus.read(sampled.second.directory).notes == (warning,)
        await sampled.counters.ended()
        assert sampled.codes() == {0: "", 1: "COUNTERS_NOT_PERMITTED"}
        assert f"hardware counters of GPU 1: {sampled.capture.counters[1].reason}" == warning

    run(gpus, tmp_path, body, OneComes())


def test_an_administrator_has_the_samples_beside_whom_they_may(tmp_path: Path) -> None:
    gpus = gpus_with((FIRST,), (SECOND,))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        gpus.on = ((FIRST,), (SECOND, STRANGER))
        assert await sampled.second.collected(1000, 2000) == []
        assert rows(sampled.second, 1) == 2
        sampled.first.release()
        await sampled.counters.ended()

    run(gpus, tmp_path, body, OneComes(), role=Role.ADMIN)


def test_a_process_that_ended_is_no_stranger(tmp_path: Path) -> None:
    gpus = gpus_with((FIRST,), (SECOND,))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        del gpus.owners[SECOND]  # the driver still shows it
        gpus.on = ((), (SECOND,))
        assert await sampled.first.collected(1000, 2000) == await sampled.second.collected(1000, 2000) == []
        assert (rows(sampled.first, 0), rows(sampled.second, 1)) == (2, 2)
        await sampled.counters.ended()

    run(gpus, tmp_path, body, OneComes())


def test_nobody_has_samples_of_which_the_driver_does_not_tell_who_was_on_the_gpu(tmp_path: Path) -> None:
    gpus = gpus_with((FIRST, SECOND))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        gpus.late = True
        (warning,) = await sampled.first.collected(1000, 2000)
        assert warning.startswith("hardware counters of GPU 0: the driver did not report who uses GPU 0; ")
        assert rows(sampled.first, 0) == 1
        sampled.second.release()
        await sampled.counters.ended()
        assert sampled.codes() == {0: "COUNTERS_NOT_PERMITTED"}

    run(gpus, tmp_path, body, OneComes())


@pytest.mark.parametrize("role", [Role.OWN, Role.ADMIN])
def test_until_when_the_samples_are_the_callers_is_known_to_a_later_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    monkeypatch.setattr(capture_counters, "LOOK_S", 0.01)

    async def body(sampled: Sampled) -> None:
        def permitted_ns() -> int:
            return TargetGpus.read(sampled.first.directory).permitted_ns.get("GPU-0", 0)

        await sampled.counters.begin(0)
        if role is Role.ADMIN:
            assert permitted_ns() == 0
        else:
            begun_ns = permitted_ns()
            assert begun_ns > 0
            await soon(lambda: permitted_ns() > begun_ns, "it was looked at again")
        sampled.counters.abandon()

    run(gpus_with((FIRST, SECOND)), tmp_path, body, role=role)


def test_targets_that_end_together_share_a_look(tmp_path: Path) -> None:
    gpus = gpus_with((FIRST, SECOND))

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        before = gpus.reads
        await asyncio.gather(*(sampled.counters._seen() for _ in range(20)))
        assert gpus.reads - before <= 2
        sampled.counters.abandon()

    run(gpus, tmp_path, body)


def test_a_target_without_a_gpu_and_a_driver_that_tells_nothing_are_told(tmp_path: Path) -> None:
    async def one(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        (warning,) = await sampled.second.collected(1000, 2000)
        assert warning.endswith(f"process {SECOND} has no context on any GPU")
        sampled.first.release()
        await sampled.counters.ended()

    async def none(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        (warning,) = await sampled.first.collected(1000, 2000)
        assert warning.endswith(f"so the GPU of process {FIRST} is unknown")
        await sampled.counters.ended()
        assert not sampled.capture.counters

    run(gpus_with((FIRST,)), tmp_path / "one", one)
    run(gpus_with(), tmp_path / "none", none)


def test_nobody_waits_for_a_driver_that_hangs_and_what_it_answers_later_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_counters, "END_S", 3600.0)
    backend = MemoryBackend()
    backend.hang = threading.Event()

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0, patience_s=0.05)
        await soon(sampled.held, "it was asked")
        (warning,) = await sampled.first.collected(1000, 2000)
        assert "sampling had not begun" in warning
        await sampled.second.collected(1000, 2000)
        await sampled.counters.ended()
        assert [(each.reason_code, each.samples) for each in sampled.capture.counters] == [("COUNTERS_FAILED", 0)]
        assert "did not respond before the recording ended" in sampled.capture.counters[0].reason
        told = sampled.capture.SerializeToString()
        assert backend.hang is not None
        backend.hang.set()
        await soon(lambda: not sampled.held(), "the GPU is free again")
        assert sampled.capture.SerializeToString() == told

    run(gpus_with((FIRST, SECOND)), tmp_path, body, backend)


def test_power_that_is_late_for_a_short_recording_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()

    async def late(*_arguments: object, **_options: object) -> PowerRecording:
        await go.wait()
        return PowerRecording({}, {})

    monkeypatch.setattr(capture_counters, "record_power", late)

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0, patience_s=0.05)
        await soon(lambda: (sampled.first.folder / "GPU-0.counters").exists(), "its counters are sampled")
        assert sampled.first.folder.stat().st_mode & 0o777 == 0o700
        (warning,) = await sampled.first.collected(1000, 2000)
        assert warning == "power and clocks: nothing was read; reading had not begun when the recording ended"
        go.set()
        await sampled.counters.ended()

    run(gpus_with((FIRST,)), tmp_path, body)


def test_a_gpu_whose_sampling_began_is_freed_when_another_one_hangs_to_the_end(tmp_path: Path) -> None:
    class SecondHangs(MemoryBackend):
        def start(self, uuid: str, *arguments: Any) -> Sampling:
            if uuid == "GPU-1":
                go.wait()
            return super().start(uuid, *arguments)

    go = threading.Event()

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0, patience_s=0.05)
        await soon(lambda: sampled.held() == {"GPU-0", "GPU-1"}, "both were asked")
        await sampled.first.collected(1000, 2000)
        await sampled.second.collected(1000, 2000)
        await sampled.counters.ended()
        await soon(lambda: sampled.held() == {"GPU-1"}, "it is free again")
        go.set()
        await soon(lambda: not sampled.held(), "both are")

    run(gpus_with((FIRST,), (SECOND,)), tmp_path, body, SecondHangs())


def test_a_sampler_that_did_not_answer_before_is_not_waited_for_again_and_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_counters, "BEGIN_S", 3600.0)
    backend = MemoryBackend()
    backend.hang = threading.Event()

    async def body(sampled: Sampled) -> None:
        sampled.counters._request = replace(ASKED, silent=True)
        await sampled.counters.begin(0, patience_s=3600.0)
        assert backend.hang is not None
        backend.hang.set()
        await soon(lambda: sampled.codes() == {0: ""}, "it was only slow")
        (warning,) = await sampled.first.collected(0, 2000)
        assert "sampling began late" in warning
        sampled.second.release()
        await sampled.counters.ended()

    run(gpus_with((FIRST, SECOND)), tmp_path, body, backend)


def test_the_end_of_a_sampling_is_waited_for_from_the_end_of_the_window_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_counters, "END_S", 3600.0)
    backend = MemoryBackend()
    backend.ends = threading.Event()

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        await sampled.first.collected(1000, 2000)
        await sampled.second.collected(1000, 2000)
        sampled.counters._over_s -= 3600.0
        await sampled.counters.ended()
        assert backend.ends is not None
        backend.ends.set()

    run(gpus_with((FIRST, SECOND)), tmp_path, body, backend)


def test_a_planned_start_is_not_waited_for_and_nothing_is_held_before(tmp_path: Path) -> None:
    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(time.time_ns() + 3600 * 10**9)
        assert not list(tmp_path.rglob("*.counters"))
        sampled.first.release()
        sampled.second.release()
        await sampled.counters.ended()
        assert not sampled.capture.counters

    run(gpus_with((FIRST, SECOND)), tmp_path, body)


def test_samples_that_do_not_cover_the_window_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_counters, "COVER_S", 0.05)

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        (warning,) = await sampled.first.collected(1000, 2000 + 10**10)
        assert warning == "hardware counters of GPU 0: samples of the last 10 s are missing"
        sampled.counters.abandon()

    run(gpus_with((FIRST, SECOND)), tmp_path, body)


def test_a_disk_that_takes_nothing_ends_the_counters_alone(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError("no share is left")

    async def body(sampled: Sampled) -> None:
        sampled.second.directory.write_text("in the way")
        await sampled.counters.begin(0)
        (warning,) = await sampled.first.collected(1000, 2000)
        assert warning == "hardware counters of GPU 0: sampling ended early: no share is left"
        warnings = await sampled.second.collected(1000, 2000)
        assert "writing failed" in warnings[0]
        await sampled.counters.ended()
        assert sampled.codes() == {0: "COUNTERS_FAILED"}

    run(gpus_with((FIRST, SECOND)), tmp_path, body, check=full)


def test_a_busy_gpu_is_refused_to_each_of_its_targets(tmp_path: Path) -> None:
    backend = MemoryBackend()
    backend.error = CounterError(CounterCode.BUSY, "ncu is using its counters")

    async def body(sampled: Sampled) -> None:
        await sampled.counters.begin(0)
        (warning,) = await sampled.first.collected(1000, 2000)
        assert warning.startswith("hardware counters of GPU 0: none were sampled: GPU GPU-0: ncu is using its counters")
        assert await sampled.second.collected(1000, 2000) == [warning]
        await sampled.counters.ended()
        assert sampled.codes() == {0: "COUNTERS_BUSY"}

    run(gpus_with((FIRST, SECOND)), tmp_path, body, backend)


def test_a_file_has_a_million_samples_or_what_a_target_may_have() -> None:
    assert file_bytes(1 << 40) == 48_000_000
    assert file_bytes(1 << 20) == 1 << 20
