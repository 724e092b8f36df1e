"""The attach helper service as systemd starts it, asked by one user about the processes of another."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from kineto_agent.protocol import wire
from kineto_protos import unix_peer
from kinetod.attach.attach_types import Approval, AttachCode, AttachError
from kinetod.attach_helper import messages
from kinetod.attach_helper.diagnosis import KnownAgent
from kinetod.attach_helper.helper_client import HelperService
from kinetod.processes import credentials
from kinetod.processes.accelerator_signs import OutsideSigns
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey, start_time_ns
from kinetod.profilers import ProfilingTool
from support.agent.agent_daemon import Connection
from support.machine import seccomp_host
from support.service import attach_service, subjects
from support.service.approvals import approval_of, message_of
from support.service.attach_service import CALLER_UID, CAPABILITIES, OWNER_UID, Service, as_caller, unprivileged
from support.service.calls_as import plain_python
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
T = TypeVar("T")
METHODS = ("pending-call", "native-thread")
UNITS = Path(__file__).parents[3] / "deploy/systemd"
SPIN = """
import threading, time
threading.Thread(target=lambda: [time.sleep(0.005) for _ in iter(int, 1)], daemon=True).start()
"""
REBOOT = 169 if os.uname().machine == "x86_64" else 142
FILTER = """
import ctypes
code = bytes.fromhex("PROGRAM")
memory = ctypes.create_string_buffer(code, len(code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
program = Program(len(code) // 8, ctypes.addressof(memory))
assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program), 0, 0) == 0
"""
ASK = """
import asyncio, json, sys
from pathlib import Path
from kinetod.processes import credentials
from kinetod.attach.attach_types import Approval, AttachError
from kinetod.attach_helper.helper_client import HelperService
from kinetod.processes.identity import ProcessKey, start_time_ns
async def main(path, pid):
    key = ProcessKey(pid, start_time_ns(pid))
    service = HelperService(Path(path))
    facts = (await service.private_facts([key])).get(key)
    said = {"rank": facts and facts.rank}
    try:
        attached, channel = await service.attach(key, Approval(credentials.read(pid), True), deadline_s=30)
        channel.close()
        said["method"] = attached.method
    except AttachError as exc:
        said |= {"code": exc.code, "reason": exc.reason}
    print(json.dumps(said))
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with attach_service.running() as started:
        yield started


@pytest.fixture
def target() -> Iterator[int]:
    prefix = ("env", "RANK=3", "SLURM_JOB_ID=7701", *unprivileged(OWNER_UID, "dac_read_search"))
    with subjects.python(SPIN, prefix=prefix) as pid:
        yield pid


def key_of(pid: int) -> ProcessKey:
    return ProcessKey(pid, start_time_ns(pid))


def keys_of_all() -> Iterator[ProcessKey]:
    """Of all processes of the machine, others of which end at any time."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            yield key_of(pid)


def ask(service: Service, use: Callable[[HelperService], Awaitable[T]]) -> T:
    """As root, which may ask too."""

    async def run() -> T:
        return await use(HelperService(service.socket))

    return asyncio.run(run())


def refused(service: Service, pid: int) -> AttachError:
    async def use(helper: HelperService) -> AttachError:
        with pytest.raises(AttachError) as caught:
            await helper.attach(key_of(pid), approval_of(pid), deadline_s=scaled(10))
        return caught.value

    return ask(service, use)


def test_the_capabilities_of_these_tests_are_those_of_the_unit() -> None:
    text = (UNITS / "kinetod-attach.service").read_text()
    listed = " ".join(f"CAP_{name.upper()}" for name in CAPABILITIES)
    assert f"\nCapabilityBoundingSet={listed}\n" in text


def test_a_user_without_rights_gets_an_agent_into_another_users_process(service: Service, target: int) -> None:
    done = as_caller(CALLER_UID, ASK, str(service.socket), str(target))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["rank"] == 3 and said["method"] in ("pending-call", "native-thread"), said
    service.logged(f"of uid {CALLER_UID} to process {target} (uid {OWNER_UID}, ")
    assert "done by" in service.log()
    assert psutil.pid_exists(target)


def test_a_main_thread_that_sleeps_is_entered_by_a_thread_of_our_own(service: Service) -> None:
    text = "import os, _thread\nos.write(1, b'%d\\n' % os.getpid())\nlock = _thread.allocate_lock()\n"
    text += "lock.acquire()\nlock.acquire()"
    with subjects.python(text, prefix=tuple(unprivileged(OWNER_UID, "dac_read_search"))) as pid:
        until(lambda: subjects.state(pid) == "S", "it sleeps")

        async def use(helper: HelperService) -> str:
            attached, channel = await helper.attach(key_of(pid), approval_of(pid), deadline_s=scaled(10))
            Connection(channel).expect(wire.Hello)
            channel.close()
            return attached.method

        assert ask(service, use) == "native-thread"
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_another_user_gets_nothing(service: Service, target: int) -> None:
    done = as_caller(OWNER_UID, ASK, str(service.socket), str(target))
    said = json.loads(done.stdout)
    assert said["rank"] is None and said["code"] == AttachCode.NOT_PERMITTED, said
    assert f"uid {OWNER_UID} is not allowed to use" in said["reason"]
    service.logged(f"uid {OWNER_UID} is not allowed to use the attach helper")


def test_the_channel_leads_to_an_agent_in_the_target(service: Service, target: int) -> None:
    async def use(helper: HelperService) -> socket.socket:
        _attached, channel = await helper.attach(key_of(target), approval_of(target), deadline_s=scaled(10))
        return channel

    channel = ask(service, use)
    pid, uid, _gid = unix_peer.credentials(channel)
    assert (pid, uid) == (target, OWNER_UID)
    assert not channel.get_inheritable()
    with_agent = Connection(channel)
    hello = with_agent.expect(wire.Hello)
    assert hello.rank == 3 and hello.job_id == "7701"
    with_agent.close()


def test_roots_processes_outside_of_containers_are_left_alone(service: Service) -> None:
    with subjects.python() as pid:
        error = refused(service, pid)
    assert error.code is AttachCode.NOT_PERMITTED
    assert "processes of root outside containers are left alone" in error.reason
    service.logged("refused ATTACH_NOT_PERMITTED")


UNDUMPABLE = f"import ctypes\nctypes.CDLL(None).prctl(4, 0)\n{SPIN}"


@contextlib.contextmanager
def plain_target(uid: int, program: str = SPIN) -> Iterator[int]:
    """One that its own user may trace, if the program does not change that."""
    *prefix, python = plain_python(uid)
    with subjects.python(program, prefix=tuple(prefix), executable=python) as pid:
        yield pid


def asked_for(service: Service, pid: int, *, administrator: bool) -> str:
    """The method, or why not."""

    async def use(helper: HelperService) -> str:
        try:
            attached, channel = await helper.attach(
                key_of(pid), approval_of(pid, administrator=administrator), deadline_s=scaled(10)
            )
        except AttachError as exc:
            return exc.reason
        channel.close()
        return attached.method

    return ask(service, use)


def test_what_its_own_user_could_not_trace_is_entered_for_administrators_only(service: Service, target: int) -> None:
    assert "it is protected: it has capabilities" in asked_for(service, target, administrator=False)
    assert asked_for(service, target, administrator=True) in METHODS
    with plain_target(OWNER_UID, UNDUMPABLE) as pid:
        assert "it is protected: it is not dumpable" in asked_for(service, pid, administrator=False)
        assert asked_for(service, pid, administrator=True) in METHODS
    with plain_target(OWNER_UID) as pid:
        assert asked_for(service, pid, administrator=False) in METHODS


def test_accounts_of_the_hosts_services_are_left_alone_by_default(service: Service) -> None:
    with plain_target(999) as pid:
        assert "processes of uid 999 are left alone" in asked_for(service, pid, administrator=True)


@pytest.mark.parametrize("uid", [attach_service.SERVICE_UID, CALLER_UID], ids=["service", "caller"])
def test_the_helper_enters_none_of_its_siblings(service: Service, uid: int) -> None:
    with plain_target(uid) as pid:
        assert f"uid {uid} is" in asked_for(service, pid, administrator=True)
    service.logged("refused ATTACH_NOT_PERMITTED")


def test_its_own_processes_are_left_alone_whatever_the_policy_says() -> None:
    with attach_service.running() as own:
        own.policy.write_text(f'callers = [{CALLER_UID}]\nusers = ["*"]\nroot = "always"\nprotected = "always"\n')
        assert own.process is not None
        for pid in (own.process.pid, *until(lambda: helper_pids(own), "it has helpers")):
            assert "the attach helper itself" in asked_for(own, pid, administrator=True)


def test_what_the_front_end_has_not_decided_about_is_not_entered(service: Service) -> None:
    with plain_target(OWNER_UID) as pid:

        async def use(helper: HelperService) -> AttachError:
            other = replace(credentials.read(pid), uids=(CALLER_UID,) * 4)
            with pytest.raises(AttachError) as caught:
                await helper.attach(key_of(pid), Approval(other, True), deadline_s=scaled(10))
            return caught.value

        assert ask(service, use).code is AttachCode.REPLACED


def test_a_change_of_the_policy_counts_at_once(target: int) -> None:
    with attach_service.running() as own:
        own.policy.write_text(f"callers = [{CALLER_UID}]\ndenied_users = [{OWNER_UID}]\n")
        assert f"processes of uid {OWNER_UID} are left alone" in refused(own, target).reason
        own.policy.write_text("nonsense = 1\n")
        assert "serves no caller" in refused(own, target).reason
        own.policy.write_text("")
        own.policy.chmod(0o666)
        assert "is writable by users other than root" in refused(own, target).reason


def test_a_process_that_is_another_one_by_now_is_not_touched(service: Service, target: int) -> None:
    async def use(helper: HelperService) -> None:
        key = key_of(target)
        other = ProcessKey(key.pid, key.start_time_ns - 10**10)
        with pytest.raises(AttachError) as caught:
            await helper.attach(other, approval_of(target), deadline_s=scaled(10))
        assert caught.value.code is AttachCode.GONE
        assert await helper.private_facts([other]) == {}

    ask(service, use)


def test_facts_of_many_processes_come_in_batches(service: Service, target: int) -> None:
    async def use(helper: HelperService) -> None:
        keys = list(keys_of_all())[: messages.MAX_PROCESSES * 2]
        found = await helper.private_facts([*keys, key_of(target)])
        assert found[key_of(target)].rank == 3
        assert key_of(os.getpid()) not in found  # root's

    ask(service, use)


def test_signs_of_plug_ins_are_looked_for(service: Service, target: int) -> None:
    signs = (
        OutsideSigns("mapped", libraries=("libc.so*",)),
        OutsideSigns("set", variables=("RANK",)),
        OutsideSigns("open", open_files=("pipe:*",)),
        OutsideSigns("none", libraries=("libc.so*",), variables=("PEBBLE_HOME",)),
    )

    async def use(helper: HelperService) -> None:
        facts = await helper.private_facts([key_of(target)], signs)
        assert facts[key_of(target)].plugins == ("mapped", "set", "open")

    ask(service, use)


def test_profilers_are_searched_in_the_processes_that_the_policy_allows(target: int) -> None:
    with attach_service.running() as own:

        async def use(helper: HelperService) -> tuple[set[int], list[ProfilingTool]]:
            return await helper.profilers([target, os.getpid(), 2**22 - 1])  # root's, and none

        assert ask(own, use) == ({target}, [])
        own.logged("search by process")
        own.policy.write_text(f"callers = [{CALLER_UID}]\ndenied_users = [{OWNER_UID}]\n")
        assert ask(own, use) == (set(), [])


def test_a_diagnosis_sees_what_the_helper_may_do(service: Service, target: int) -> None:
    async def use(helper: HelperService) -> None:
        found = {each.name: each for each in (await helper.diagnose(target, KnownAgent())).findings}
        assert found["permission"].status == "OK"
        assert found["interpreter"].status == "OK"
        with subjects.running("sleep", "100") as roots:
            policy = await helper.diagnose(roots, KnownAgent())
        assert [each.code for each in policy.findings] == [AttachCode.NOT_PERMITTED]
        with pytest.raises(ProcessLookupError):
            await helper.diagnose(2**22 - 1, KnownAgent())

    ask(service, use)


def test_stacks_are_read_for_processes_that_the_policy_allows(service: Service) -> None:
    *prefix, python = plain_python(OWNER_UID)

    async def use(helper: HelperService) -> None:
        with subjects.python(SPIN, prefix=tuple(prefix), executable=python) as target:
            found = await helper.read(key_of(target), OWNER_UID)
        assert not found.reason
        assert found.threads[0].thread == target
        assert found.threads[0].frames
        with subjects.running("sleep", "100") as roots:
            assert "the attach helper's policy forbids it" in (await helper.read(key_of(roots), 0)).reason
        with pytest.raises(ProcessLookupError):
            await helper.read(ProcessKey(2**22 - 1, 1), 0)

    ask(service, use)
    service.logged("readstacks by process")


def raw(service: Service, *packets: bytes) -> messages.Answer | None:
    """The last answer; None: it hung up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(scaled(20))
        sock.connect(str(service.socket))
        said: messages.Answer | None = None
        for packet in packets:
            sock.send(packet)
            data = sock.recv(messages.MAX_ANSWER_BYTES)
            said = messages.answer(data) if data else None
        return said


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (b"hello", "REQUEST"),
        (b"KATT\x09\x00{}", "VERSION"),
        (b"KATT\x07\x00" + b'{"type":"attach","target":[1,2],"boot_time_ns":1,"deadline_ms":0}', "REQUEST"),
        (b"KATT\x07\x00" + b" " * messages.MAX_REQUEST_BYTES, "REQUEST"),
    ],
)
def test_what_is_no_request_is_refused_and_the_service_goes_on(service: Service, packet: bytes, code: str) -> None:
    said = raw(service, packet)
    assert isinstance(said, messages.RefusedReply) and said.code == code


def test_a_descriptor_that_nobody_asked_for_is_closed(service: Service) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(service.socket))
        socket.send_fds(sock, [b"hello"], [theirs.fileno()])
        theirs.close()
        assert sock.recv(messages.MAX_ANSWER_BYTES)
        ours.settimeout(scaled(20))
        assert ours.recv(1) == b""  # nobody else holds the other end


def helper_pids(service: Service) -> set[int]:
    assert service.process is not None
    return {child.pid for child in psutil.Process(service.process.pid).children()}


def test_a_helper_that_is_killed_while_it_attaches_hurts_nobody(target: int) -> None:
    with attach_service.running() as own:

        async def use(helper: HelperService) -> AttachCode | str:
            attach = asyncio.create_task(helper.attach(key_of(target), approval_of(target), deadline_s=scaled(10)))
            killed: set[int] = set()
            while not attach.done():
                for pid in helper_pids(own) - killed:
                    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                await asyncio.sleep(0)
            await asyncio.to_thread(until, lambda: not killed & helper_pids(own), "those that were killed are gone")
            try:
                _attached, channel = attach.result()
            except AttachError as exc:
                return exc.code
            channel.close()
            return "attached"

        assert ask(own, use) in (AttachCode.FAILED, "attached")
        assert psutil.pid_exists(target)

        async def again(helper: HelperService) -> str:
            attached, channel = await helper.attach(key_of(target), approval_of(target), deadline_s=scaled(10))
            channel.close()
            return attached.method

        assert ask(own, again) in ("pending-call", "native-thread")


def test_what_is_done_for_a_caller_that_hangs_up_is_given_up(service: Service) -> None:
    stuck = "import ctypes\nimport os\nos.write(1, b'%d\\n' % os.getpid())\nctypes.PyDLL(None).pause()"
    prefix = tuple(unprivileged(OWNER_UID, "dac_read_search"))
    with subjects.python(stuck, prefix=prefix) as pid:
        key = key_of(pid)
        target = messages.Target(pid, key.start_time_ns)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(service.socket))
            asked = messages.Attach(
                target=target,
                approved=message_of(pid),
                administrator=True,
                boot_time_ns=BOOT_TIME_NS,
                deadline_ms=60_000,
            )
            sock.send(messages.encode(asked))
        service.logged("given up: the caller hung up")
        assert psutil.pid_exists(pid)


def test_a_process_with_a_seccomp_filter_is_entered_too(service: Service) -> None:
    program = seccomp_host.all_but({REBOOT: seccomp_host.KILL_PROCESS})
    text = f"{SPIN}\n{FILTER}".replace("PROGRAM", program.hex())
    with subjects.python(text, prefix=tuple(unprivileged(OWNER_UID, "dac_read_search"))) as pid:

        async def use(helper: HelperService) -> str:
            attached, channel = await helper.attach(key_of(pid), approval_of(pid), deadline_s=scaled(10))
            channel.close()
            return attached.method

        assert "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
        assert ask(service, use) in ("pending-call", "native-thread")


def test_without_callers_the_service_ends_and_the_next_one_is_served_again(target: int) -> None:
    with attach_service.running("--idle-exit", "500ms") as own:
        assert own.process is not None
        assert own.process.wait(scaled(30)) == 0
        assert "the next caller starts the service again" in own.log()
        own.policy.write_text(f"users = []\ncallers = [{CALLER_UID}]\n")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(str(own.socket))
            own.start()  # as systemd does for a caller
            assert "left alone" in refused(own, target).reason
        own.process.wait(scaled(30))
        own.process = None


def test_without_a_socket_the_service_says_how_it_is_started() -> None:
    done = as_caller(CALLER_UID, "import sys\nfrom kinetod.attach_helper.__main__ import main\nsys.exit(main())")
    assert done.returncode == 1
    assert "start kinetod-attach.socket" in done.stderr
