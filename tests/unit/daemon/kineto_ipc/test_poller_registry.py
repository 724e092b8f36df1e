import asyncio
import contextlib
import gc
import os
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinetod.base.errors import Precondition, Reason
from kinetod.kineto_ipc import poller_registry
from kinetod.kineto_ipc.poll_sockets import MAX_DATAGRAM_BYTES, Sender
from kinetod.kineto_ipc.poller_registry import (
    FORGET_S,
    MAX_PIDS,
    BadDatagram,
    Drop,
    Dropped,
    OfferEvent,
    Poll,
    PollAnswer,
    PollerRegistry,
    Registration,
    decode,
    poll_answer,
    registration_answer,
)
from kinetod.processes.identity import ProcessKey, start_time_ns
from support.peers import libkineto

SENT, TAKEN, OVER, GONE = OfferEvent.SENT, OfferEvent.TAKEN, OfferEvent.OVER, OfferEvent.GONE
FREE, BUSY = 3, 1
WAIT = "import sys; sys.stdin.read()"
_SAY_AND_WAIT = "import sys; print(flush=True); sys.stdin.read()"
THEN_ANOTHER = f"""
import os, sys
print(flush=True)
sys.stdin.readline()
os.execv(sys.executable, ["python", "-c", {_SAY_AND_WAIT!r}])
"""


class Scene:
    """A registry, and processes that poll."""

    def __init__(self) -> None:
        self.registry = PollerRegistry(asyncio.get_running_loop())
        self.now_s = 0.0
        self.events: list[OfferEvent] = []

    def poll(self, pid: int = 0, wants: int = FREE, *, address: bytes = b"\0a\0", uid: int | None = None) -> PollAnswer:
        sender = Sender(pid or os.getpid(), os.getuid() if uid is None else uid, os.getgid(), address)
        answer = self.registry.polled(Poll(wants, 77, (pid, 1)), sender, now_s=self.now_s, now_ns=int(self.now_s) + 1)
        self.registry.sent(answer)
        return answer

    async def happened(self) -> list[OfferEvent]:
        await asyncio.sleep(0)
        return self.events


def with_scene(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await test(scene)
        finally:
            scene.registry.close()

    asyncio.run(run())


@contextlib.contextmanager
def process(code: str = WAIT) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


def test_a_process_is_known_by_the_kernels_pid_and_by_its_claims() -> None:
    async def test(scene: Scene) -> None:
        scene.poll()
        (found,) = scene.registry.all()
        me = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
        assert (found.key, found.uid, found.gid, found.pids, found.job_id, found.last_poll_ns, found.tracing) == (
            me, os.geteuid(), os.getegid(), (0, 1), 77, 1, False,
        )  # fmt: skip
        assert scene.registry.get(me) is found
        assert scene.registry.get(ProcessKey(me.pid, me.start_time_ns + 1)) is None

    with_scene(test)


def test_a_configuration_is_given_once_and_followed_by_no_answer_until_it_is_taken() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        offered = poller.offer(b"A=1\n", scene.events.append)
        assert scene.poll().configuration == b"A=1\n"
        for _ in range(2):  # with an answer, a libkineto that is one behind would read the first one now
            with pytest.raises(Dropped, match="pending"):
                scene.poll()
        assert offered.times_sent == 1
        assert await scene.happened() == [SENT]
        assert scene.poll(wants=BUSY).configuration == b""
        assert poller.tracing
        assert scene.poll(wants=BUSY).configuration == b""
        assert await scene.happened() == [SENT, TAKEN]
        assert scene.poll().configuration == b""
        assert scene.poll().configuration == b""
        assert await scene.happened() == [SENT, TAKEN, OVER]
        poller.offer(b"B=1\n", scene.events.append)
        assert scene.poll().configuration == b"B=1\n"

    with_scene(test)


def test_each_copy_of_libkineto_in_a_process_is_given_it() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        offered = poller.offer(b"A=1\n", scene.events.append)
        assert scene.poll().configuration == b"A=1\n"
        assert scene.poll(address=b"\0b\0").configuration == b"A=1\n"
        with pytest.raises(Dropped, match="pending"):
            scene.poll()
        assert offered.times_sent == 2

    with_scene(test)


def test_a_copy_that_is_free_does_not_end_what_another_one_records() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        poller.offer(b"A=1\n", scene.events.append)
        scene.poll()
        scene.poll(wants=BUSY)
        for _ in range(2):
            scene.poll(address=b"\0b\0")
        assert await scene.happened() == [SENT, TAKEN]
        scene.poll()
        assert await scene.happened() == [SENT, TAKEN, OVER]

    with_scene(test)


def test_a_poll_that_gets_no_answer_is_given_no_configuration() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        poller.offer(b"A=1\n", scene.events.append)
        sender = Sender(os.getpid(), os.getuid(), os.getgid(), b"\0a\0")
        late = scene.registry.polled(Poll(FREE, 0, ()), sender, now_s=0, now_ns=5, answered=False)
        assert (late.configuration, poller.last_poll_ns) == (b"", 5)
        assert scene.poll().configuration == b"A=1\n"

    with_scene(test)


def test_a_process_that_traces_for_somebody_else_gets_it_afterwards() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll(wants=BUSY).poller
        poller.offer(b"A=1\n", scene.events.append)
        assert scene.poll(wants=BUSY).configuration == b""
        assert await scene.happened() == []
        assert scene.poll().configuration == b"A=1\n"
        assert await scene.happened() == [SENT]

    with_scene(test)


def test_an_answer_that_could_not_be_sent_does_not_count() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        offered = poller.offer(b"A=1\n", scene.events.append)
        sender = Sender(os.getpid(), os.getuid(), os.getgid(), b"\0a\0")
        scene.registry.not_sent(scene.registry.polled(Poll(FREE, 0, ()), sender, now_s=0, now_ns=1))
        scene.poll(wants=BUSY)
        assert (offered.times_sent, await scene.happened()) == (0, [])
        assert scene.poll().configuration == b"A=1\n"

    with_scene(test)


def test_who_withdraws_an_offer_that_is_being_sent_learns_that_libkineto_may_have_it() -> None:
    async def test(scene: Scene) -> None:
        offered = scene.poll().poller.offer(b"A=1\n", scene.events.append)
        sender = Sender(os.getpid(), os.getuid(), os.getgid(), b"\0a\0")
        answer = scene.registry.polled(Poll(FREE, 0, ()), sender, now_s=0, now_ns=1)
        offered.withdraw()  # before the thread that sends goes on
        assert (answer.configuration, offered.times_sent) == (b"A=1\n", 1)
        scene.registry.sent(answer)
        assert (offered.times_sent, await scene.happened()) == (1, [])

    with_scene(test)


def test_one_process_has_one_offer_at_a_time() -> None:
    async def test(scene: Scene) -> None:
        poller = scene.poll().poller
        first = poller.offer(b"A=1\n", scene.events.append)
        with pytest.raises(Precondition) as refused:
            poller.offer(b"B=1\n", scene.events.append)
        assert refused.value.reason is Reason.BUSY
        first.withdraw()
        first.withdraw()
        poller.offer(b"B=1\n", scene.events.append)
        assert scene.poll().configuration == b"B=1\n"

    with_scene(test)


def test_nothing_happens_to_an_offer_that_was_withdrawn() -> None:
    async def test(scene: Scene) -> None:
        offered = scene.poll().poller.offer(b"A=1\n", scene.events.append)
        scene.poll()
        offered.withdraw()  # the event is on its way
        assert scene.poll().configuration == b""
        scene.poll(wants=BUSY)
        assert await scene.happened() == []

    with_scene(test)


def test_the_end_of_a_process_ends_its_offer() -> None:
    async def test(scene: Scene) -> None:
        with process() as child:
            poller = scene.poll(child.pid).poller
            poller.offer(b"A=1\n", scene.events.append)
        scene.registry.forget_ended()
        assert await scene.happened() == [GONE]
        assert scene.registry.all() == []
        poller.offer(b"A=1\n", scene.events.append)
        assert await scene.happened() == [GONE, GONE]

    with_scene(test)


def test_a_process_that_is_silent_for_a_minute_is_gone() -> None:
    async def test(scene: Scene) -> None:
        scene.poll().poller.offer(b"A=1\n", scene.events.append)
        scene.registry.forget_silent(FORGET_S - 1)
        assert len(scene.registry.all()) == 1
        scene.registry.forget_silent(FORGET_S)
        assert (scene.registry.all(), await scene.happened()) == ([], [GONE])

    with_scene(test)


def test_another_program_in_the_same_process_does_not_get_what_was_for_the_first() -> None:
    async def test(scene: Scene) -> None:
        with process(THEN_ANOTHER) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdout.readline()
            first = scene.poll(child.pid).poller
            first.offer(b"A=1\n", scene.events.append)
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            answer = scene.poll(child.pid, address=b"\0b\0")
            assert (answer.configuration, answer.poller is first, answer.poller.key == first.key) == (b"", False, True)
            assert await scene.happened() == [GONE]

    with_scene(test)


def test_two_copies_of_libkineto_in_a_process_are_one_process() -> None:
    async def test(scene: Scene) -> None:
        first = scene.poll(address=b"\0a\0").poller
        first.offer(b"A=1\n", scene.events.append)
        assert scene.poll(address=b"\0b\0").poller is first
        assert await scene.happened() == [SENT]
        for address in (b"\0a\0", b"\0b\0"):
            assert scene.registry.knows(Sender(os.getpid(), os.getuid(), os.getgid(), address))

    with_scene(test)


def test_a_process_with_ever_new_addresses_is_remembered_by_a_few() -> None:
    async def test(scene: Scene) -> None:
        for number in range(100):
            poller = scene.poll(address=b"\0%d" % number).poller
        assert len(poller.addresses) <= poller_registry.MAX_ADDRESSES
        assert len(scene.registry.all()) == 1

    with_scene(test)


def test_a_sender_is_known_by_its_pid_its_user_and_its_address() -> None:
    async def test(scene: Scene) -> None:
        me = Sender(os.getpid(), os.getuid(), os.getgid(), b"\0a\0")
        assert not scene.registry.knows(me)
        scene.poll()
        assert scene.registry.knows(me)
        assert not scene.registry.knows(replace(me, uid=54321))
        assert not scene.registry.knows(replace(me, address=b"\0b\0"))
        assert not scene.registry.knows(replace(me, pid=os.getppid()))

    with_scene(test)


def test_a_sender_that_claims_another_users_ids_is_dropped() -> None:
    async def test(scene: Scene) -> None:
        with pytest.raises(Dropped) as dropped:
            scene.poll(uid=54321)
        assert dropped.value.why is Drop.UNIDENTIFIED

    with_scene(test)


def test_a_sender_that_has_ended_is_dropped() -> None:
    async def test(scene: Scene) -> None:
        with process() as child:
            pass
        with pytest.raises(Dropped) as dropped:
            scene.poll(child.pid)
        assert dropped.value.why is Drop.UNIDENTIFIED

    with_scene(test)


def test_without_pidfds_the_start_time_tells_processes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        def refused(_pid: int) -> int:
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refused)
        with process() as child:
            first = scene.poll(child.pid).poller
            assert scene.poll(child.pid).poller is first
        with pytest.raises(Dropped):
            scene.poll(child.pid)

    with_scene(test)


def test_the_number_of_processes_of_a_user_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        monkeypatch.setattr(poller_registry, "MAX_ROOT_PROCESSES", 1)
        monkeypatch.setattr(poller_registry, "MAX_PROCESSES_PER_USER", 1)
        with process() as child:
            scene.poll(child.pid)
            with pytest.raises(Dropped) as dropped:
                scene.poll()
            assert dropped.value.why is Drop.TOO_MANY
            scene.poll(child.pid)
        scene.registry.forget_ended()
        scene.poll()

    with_scene(test)


def test_registrations_are_counted_by_job_and_gpu_and_are_no_polls() -> None:
    async def test(scene: Scene) -> None:
        def register(pid: int, gpu: int) -> int:
            sender = Sender(pid, os.getuid(), os.getgid(), b"\0a\0")
            return scene.registry.registered(Registration(gpu, 1, 77), sender, now_s=0)

        with process() as child:
            assert (register(os.getpid(), 0), register(child.pid, 0), register(child.pid, 1)) == (1, 2, 1)
            assert (scene.registry.all(), scene.registry.count()) == ([], 0)

    with_scene(test)


def test_every_descriptor_is_closed() -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()  # what other tests have left
    before = len(list(descriptors.iterdir()))

    async def test(scene: Scene) -> None:
        with process() as child:
            scene.poll(child.pid)
            scene.poll()

    with_scene(test)
    assert len(list(descriptors.iterdir())) == before


INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_the_poll_that_torch_sends_is_read() -> None:
    recorded = (
        bytes.fromhex("2000000000000000") + b"req".ljust(32, b"\0")
        + bytes.fromhex("03000000" "04000000" "4d00000000000000" "e0070000" "df070000" "01000000" "00000000")
    )  # fmt: skip
    assert decode(recorded) == Poll(3, 77, (2016, 2015, 1, 0))
    assert libkineto.poll(3, pids=(2016, 2015, 1, 0), job=77) == recorded


@given(INT32, INT64, st.lists(INT32, max_size=MAX_PIDS))
def test_every_poll_is_read_as_it_was_written(wants: int, job: int, pids: list[int]) -> None:
    read = decode(libkineto.poll(wants, pids=pids, job=job))
    assert read == Poll(wants, job, tuple(pids))
    assert isinstance(read, Poll) and read.free == bool(wants & 2)


@given(INT32, INT32, INT64)
def test_every_registration_is_read_as_it_was_written(gpu: int, pid: int, job: int) -> None:
    assert decode(libkineto.registration(gpu, pid, job)) == Registration(gpu, pid, job)


@given(st.binary(max_size=MAX_DATAGRAM_BYTES + 10))
def test_any_bytes_are_read_or_refused(datagram: bytes) -> None:
    try:
        decode(datagram)
    except BadDatagram as exc:
        assert str(exc)


@given(st.data())
def test_a_poll_that_lies_about_a_length_is_refused(data: st.DataObject) -> None:
    good = libkineto.poll(pids=range(data.draw(st.integers(0, 11))))
    at, width = data.draw(st.sampled_from([(0, 8), (44, 4)]))
    before = int.from_bytes(good[at : at + width], "little")
    said = data.draw(st.integers(0, 2 ** (8 * width) - 1).filter(lambda said: said != before))
    with pytest.raises(BadDatagram):
        decode(good[:at] + said.to_bytes(width, "little") + good[at + width :])


@given(st.integers(0, 120), st.integers(0, 11))
def test_a_poll_cut_short_is_refused(length: int, pids: int) -> None:
    whole = libkineto.poll(pids=range(pids))
    if length < len(whole):
        with pytest.raises(BadDatagram):
            decode(whole[:length])


@pytest.mark.parametrize(
    ("datagram", "problem"),
    [
        (b"", "0 bytes; expected 40 to 4096"),
        (bytes(39), "39 bytes; expected 40 to 4096"),
        (bytes(4097), "4097 bytes; expected 40 to 4096"),
        (bytes(40), "its type is neither req nor ctxt"),
        (struct.pack("<Q", 0) + b"req".ljust(32, b"\0"), "a poll of 0 bytes"),
        (libkineto.poll(pids=[1], count=2), "a poll of 2 pids in 20 bytes"),
        (libkineto.poll(count=-1), "a poll of -1 pids"),
        (libkineto.poll(count=2**31 - 1), "a poll of 2147483647 pids"),
        (libkineto.poll(pids=range(65)), "a poll of 65 pids"),
        (libkineto.registration(0, 1, 2)[:-1], "its header states 16 bytes, but 15 follow"),
        (struct.pack("<Q", 0) + b"ctxt".ljust(32, b"\0"), "a registration of 0 bytes"),
    ],
)
def test_what_is_wrong_is_said(datagram: bytes, problem: str) -> None:
    with pytest.raises(BadDatagram) as refused:
        decode(datagram)
    assert str(refused.value) == problem


def test_a_poll_without_pids_is_a_poll() -> None:
    assert decode(libkineto.poll(2)) == Poll(2, 0, ())


def test_types_are_compared_by_their_beginning_as_dynolog_does() -> None:
    assert decode(libkineto.poll().replace(b"req\0", b"reqX")) == Poll(3, 0, ())


def test_answers_are_header_and_body() -> None:
    assert poll_answer() == bytes(8) + b"req".ljust(32, b"\0")
    assert poll_answer(b"A=1\n") == struct.pack("<Q", 4) + b"req".ljust(32, b"\0") + b"A=1\n"
    assert registration_answer(-1) == struct.pack("<Q", 4) + b"ctxt".ljust(32, b"\0") + b"\xff\xff\xff\xff"
