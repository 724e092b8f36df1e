"""What a session of a kit vendor records, refuses and warns about."""

from __future__ import annotations  # the agent's tests run under 3.9

import ctypes
import functools
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kineto_agent.protocol import records
from kineto_agent.protocol.records import HEADED_RECORD, KIND_TEXT
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.kit.kit_binding import Kit
from kineto_agent.sources.kit.kit_session import KitSession, Vendor
from support.agent.arenas import ArenaReader, Buffer
from support.machine.native import COLLECTOR, FAKES, ROOT, build, fake_vendor
from support.waiting import scaled, until

MIB = 1 << 20
KERNEL, CALL = 1, 6
NAMES = 16  # string space
FAKE_KERNEL = struct.Struct("<IIQQQQ24x")  # kind, stream, name, start, end, number
PATH = "/opt/fake/libfake.so"
_DEFAULTS = {"when_full": 2, "version": 7}
_FAULTS = (
    "refuse_kind", "start_fails", "open_fails", "by_text", "hold_a_buffer", "unreadable_names", "one_wide_kernel",
    "flush_delay_ms", "problem", "bad_name", "next_dropped",
)  # fmt: skip


class FakeVendor:
    """The made-up vendor, lending or pushing: program faults, launch kernels, read what it recorded."""

    def __init__(self, *, pushes: bool) -> None:
        self._code = "PUSHING" if pushes else "FAKE"
        self.path = fake_vendor(pushes=pushes)
        self._library = ctypes.CDLL(str(self.path))
        for name in ("written", "refused", "misused", "releases"):
            getattr(self._library, "fake_vendor_" + name).restype = ctypes.c_uint64

    def set(self, key: str, value: int) -> None:
        """Program a fault (the keys are in fake_vendor.h)."""
        if self._library.fake_vendor_set(key.encode(), ctypes.c_long(value)) != 0:
            raise KeyError(key)

    def launch(self, name: str = "kernel", count: int = 1, stream: int = 0) -> None:
        """Launches `count` kernels, with a call record each."""
        self._library.fake_vendor_launch(name.encode(), count, stream)

    @property
    def misused(self) -> int:
        """Calls of the vendor out of order, or in a forked child."""
        return int(self._library.fake_vendor_misused())

    @property
    def releases(self) -> int:
        """How many recordings were released."""
        return int(self._library.fake_vendor_releases())

    def vendor(self, releases: dict[int, str] | None = None) -> Vendor:
        """What a source says of it."""
        return Vendor(
            name=str(self.path),
            title="the fake",
            code=self._code,
            format="fake/1",
            kinds={"fake_kernel": (KERNEL,), "fake_call": (CALL,)},
            releases=releases,
            buffer_bytes=64 * 1024,
        )


@functools.cache
def _loaded(pushes: bool) -> FakeVendor:
    return FakeVendor(pushes=pushes)


def fake(*, pushes: bool = False, **faults: int) -> FakeVendor:
    """The process's fake vendor with exactly these faults."""
    loaded = _loaded(pushes)
    for key in _FAULTS:
        loaded.set(key, 0)
    for key, value in {**_DEFAULTS, **faults}.items():
        loaded.set(key, value)
    return loaded


def prepare(
    vendor: FakeVendor,
    types: tuple[str, ...] = ("fake_kernel", "fake_call"),
    *,
    limit_bytes: int = 16 * MIB,
    releases: dict[int, str] | None = None,
    yields: bool = True,
) -> KitSession:
    """A session that has not begun."""
    request = SourceRequest(frozenset(types), limit_bytes, {})
    return kit_session.prepare(vendor.vendor(releases), PATH, request, yields=yields, metadata={"own": "fact"})


@contextmanager
def recording(
    vendor: FakeVendor,
    types: tuple[str, ...] = ("fake_kernel", "fake_call"),
    *,
    limit_bytes: int = 16 * MIB,
    yields: bool = True,
) -> Iterator[tuple[KitSession, ArenaReader]]:
    """A started session and a daemon's view of its arena; closed in any case."""
    session = prepare(vendor, types, limit_bytes=limit_bytes, yields=yields)
    try:
        with ArenaReader(session.arena_fd) as reader:
            session.start()
            yield session, reader
    finally:
        session.close()


def headed(buffers: list[Buffer]) -> list[tuple[int, bytes]]:
    """The pushed records of buffers, with their kinds and padding; without texts."""
    found = []
    for buffer in buffers:
        at = 0
        while at < len(buffer.data):
            kind, size = HEADED_RECORD.unpack_from(buffer.data, at)
            if kind != KIND_TEXT:
                found.append((kind, buffer.data[at + HEADED_RECORD.size : at + size]))
            at += size
    return found


def names_of_kernels(reader: ArenaReader) -> list[str]:
    strings = reader.strings()
    return [strings[NAMES, FAKE_KERNEL.unpack_from(record)[2]] for record in reader.records()[KERNEL]]


@pytest.mark.parametrize("by_text", [0, 1])
def test_lent_buffers_are_published_with_sizes_and_names(by_text: int) -> None:
    vendor = fake(by_text=by_text)
    with recording(vendor) as (session, reader):
        for index in range(200):
            vendor.launch(f"kernel_{index % 3}")
        outcome = session.stop()
        assert {kind: len(found) for kind, found in reader.records().items()} == {KERNEL: 200, CALL: 200}
        assert reader.record_bytes() == {KERNEL: 64, CALL: 40}
        assert names_of_kernels(reader) == [f"kernel_{index % 3}" for index in range(200)]
    assert (outcome.counts.records, outcome.counts.dropped, outcome.warnings, outcome.incomplete) == (400, 0, [], "")
    assert vendor.misused == 0


def test_a_name_longer_than_a_page_is_whole_by_text() -> None:
    vendor = fake(by_text=1)
    name = "k" * 9000
    with recording(vendor) as (session, reader):
        vendor.launch(name, count=3)
        session.stop()
        assert names_of_kernels(reader) == [name] * 3


def test_a_name_by_text_stands_once_in_the_string_table() -> None:
    vendor = fake(by_text=1)
    with recording(vendor) as (session, reader):
        vendor.launch("gemm", count=5000)
        session.stop()
        assert list(reader.strings().values()) == ["gemm"]


@pytest.mark.parametrize("by_text", [0, 1])
def test_a_name_that_cannot_be_read_is_counted_and_does_no_harm(by_text: int) -> None:
    vendor = fake(by_text=by_text, unreadable_names=1)
    with recording(vendor) as (session, reader):
        vendor.launch(count=70)
        outcome = session.stop()
        assert len(reader.records()[KERNEL]) == 70
    assert outcome.warnings == [
        "%d kernel and call names are missing: the string table was full" % (70 if by_text else 1)
    ]


def test_pushed_records_stand_behind_headers_padded_with_zeros() -> None:
    vendor = fake(pushes=True)
    with recording(vendor) as (session, reader):
        vendor.launch("gemm", count=10)
        vendor.launch("relu", count=10)
        outcome = session.stop()
        found = headed(reader.ready())
        kernels = sorted(FAKE_KERNEL.unpack_from(record) for kind, record in found if kind == KERNEL)
        strings = reader.strings()
    calls = [record for kind, record in found if kind == CALL]
    numbers = sorted(kernel[5] for kernel in kernels)
    assert [second - first for first, second in zip(numbers, numbers[1:])] == [1] * 19
    assert {strings[NAMES, kernel[2]] for kernel in kernels} == {"gemm", "relu"}
    assert len(calls) == 20
    assert {(len(record), record[-3:]) for record in calls} == {(40, b"\0\0\0")}
    assert outcome.counts.records == 40


def test_a_clock_of_the_vendors_own_is_paired_with_unix_time() -> None:
    vendor = fake(pushes=True)
    before = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with recording(vendor) as (session, reader):
        session.stop()
        pairs = clock_pairs(reader)
    after = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert len(pairs) >= 2
    for unix, boot in pairs:
        assert before[0] <= unix <= after[0]
        assert before[1] <= boot <= after[1]


def clock_pairs(reader: ArenaReader) -> list[tuple[int, int]]:
    raw = reader.raw_strings()
    return [
        (key, records.CLOCK_PAIR.unpack(text)[0])
        for (space, key), text in raw.items()
        if space == records.SPACE_CLOCK_PAIR
    ]


def test_the_metadata_has_the_vendors_facts_and_the_sources() -> None:
    session = prepare(fake(by_text=1))
    session.close()
    assert session.format == "fake/1"
    assert session.metadata == {"fake_version": 7, "fake_library": PATH, "fake_mode": "by text", "own": "fact"}


def test_only_the_wanted_kinds_are_enabled() -> None:
    vendor = fake()
    with recording(vendor, ("fake_call",)) as (session, reader):
        vendor.launch(count=5)
        session.stop()
        assert {kind: len(found) for kind, found in reader.records().items()} == {CALL: 5}


def test_a_kind_that_is_refused_is_a_warning() -> None:
    vendor = fake(refuse_kind=CALL)
    with recording(vendor) as (session, _):
        vendor.launch()
        outcome = session.stop()
    assert outcome.warnings == ["the fake refused to record fake_call: FAKE_REFUSED (7)"]
    assert outcome.counts.records == 1


def test_a_vendor_that_records_nothing_is_refused_with_its_words() -> None:
    session = prepare(fake(start_fails=1))
    with pytest.raises(SourceError) as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == "FAKE_FAILED"
    assert caught.value.reason == (
        "the fake vendor records none of these; fake_kernel: FAKE_REFUSED (7); fake_call: FAKE_REFUSED (7)"
    )


def test_a_library_that_the_vendor_does_not_take_is_refused() -> None:
    with pytest.raises(SourceError, match=r"libfake\.so is not a library of the fake vendor") as caught:
        prepare(fake(open_fails=1))
    assert caught.value.reason_code == "FAKE_LIBRARY"


def test_a_version_without_known_layouts_is_refused_by_number() -> None:
    with pytest.raises(SourceError) as caught:
        prepare(fake(version=9), releases={7: "0.7"})
    assert caught.value.reason_code == "FAKE_UNKNOWN_VERSION"
    assert "/opt/fake/libfake.so is the fake version 9" in caught.value.reason
    assert "Known versions: 7 (0.7)" in caught.value.reason


def test_a_vendor_that_describes_its_names_wrongly_is_refused() -> None:
    with pytest.raises(SourceError, match="describes a name that cannot be in a record"):
        prepare(fake(bad_name=1))


def test_records_that_find_no_buffer_are_dropped_and_counted() -> None:
    vendor = fake(when_full=1)
    with recording(vendor, limit_bytes=1) as (session, _):
        vendor.launch(count=5000)
        outcome = session.stop()
    assert outcome.counts.dropped > 0
    assert outcome.counts.records + outcome.counts.dropped == 10_000


def test_pushed_records_that_find_no_buffer_are_dropped_and_counted() -> None:
    vendor = fake(pushes=True)
    with recording(vendor, limit_bytes=1) as (session, _):
        vendor.launch(count=5000)
        outcome = session.stop()
    assert outcome.counts.dropped > 0
    assert outcome.counts.records + outcome.counts.dropped == 10_000


def test_lost_records_that_nobody_can_count_make_the_recording_incomplete() -> None:
    vendor = fake(hold_a_buffer=0)
    with recording(vendor, limit_bytes=1) as (session, _):
        # More streams hold a buffer at the same time than the arena and the spill buffers have.
        for stream in range(20):
            vendor.launch(stream=stream)
        outcome = session.stop()
    assert outcome.incomplete.startswith("the fake lost an unknown number of records (buffers ")
    assert "use a larger --buffer-limit" in outcome.incomplete
    assert outcome.counts.records + outcome.counts.dropped < 40


def test_records_of_one_kind_in_two_sizes_are_dropped_with_a_warning() -> None:
    vendor = fake()
    with recording(vendor) as (session, _):
        vendor.launch(count=5)
        vendor.set("one_wide_kernel", 1)
        vendor.launch(count=5)
        outcome = session.stop()
    assert outcome.counts.records + outcome.counts.dropped == 20
    assert outcome.warnings == [
        "%d records were dropped because this version of the fake has records of one kind in several sizes"
        % outcome.counts.dropped
    ]


def test_what_the_vendor_says_went_wrong_makes_the_recording_incomplete() -> None:
    with recording(fake(problem=1)) as (session, _):
        assert session.stop().incomplete == "the fake device was switched off"


def test_a_flush_that_does_not_return_ends_the_trace_early_and_the_next_is_refused_until_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kit_session, "STOP_LIMIT_MS", 20)
    vendor = fake(flush_delay_ms=60_000)
    session = prepare(vendor)
    session.start()
    outcome = session.stop()
    session.close()
    assert outcome.warnings == ["the fake did not hand over its last records within 20 ms: the trace ends early"]
    with pytest.raises(SourceError, match="has not ended the previous recording yet") as caught:
        prepare(vendor)
    assert caught.value.reason_code == "FAKE_BUSY"
    vendor.set("flush_delay_ms", 0)

    def next_one() -> KitSession | None:
        try:
            return prepare(vendor)
        except SourceError:
            return None

    until(next_one, "the vendor is no longer busy").close()


def test_giving_way_ends_the_recording_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_session, "GIVE_WAY_LIMIT_MS", int(scaled(20_000)))  # the collector's thread gets to run
    vendor = fake()
    with recording(vendor) as (session, reader):
        vendor.launch(count=3)
        thread = threading.Thread(target=session.give_way)
        thread.start()
        thread.join()
        vendor.launch(count=4)
        assert len(reader.records()[KERNEL]) == 3
        releases = vendor.releases
        assert session.stop().counts.records == 6
        assert vendor.releases == releases


def test_a_vendor_that_need_not_yield_goes_on() -> None:
    vendor = fake()
    with recording(vendor, yields=False) as (session, _):
        session.give_way()
        vendor.launch(count=3)
        assert session.stop().counts.records == 6


def test_two_vendors_record_at_the_same_time() -> None:
    lends, pushes = fake(), fake(pushes=True)
    with recording(lends) as (first, _), recording(pushes) as (second, _):
        lends.launch(count=3)
        pushes.launch(count=4)
        assert first.stop().counts.records == 6
        assert second.stop().counts.records == 8


def test_a_second_recording_of_one_vendor_is_refused() -> None:
    vendor = fake()
    with recording(vendor), pytest.raises(SourceError, match="a recording is still open") as caught:
        prepare(vendor)
    assert caught.value.reason_code == "FAKE_BUSY"


def test_two_hundred_recordings_leave_no_descriptor_and_no_memory() -> None:
    vendor = fake()

    def record() -> None:
        with recording(vendor) as (session, _):
            vendor.launch(count=10)
            session.stop()

    record()
    before = descriptors(), arenas()
    for _ in range(200):
        record()
    left = descriptors() - before[0], arenas() - before[1]
    assert max(left) <= 0, left  # those of an earlier test may have gone


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kineto-arena")


def test_a_forked_child_is_refused_and_its_late_records_go_nowhere() -> None:
    vendor = fake()
    with recording(vendor) as (session, reader):
        vendor.launch(count=2)
        child = os.fork()
        if child == 0:
            vendor.launch(count=3000)
            os._exit(0 if session.stop().counts.records == 0 and vendor.misused == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        vendor.launch(count=2)
        assert session.stop().counts.records == 8
        assert len(reader.records()[KERNEL]) == 4


RECORDS_AND_EXITS = """
import sys
from test_kit_session import fake, prepare
vendor = fake(pushes={pushes})
session = prepare(vendor)
session.start()
print(session.arena_fd, flush=True)
sys.stdin.readline()
vendor.launch("gemm", count=3000)
"""


@pytest.mark.parametrize("pushes", [False, True])
def test_an_exit_while_recording_is_clean_and_leaves_the_records(pushes: bool) -> None:
    path = os.pathsep.join(map(str, (ROOT / "agent", ROOT / "tests", Path(__file__).parent)))
    with subprocess.Popen(
        [sys.executable, "-c", RECORDS_AND_EXITS.format(pushes=pushes)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        number = process.stdout.readline().strip()
        copy = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR)
        with ArenaReader(copy) as reader:
            os.close(copy)
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.wait(timeout=scaled(30)) == 0
            assert process.stderr.read() == ""
            assert sum(buffer.records for buffer in reader.ready()) == 6000


def test_an_unknown_vendor_is_named() -> None:
    with pytest.raises(SourceError, match="this collector has no vendor called abacus") as caught:
        Kit.of_process().open("abacus", "Abacus", "ABACUS", PATH)
    assert caught.value.reason_code == "ABACUS_LIBRARY"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("int unrelated;", "it has no function kineto_vendor"),
        (
            "const void *kineto_vendor(unsigned abi); const void *kineto_vendor(unsigned abi) { (void)abi; return 0; }",
            "built for another version of the kit's interface than 1; rebuild it",
        ),
        (
            '#include "kit/vendor.h"\nconst struct kit_vendor *kineto_vendor(uint32_t abi);\n'
            "const struct kit_vendor *kineto_vendor(uint32_t abi) {\n"
            "static const struct kit_vendor vendor = {.abi = 1, .size = sizeof vendor};\n"
            "(void)abi; return &vendor; }",
            "it lacks name, open, start, stop or flush",
        ),
    ],
)
def test_a_library_that_is_no_plug_in_for_this_kit_is_refused(tmp_path: Path, code: str, why: str) -> None:
    source = tmp_path / "plugin.c"
    source.write_text(code)
    library = build("libplugin.so", [source], ["-shared", "-fPIC", "-iquote", str(COLLECTOR)])
    vendor = Vendor(str(library), "Other", "OTHER", "other/1", {})
    with pytest.raises(SourceError, match=why) as caught:
        Kit.of_process().open(vendor.name, vendor.title, vendor.code, PATH)
    assert caught.value.reason_code == "OTHER_LIBRARY"


def test_a_missing_plug_in_is_refused_with_the_loaders_words() -> None:
    with pytest.raises(SourceError, match=r"/nowhere/plugin\.so cannot be used: /nowhere/plugin\.so: cannot open"):
        Kit.of_process().open("/nowhere/plugin.so", "Other", "OTHER", PATH)


def test_importing_the_session_does_not_import_ctypes() -> None:
    check = "import sys, kineto_agent.sources.kit.kit_session; print('ctypes' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", check], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(FAKES.parents[1] / "agent")})  # fmt: skip
    assert done.stdout == "False\n"
