"""The front end without any right, beside the kinetod-writer service: traces where other users asked for them."""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing.writer_client import WriterClient, WriterUnreachable
from support.agent.scripted_agent import RemoteAgent
from support.dynolog import client
from support.dynolog.door import door_of, noted_file, open_door, trace_request
from support.service import attach_service
from support.service.attach_service import CALLER_UID, SERVICE_UID, Service, as_caller
from support.service.calls_as import plain_python
from support.service.daemon import Daemon
from support.waiting import scaled, until

CAPABILITIES = ("setuid", "setgid")  # as in the unit; a test compares
_READS_PYTHON = "dac_read_search"  # Python may lie in /root
MODULE = ("-m", "kinetod.trace_writing")


def policy_text(*roots: Path, users: Sequence[int | str] = ("1000-64000",), more: str = "") -> str:
    """A policy for these folders and users."""
    names = json.dumps([str(root) for root in roots])
    return f"callers = [{CALLER_UID}]\nroots = {names}\nusers = {json.dumps(list(users))}\n{more}"


@contextlib.contextmanager
def running(*roots: Path, **how: str) -> Iterator[Service]:
    """A started service that writes below these folders."""
    needed = (*CAPABILITIES, *(() if _everybody_may_run_python() else (_READS_PYTHON,)))
    with attach_service.running(
        name="writer", module=MODULE, capabilities=needed, policy=policy_text(*roots, **how)
    ) as service:
        yield service


def _everybody_may_run_python() -> bool:
    path = Path(sys.executable).resolve()
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (path, *path.parents))


_MNT_DETACH = 2


@contextlib.contextmanager
def silent_folder(path: Path) -> Iterator[None]:
    """Mounts it there for the block: whoever looks for something in it waits until killed. Skips without FUSE."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        pytest.skip(f"no FUSE here: {exc}")
    options = f"fd={server},rootmode=40777,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"silent", os.fsencode(path), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), _MNT_DETACH)
        os.close(server)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
UNITS = Path(__file__).parents[3] / "deploy/systemd"
ADA, BOB = 61001, 61002
TRACE = b'{"schemaVersion": 1, "traceEvents": []}'
CAPTURE = ("collect", "record 20", "state PROCESS", "result")
ASK = """
import asyncio, sys
from pathlib import Path
from kinetod.trace_writing.writer_client import WriterClient
print(asyncio.run(WriterClient(Path(sys.argv[1])).place(61001, Path(sys.argv[2]), deadline_s=10)))
"""


@pytest.fixture(scope="module")
def service(logs: Path) -> Iterator[Service]:
    with running(logs) as started:
        yield started


@pytest.fixture(scope="module")
def front_end(logs: Path, service: Service) -> Iterator[Daemon]:
    with unprivileged_door(logs, service.socket) as started:
        yield started


@contextlib.contextmanager
def unprivileged_door(logs: Path, writer: Path) -> Iterator[Daemon]:
    """The installed front end, which serves every user and may become none."""
    environ = {"KINETOD_ATTACH_HELPER_SOCKET": "/nonexistent/attach.sock"}
    with open_door(uid=CALLER_UID, log_roots=f"{logs} /srv", writer_socket=str(writer), environ=environ) as started:
        yield started


@pytest.fixture
def adas(place: Path) -> Path:
    """A folder of ADA's below the root."""
    os.chown(place, ADA, ADA)
    return place


@pytest.fixture
def training(front_end: Daemon) -> Iterator[RemoteAgent]:
    remote = RemoteAgent(front_end.agent_socket, python=plain_python(ADA))
    try:
        remote.do("hello")
        yield remote
    finally:
        remote.kill()


def placed(
    service: Service, uid: int | None, folder: Path, files: dict[str, int] | None = None, deadline_s: float = 30
) -> list[str]:
    """What the service says, asked as root."""
    named = [(fd, name) for name, fd in (files or {}).items()]
    return asyncio.run(WriterClient(service.socket).place(uid, folder, named, deadline_s=deadline_s))


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "trace.json").write_bytes(TRACE)
    descriptor = os.open(tmp_path / "trace.json", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_the_capabilities_of_these_tests_are_those_of_the_unit() -> None:
    listed = " ".join(f"CAP_{name.upper()}" for name in CAPABILITIES)
    assert f"\nCapabilityBoundingSet={listed}\n" in (UNITS / "kinetod-writer.service").read_text()


def test_another_users_request_ends_with_a_file_of_that_user(
    front_end: Daemon, service: Service, training: RemoteAgent, adas: Path
) -> None:
    request = trace_request(adas / "t.json", pids=[training.pid])
    assert client.asked_as(BOB, door_of(front_end), request)["processesMatched"] == []
    told = client.asked_as(ADA, door_of(front_end), request)
    assert told["processesMatched"] == [training.pid] and "log_file" not in told["kinetod"], told
    training.do(*CAPTURE)
    path = adas / f"t_{training.pid}.json"
    line = noted_file(front_end, path)
    assert (line["decision"], line["target_uid"]) == ("written", ADA), line
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (ADA, 0o644)
    assert json.loads(path.read_bytes())["traceEvents"]
    assert [each.name for each in adas.iterdir()] == [path.name]
    service.logged(f"of uid {CALLER_UID} as uid {ADA} for {adas} ['{path.name}']: 1 of 1 written")


def test_what_root_asks_for_is_written_as_the_user_of_the_process(
    front_end: Daemon, training: RemoteAgent, adas: Path
) -> None:
    told = client.asked(door_of(front_end), trace_request(adas / "t.json", pids=[training.pid]))
    assert "log_file" not in told["kinetod"], told
    training.do(*CAPTURE)
    path = adas / f"t_{training.pid}.json"
    assert noted_file(front_end, path)["decision"] == "written"
    assert path.stat().st_uid == ADA


def is_free(daemon: Daemon) -> bool:
    return not daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).captures_running


def test_what_cannot_be_written_is_said_before_the_capture_starts(
    front_end: Daemon, service: Service, training: RemoteAgent, place: Path
) -> None:
    (place / "link").symlink_to("/tmp")
    for path, why in (
        ("/srv/t.json", f"/srv is not inside any folder of `roots` in {service.policy}; an administrator can add it"),
        ("/elsewhere/t.json", "/elsewhere is not inside any folder of dynolog.log_roots"),
        (f"{place}/t.json", f"{place} is not writable by uid {ADA}"),
        (f"{place}/link/t.json", f"{place}/link is not a folder, or is a symbolic link; use its real path"),
    ):
        told = client.asked_as(ADA, door_of(front_end), trace_request(path, pids=[training.pid]))
        assert told["kinetod"]["log_file"] == f"not written: {why}"
        training.do(*CAPTURE)
        until(lambda: is_free(front_end), "the capture has ended")


def test_a_file_that_is_no_trace_stays_and_the_trace_is_in_the_store(
    front_end: Daemon, training: RemoteAgent, adas: Path
) -> None:
    path = adas / f"t_{training.pid}.json"
    path.write_bytes(b"notes")
    os.chown(path, ADA, ADA)
    client.asked_as(ADA, door_of(front_end), trace_request(adas / "t.json", pids=[training.pid]))
    training.do(*CAPTURE)
    line = noted_file(front_end, path)
    assert line["decision"] == "refused" and "it already exists and is not a trace" in line["problem"]
    assert path.read_bytes() == b"notes"


def test_without_the_service_it_is_said_which_command_enables_it(logs: Path, tmp_path: Path) -> None:
    with unprivileged_door(logs, tmp_path / "writer.sock") as alone:
        remote = RemoteAgent(alone.agent_socket, python=plain_python(ADA))
        try:
            remote.do("hello")
            told = client.asked_as(ADA, door_of(alone), trace_request(logs / "t.json", pids=[remote.pid]))
        finally:
            remote.kill()
        assert told["kinetod"]["log_file"] == (
            f"not written: this daemon runs as uid {CALLER_UID} and cannot write files as uid {ADA}; the writer "
            "service could, but is not enabled: enable it with `systemctl enable --now kinetod-writer.socket`"
        )
        (first, _second) = checks(alone)
        assert (
            first.status == pb.CHECK_STATUS_PROBLEM and "systemctl enable --now kinetod-writer.socket" in first.detail
        )


def checks(daemon: Daemon) -> list[pb.Check]:
    found = daemon.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(60)).checks
    return [each for each in found if each.name == "dynolog_files"]


def test_doctor_names_each_root_that_the_service_does_not_write_to(
    front_end: Daemon, service: Service, logs: Path
) -> None:
    (only,) = checks(front_end)
    assert only.status == pb.CHECK_STATUS_PROBLEM and only.detail.startswith("traces cannot be written below /srv: ")
    with running(logs, Path("/srv")) as other, unprivileged_door(logs, other.socket) as whole:
        (only,) = checks(whole)
        assert (only.status, only.detail) == (
            pb.CHECK_STATUS_OK, f"the writer service writes traces below {logs}, /srv",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("uid", "why"),
    [
        (0, "writing as uid 0 is not allowed"),
        (998, "writing as uid 998 is not allowed"),
        (SERVICE_UID, f"uid {SERVICE_UID} is the user of the writer service itself"),
        (CALLER_UID, f"uid {CALLER_UID} is one of the `callers`"),
    ],
    ids=["root", "998", "service", "caller"],
)
def test_nothing_is_written_as_root_as_services_or_as_its_siblings(
    service: Service, adas: Path, stored: int, uid: int, why: str
) -> None:
    service.policy.write_text(policy_text(adas, users=["1000-4294967294"]))
    try:
        (problem,) = placed(service, uid, adas, {"t.json": stored})
    finally:
        service.policy.write_text(policy_text(adas.parent))
    assert problem.startswith(why)
    assert list(adas.iterdir()) == []


def test_root_is_served_only_in_folders_of_roots_if_the_policy_names_it(place: Path, stored: int) -> None:
    with running(place, users='["root"]') as own:
        own.policy.write_text(policy_text(place, users=["root", ADA]))
        assert placed(own, 0, place, {"t.json": stored}) == [""]
        assert (place / "t.json").stat().st_uid == 0
        os.chown(place, ADA, ADA)
        (problem,) = placed(own, 0, place, {"t2.json": stored})
        assert "nothing is written there as root" in problem


def test_another_peer_gets_nothing(service: Service, adas: Path) -> None:
    done = as_caller(ADA, ASK, str(service.socket), str(adas))
    assert f"uid {ADA} is not allowed to use the writer service" in done.stdout, done.stderr
    service.logged(f"of uid {ADA} was refused: uid {ADA} is not allowed to use")


def test_only_whole_regular_files_that_are_traces_are_written(service: Service, adas: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("ssh-rsa AAAA")
    (tmp_path / "big").write_bytes(TRACE)
    os.truncate(tmp_path / "big", 5 << 30)
    given = {
        "pipe.json": os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK),
        "folder.json": os.open(tmp_path, os.O_RDONLY),
        "text.json": os.open(tmp_path / "text", os.O_RDONLY),
        "big.json": os.open(tmp_path / "big", os.O_RDONLY),
        "path.json": os.open(tmp_path / "text", os.O_PATH),
    }
    try:
        problems = placed(service, ADA, adas, given)
    finally:
        for fd in given.values():
            os.close(fd)
    assert problems == [
        "pipe.json: the source is not a regular file",
        "folder.json: the source is not a regular file",
        "text.json: the source is not a trace",
        "big.json: the trace has 5368709120 bytes, but at most 4294967296 are allowed",
        "path.json: Bad file descriptor",
    ]
    assert list(adas.iterdir()) == []


@pytest.mark.parametrize("name", ["../t.json", "a/t.json", "..", ".", "a\nb.json", "x" * 256])
def test_a_name_that_leads_elsewhere_is_refused(service: Service, adas: Path, stored: int, name: str) -> None:
    (problem,) = placed(service, ADA, adas, {name: stored})
    assert "is not a file name" in problem or "cannot be decoded" in problem


def test_fuzzed_packets_are_refused_and_the_next_request_is_served(service: Service, adas: Path, stored: int) -> None:
    rng = random.Random(7)
    good = messages.encode(messages.PlaceTraces(uid=ADA, folder=str(adas), names=("t.json",)))
    for number in range(200):
        packet = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            packet[rng.randrange(len(packet))] = rng.randrange(256)
        if number % 3 == 0:
            packet = packet[: rng.randrange(1, len(packet))]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(str(service.socket))
            socket.send_fds(sock, [packet], [stored] * rng.randrange(3))
            assert messages.answer(sock.recv(messages.MAX_PACKET_BYTES)).problems[0] or list(adas.iterdir())
        for path in adas.iterdir():
            path.unlink()
    assert placed(service, ADA, adas, {"t.json": stored}) == [""]


def test_a_caller_who_stalls_keeps_nobody_waiting(service: Service, adas: Path, stored: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(str(service.socket))
        assert placed(service, ADA, adas, {"t.json": stored}) == [""]


def test_a_change_of_the_policy_counts_at_once(place: Path, stored: int) -> None:
    os.chown(place, ADA, ADA)
    with running(place) as own:
        own.policy.write_text(policy_text(place, more=f"denied_users = [{ADA}]"))
        assert "writing as uid" in placed(own, ADA, place, {"t.json": stored})[0]
        own.policy.write_text("nonsense = 1\n")
        assert "serves no caller" in placed(own, ADA, place, {"t.json": stored})[0]
        own.policy.write_text(policy_text(place))
        own.policy.chmod(0o666)
        assert "is writable by users other than root" in placed(own, ADA, place, {"t.json": stored})[0]
        own.policy.chmod(0o644)
        assert placed(own, ADA, place, {"t.json": stored}) == [""]


SWAP = """
import contextlib, os, sys
folder, outside = sys.argv[1:]
kept, name = folder + "/kept", folder + "/sub"
os.mkdir(kept)
inside = os.open(kept, os.O_DIRECTORY)
print("swapping", flush=True)
while True:
    for change in (
        lambda: os.symlink(outside, name),
        lambda: os.remove(name),
        lambda: os.rename(kept, name),
        lambda: os.mkfifo("t.json", dir_fd=inside),
        lambda: os.remove("t.json", dir_fd=inside),
        lambda: os.symlink(outside + "/precious", "t.json", dir_fd=inside),
        lambda: os.remove("t.json", dir_fd=inside),
        lambda: os.link(outside + "/precious", "t.json", dst_dir_fd=inside),
        lambda: os.remove("t.json", dir_fd=inside),
        lambda: os.rename(name, kept),
    ):
        with contextlib.suppress(OSError):
            change()
"""


def test_names_that_are_swapped_all_the_time_lead_out_of_no_root_and_over_nothing_else(
    service: Service, adas: Path, stored: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        outside = Path(name)
        outside.chmod(0o755)
        (outside / "precious").write_bytes(b"no trace")
        for path in (outside, outside / "precious"):
            os.chown(path, ADA, ADA)
        words = [*plain_python(ADA), "-c", SWAP, str(adas), name]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as swapping:
            try:
                assert swapping.stdout is not None
                assert swapping.stdout.readline()
                answers = {placed(service, ADA, adas / "sub", {"t.json": stored})[0] for _ in range(25)}
            finally:
                swapping.kill()
        assert [path.name for path in outside.iterdir()] == ["precious"]
        assert (outside / "precious").read_bytes() == b"no trace"
    assert not [answer for answer in answers if "did not answer" in answer]


def test_a_folder_that_hangs_is_given_up_and_others_are_served(logs: Path, stored: int) -> None:
    hanging, bobs = logs / "hanging", logs / "bobs"
    for folder, uid in ((hanging, ADA), (bobs, BOB)):
        folder.mkdir()
        os.chown(folder, uid, uid)
    with silent_folder(hanging), running(logs) as own:

        async def together() -> tuple[list[str], list[str]]:
            ask = WriterClient(own.socket)
            hung = asyncio.create_task(ask.place(ADA, hanging / "deep", deadline_s=30))
            served = await ask.place(BOB, bobs, [(stored, "t.json")], deadline_s=30)
            return await hung, served

        hung, served = asyncio.run(together())
        assert (hung, served) == (["the folder did not respond within 5 s"], [""])
        assert placed(own, ADA, hanging) == [
            "the folder did not respond within 5 s a moment ago; nothing is written there until it responds"
        ]


def test_a_service_that_was_killed_is_told_and_serves_when_it_runs_again(place: Path, stored: int) -> None:
    os.chown(place, ADA, ADA)
    with running(place) as own:
        assert placed(own, ADA, place) == [""]
        assert own.process is not None
        own.process.kill()
        own.process.wait()
        with pytest.raises(WriterUnreachable, match="is not responding"):
            asyncio.run(WriterClient(own.socket, start_grace_s=0.2).place(ADA, place, deadline_s=0.2))
        own.start()
        assert placed(own, ADA, place, {"t.json": stored}) == [""]
