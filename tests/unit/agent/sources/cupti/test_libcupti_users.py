"""Whoever else takes CUPTI into use during a recording has it, whole; and nothing is recorded while he has it."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Iterator, Tuple

import pytest
from kineto_agent.sources.cupti import libcupti
from kineto_agent.sources.cupti.collector_binding import Collector, OtherUsers
from kineto_agent.sources.interface import SourceError
from support.agent.collector import LONG_MS, calling, fake_cuda, maps_with, own_warnings, recording, request, source
from support.machine.native import (
    COLLECTOR,
    COLLECTOR_HEADERS,
    DRIVERS,
    FAKES,
    ROOT,
    build,
    collector_sources,
    fake_cupti,
)
from support.waiting import scaled, until

pytestmark = pytest.mark.slow

KERNEL = 10
STAYS = "stayed attached: another user of CUPTI in the program (Python's ctypes) started and is using CUPTI now"
LATE = "CUPTI did not hand over its last records within 200 ms: the trace ends early"
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


class OtherUser:
    """He has looked up CUPTI's functions before us, and calls them by their addresses."""

    def __init__(self) -> None:
        self._cupti: Any = ctypes.CDLL(str(fake_cuda().path))
        self._callback = _CALLBACK(lambda *_: None)
        self._subscriber = ctypes.c_void_p()

    def subscribe(self) -> int:
        return int(self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None))

    def unsubscribe(self) -> None:
        self._cupti.cuptiUnsubscribe(self._subscriber)

    def enable(self) -> int:
        return int(self._cupti.cuptiActivityEnable(KERNEL))

    def disable(self) -> None:
        self._cupti.cuptiActivityDisable(KERNEL)

    def enabled(self) -> bool:
        return bool(self._cupti.fake_is_enabled(KERNEL))


@pytest.fixture
def other() -> Iterator[OtherUser]:
    user = OtherUser()
    yield user
    user.unsubscribe()
    user.disable()


def test_his_subscription_succeeds_and_ends_the_recording(other: OtherUser) -> None:
    def ended() -> Tuple[Any, ...]:
        """What came of a recording; () if the collector's thread got no CPU while he was held up."""
        other.unsubscribe()
        cuda = fake_cuda()
        with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, reader):
            cuda.launch(count=2)
            assert session.taken() is None
            assert other.subscribe() == 0
            assert not other.enabled()
            cuda.launch(count=3)
            taken = session.taken()
            outcome = session.stop()
            records = {kind: len(found) for kind, found in reader.records().items()}
        assert cuda.subscribed
        return () if LATE in outcome.warnings else (records, taken, outcome)

    records, taken, outcome = until(ended, "the collector's thread has a CPU")
    assert records == {KERNEL: 2}
    assert taken is not None and taken.who == "Python's ctypes"
    assert outcome.counts.records == 2
    assert [warning[: len(STAYS)] for warning in own_warnings(outcome.warnings)] == [STAYS]


def test_what_is_not_handed_over_while_he_is_held_up_is_told(other: OtherUser) -> None:
    cuda = fake_cuda(flush_delay_ms=60_000)
    with recording(["kernel"]) as (session, _):
        cuda.launch()
        assert other.subscribe() == 0
        assert LATE in session.stop().warnings
        cuda.set("flush_delay_ms", 0)
    fake_cuda()


def test_nothing_of_what_he_enables_is_touched_afterwards(other: OtherUser) -> None:
    cuda = fake_cuda()
    finalized = cuda.finalized
    with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _):
        assert other.enable() == 0
        with calling(cuda):
            outcome = session.stop()
    assert other.enabled()
    assert (outcome.detach_ns, cuda.finalized) == (0, finalized)


def test_who_comes_before_the_start_is_not_recorded_over(other: OtherUser) -> None:
    fake_cuda()
    session = source().prepare(request(["kernel"]))
    other.subscribe()
    with pytest.raises(SourceError) as caught:
        session.start()
    session.close()
    assert caught.value.reason_code in ("CUPTI_BUSY", "USER_PROFILER_STARTED")


def test_while_he_has_activities_enabled_nothing_is_recorded(other: OtherUser) -> None:
    fake_cuda()
    with recording(["kernel"]) as (session, _):
        session.stop()
    other.enable()
    with pytest.raises(SourceError, match=r"it has enabled activities \(1\)") as caught, recording(["kernel"]):
        raise AssertionError
    assert (caught.value.reason_code, other.enabled()) == ("CUPTI_BUSY", True)
    other.disable()
    with recording(["kernel"]) as (session, _):
        session.stop()


def test_while_he_has_the_subscriber_nothing_is_recorded(other: OtherUser, tmp_path: Path) -> None:
    fake_cuda()
    other.subscribe()
    maps = maps_with(tmp_path, "libtorch_cpu.so", "xla_cuda_plugin.so")
    with pytest.raises(SourceError, match=r"may be xla_cuda_plugin\.so") as caught, recording(["kernel"], maps=maps):
        raise AssertionError
    assert caught.value.reason_code == "CUPTI_BUSY"
    other.unsubscribe()
    with recording(["kernel"], maps=maps) as (session, _):
        assert session.stop().counts.dropped == 0


ALREADY_THERE = """
from support.agent.collector import fake_cuda, recording
from support.targets.self_profiling import Listener
from kineto_agent.sources.interface import SourceError
cuda = fake_cuda()
listener = Listener(str(cuda.path))

def attempt():
    try:
        with recording(["kernel"]) as (session, _):
            return session.stop().counts.records
    except SourceError as error:
        owner = error.reason.partition("the buffers belong to ")[2].partition(",")[0]
        return error.reason_code, owner in ("the program itself", "Python's ctypes")  # where libffi has its trampolines

with listener.profile() as count:
    cuda.launch(count=2)
    print(attempt())
    cuda.launch(count=3)
print(count.events, attempt())
"""


def test_who_was_there_before_our_first_recording_keeps_his_records() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "agent")])}
    ran = subprocess.run(
        [sys.executable, "-c", ALREADY_THERE],
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert ran.stdout.splitlines() == ["('CUPTI_BUSY', True)", "5 0"], ran.stderr


# Somebody registers his callbacks once, for all of his sessions; he is known to be idle now.
REGISTERED_ONCE = """
import ctypes, resource
from support.agent.collector import fake_cuda, maps_with, recording, request, source
from kineto_agent.sources.cupti import libcupti
from kineto_agent.sources.interface import SourceError
REQUESTED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
cuda = fake_cuda()
cupti = ctypes.CDLL(str(cuda.path))
room, got = ctypes.create_string_buffer(1 << 16), []
def requested(buffer, size, most):
    ctypes.c_void_p.from_address(buffer).value = ctypes.addressof(room)
    ctypes.c_size_t.from_address(size).value = len(room)
give, take = REQUESTED(requested), COMPLETED(lambda context, stream, buffer, size, valid: got.append(valid // 216))
cupti.cuptiActivityRegisterCallbacks(give, take)
libcupti.unsubscribed_listener = lambda *_: ""
%s
cupti.cuptiActivityEnable(10)
cuda.launch(count=5)
cupti.cuptiActivityFlushAll(1)
print(sum(got))
"""
ONE_CAPTURE = """
with recording(["kernel"], detach_limit_ms=1) as (session, _):
    cuda.launch(count=2)
    print(session.stop().counts.records)
"""
ONE_THAT_LEAVES_A_BUFFER_WITH_CUPTI = """
cuda.set("hold_a_buffer", 1)
with recording(["kernel"], detach_limit_ms=1) as (session, _):
    session.stop()
cuda.set("hold_a_buffer", 0)
"""
ONE_THAT_GETS_NO_THREAD = """
session = source().prepare(request(["kernel"]))
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 20), resource.RLIM_INFINITY))
try:
    session.start()
except SourceError as error:
    print("pthread_create" in error.reason)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
session.close()
"""


@pytest.mark.parametrize(
    ("captures", "said"),
    [
        (ONE_CAPTURE, ["2", "5"]),
        (ONE_THAT_LEAVES_A_BUFFER_WITH_CUPTI + ONE_CAPTURE, ["2", "5"]),
        (ONE_THAT_GETS_NO_THREAD, ["True", "5"]),
    ],
)
def test_who_has_registered_once_for_all_his_sessions_has_his_records_after_captures(
    captures: str, said: list[str]
) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "agent")])}
    ran = subprocess.run(
        [sys.executable, "-c", REGISTERED_ONCE % captures],
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert ran.stdout.splitlines() == said, ran.stderr


def test_a_cupti_that_cannot_be_watched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda()
    monkeypatch.setattr(Collector, "others", lambda self: OtherUsers(unnoticed=b"not this CPU"))
    with recording(["kernel"]) as (session, _):
        warnings = session.stop().warnings
    assert "starts during a capture may lose records: not this CPU" in warnings[0]


def test_a_user_is_named_by_the_library_that_calls(tmp_path: Path) -> None:
    maps = maps_with(tmp_path, "libcudart.so.12", "xla_cuda_plugin.so", "libffi.so.8")
    names = [libcupti.library_at(address, maps) for address in (0x7F0000000010, 0x7F0000001010, 0x7F0000002010, 1)]
    assert names == ["libcudart.so.12", "xla_cuda_plugin.so", "Python's ctypes", "the program itself"]


def test_a_file_with_a_return_in_its_name_is_one_file(tmp_path: Path) -> None:
    maps = maps_with(tmp_path, "odd\rname.so", "libcudart.so.12")
    assert libcupti.library_at(0x7F0000001010, maps) == "libcudart.so.12"


_REAL = sorted(
    str(path)
    for folder, pattern in (*((place, "nvidia/*/lib") for place in sys.path), ("/usr/local", "cuda-*/lib*"))
    for path in {found.resolve() for found in Path(folder).glob(pattern + "/libcupti.so.*")}
)
CALL_SITES = [COLLECTOR / name for name in ("patching/call_site.c", "patching/call_stub.c", "patching/code_space.c")]
_NOT_WITHOUT_DRIVER = 2


def _drives(name: str, parts: Sequence[Path], *arguments: str) -> int:
    """Exit status of a driver, built with these parts of the collector."""
    flags = ["-O2", "-g", "-Wno-pedantic", *COLLECTOR_HEADERS, f"-I{FAKES}"]
    driver = build(name, [*parts, DRIVERS / f"{name}.c"], flags)
    return subprocess.run([str(driver), *arguments], timeout=scaled(60), check=False).returncode


@pytest.mark.skipif(not _REAL, reason="neither CUDA nor an nvidia-cuda-cupti wheel is installed")
@pytest.mark.parametrize("layout", ["roomy", "dense", "full"])
@pytest.mark.parametrize("path", _REAL)
def test_the_real_library_answers_through_its_gates_as_without(path: str, layout: str) -> None:
    assert _drives("drive_call_site", CALL_SITES, path, layout) in (0, _NOT_WITHOUT_DRIVER)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the tables are found on x86-64 only")
@pytest.mark.parametrize("path", ["", *_REAL])
def test_hooks_find_empty_tables_before_the_first_subscription_has_made_its_own(path: str) -> None:
    assert _drives("drive_callback_tables", [], *filter(None, [path])) == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="gates exist on x86-64 only")
@pytest.mark.parametrize("layout", ["roomy", "dense", "full"])
def test_calls_that_cross_a_block_have_gates_even_if_the_library_alone_has_room(layout: str) -> None:
    flags = ["-shared", "-fPIC", "-Wl,--hash-style=both", "-Wl,-z,separate-code"]
    library = build("libcrossing.so", [FAKES / "loader" / "crossing_calls.c"], flags)
    assert _drives("drive_call_site", CALL_SITES, str(library), layout) == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="gates exist on x86-64 only")
def test_calls_have_gates_between_the_segments_of_a_library_that_is_linked_for_large_pages() -> None:
    flags = ["-shared", "-fPIC", "-DNO_SPARE", "-Wl,-z,max-page-size=0x200000", "-Wl,-z,noseparate-code"]
    library = build("libcrossing.so", [FAKES / "loader" / "crossing_calls.c"], flags)
    assert _drives("drive_call_site", CALL_SITES, str(library), "full") == 0


@pytest.mark.parametrize("layout", ["dense", "full", "none"])
def test_gates_are_placed_where_a_program_leaves_hardly_any_room_or_their_lack_is_said(layout: str) -> None:
    assert _drives("drive_cupti_gate", collector_sources(), str(fake_cupti()), layout) == 0
