"""Who may do what at a real daemon of root: users of this host over its socket, and over loopback without TLS."""

import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.access.connections.connection_proxy import PLAIN_SOCKET
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.service.calls_as import OK, Answer, CallsAs, call, plain_python
from support.service.daemon import Daemon, as_user, free_address, running_daemon, watch_to_end
from support.waiting import scaled, until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")

ADA, BOB, VERA, OLGA = 61001, 61002, 61003, 61004
OPS = 62001
SECOND_NS = 10**9
EVERYTHING = pb.ListProcessesRequest(selector=pb.Selector(helpers=True))
SETTINGS = """
[access]
viewer_users = ["{vera}"]
admin_users = ["{olga}"]
max_captures_per_user = 1
audit_file = "{audit}"
"""


@dataclass(frozen=True)
class Host:
    """A daemon, two users with a process each, one who sees all, one who may do all."""

    daemon: Daemon
    audit: Path
    ada: CallsAs
    bob: CallsAs
    vera: CallsAs
    olga: CallsAs
    adas: RemoteAgent
    bobs: RemoteAgent

    def call(self, who: CallsAs, name: str, request: Message) -> Answer:
        return who.call(self.daemon.address, name, request)

    def audited(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def last_audited(self, **facts: object) -> dict[str, object]:
        def found() -> dict[str, object] | None:
            matching = (line for line in reversed(self.audited()) if facts.items() <= line.items())
            return next(matching, None)

        return until(found, f"a line with {facts}")


def request_of(agent: RemoteAgent | int, key: str = "") -> pb.CreateCaptureRequest:
    pid = agent if isinstance(agent, int) else agent.pid
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=SECOND_NS, no_attach=True)
    return pb.CreateCaptureRequest(spec=spec, idempotency_key=key)


@contextlib.contextmanager
def open_daemon(*options: str) -> Iterator[Daemon]:
    """A daemon whose folder everybody may enter."""
    with running_daemon(*options) as daemon:
        daemon.root.chmod(0o755)
        yield daemon


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("access")
    config, audit = folder / "config.toml", folder / "audit.jsonl"
    config.write_text(SETTINGS.format(vera=VERA, olga=OLGA, audit=audit))
    with ExitStack() as stack:
        daemon = stack.enter_context(open_daemon("--config", str(config)))
        users = [stack.enter_context(CallsAs(uid)) for uid in (ADA, BOB, VERA, OLGA)]
        agents = [stack.enter_context(RemoteAgent(daemon.agent_socket, python=plain_python(uid))) for uid in (ADA, BOB)]
        for agent in agents:
            agent.do("hello")
        ada, bob, vera, olga = users
        adas, bobs = agents
        yield Host(daemon, audit, ada, bob, vera, olga, adas, bobs)


@pytest.fixture(scope="module")
def adas_capture(host: Host) -> str:
    """A capture of ada's that has ended."""
    return finished(host, host.ada, host.adas)


def test_the_sockets_behind_the_proxy_are_roots_alone(host: Host) -> None:
    folder = host.daemon.agent_socket.with_name(host.daemon.agent_socket.name + ".grpc")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: 0o700, PLAIN_SOCKET: 0o600}


def finished(host: Host, who: CallsAs, agent: RemoteAgent) -> str:
    agent.tell("capture")
    created = host.call(who, "CreateCapture", request_of(agent)).only
    assert agent.told() == "ok"
    ended = watch_to_end(host.daemon.stub(), created.id)
    assert ended.status == pb.CAPTURE_STATUS_DONE, ended
    return str(created.id)


def test_a_user_traces_an_own_process_and_fetches_the_trace(host: Host, adas_capture: str) -> None:
    capture = host.call(host.ada, "GetCapture", pb.GetCaptureRequest(id=adas_capture)).only
    assert capture.owner_uid == ADA
    chunks = host.call(host.ada, "FetchTrace", pb.FetchTraceRequest(capture_id=adas_capture)).messages
    assert sum(len(chunk.data) for chunk in chunks) == capture.targets[0].files[0].size_bytes


def test_lists_hold_what_the_caller_may_see(host: Host, adas_capture: str) -> None:
    def processes(who: CallsAs) -> set[int]:
        listed = host.call(who, "ListProcesses", EVERYTHING).only.processes
        return {process.pid for process in listed}

    def captures(who: CallsAs) -> set[str]:
        return {each.id for each in host.call(who, "ListCaptures", pb.ListCapturesRequest()).only.captures}

    assert processes(host.ada) == {host.adas.pid}
    assert processes(host.bob) == {host.bobs.pid}
    assert processes(host.vera) == {host.adas.pid, host.bobs.pid}
    assert adas_capture in captures(host.ada) & captures(host.vera) & captures(host.olga)
    assert adas_capture not in captures(host.bob)


def test_a_list_with_processes_that_have_no_agent_shows_no_others(host: Host) -> None:
    request = pb.ListProcessesRequest(include_without_agent=True)
    assert {each.uid for each in host.call(host.ada, "ListProcesses", request).only.processes} == {ADA}
    (sample,) = host.ada.call(
        host.daemon.address, "WatchHost", pb.WatchHostRequest(include_without_agent=True), most=1
    ).messages
    assert {each.process.uid for each in sample.processes} == {ADA}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GetCapture", pb.GetCaptureRequest),
        ("WatchCapture", pb.WatchCaptureRequest),
        ("StartCapture", pb.StartCaptureRequest),
        ("CancelCapture", pb.CancelCaptureRequest),
        ("DeleteCapture", pb.DeleteCaptureRequest),
        ("PinCapture", pb.PinCaptureRequest),
        ("VerifyCapture", pb.VerifyCaptureRequest),
        ("FetchTrace", pb.FetchTraceRequest),
    ],
)
def test_a_capture_of_another_user_is_answered_like_none(
    host: Host, adas_capture: str, name: str, kind: type[Message]
) -> None:
    field = "capture_id" if name == "FetchTrace" else "id"
    nowhere = adas_capture[:-6] + "000000"
    real, none = (host.call(host.bob, name, kind(**{field: each})) for each in (adas_capture, nowhere))
    assert (real.code, real.reason) == ("NOT_FOUND", "NO_SUCH_CAPTURE")
    assert real.message.replace(adas_capture, nowhere) == none.message
    assert host.last_audited(call=name, capture=adas_capture, uid=BOB)["reason"] == "NO_SUCH_CAPTURE"


@pytest.mark.parametrize("name", ["StartCapture", "CancelCapture", "DeleteCapture", "PinCapture"])
def test_a_viewer_sees_captures_and_changes_none(host: Host, adas_capture: str, name: str) -> None:
    assert host.call(host.vera, "GetCapture", pb.GetCaptureRequest(id=adas_capture)).code == OK
    answer = host.call(host.vera, name, getattr(pb, f"{name}Request")(id=adas_capture))
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "ROLE_NEEDED")
    assert "is not allowed to start, cancel, delete or pin a capture" in answer.message
    assert answer.message.endswith("that needs the role admin")
    line = host.last_audited(call=name, uid=VERA)
    assert (line["decision"], line["capture"], line["via"]) == ("denied", adas_capture, "unix")
    assert line["pid"] == host.vera.pid


def test_a_process_of_another_user_is_refused_like_one_that_does_not_exist(host: Host) -> None:
    real = host.call(host.ada, "CreateCapture", request_of(host.bobs))
    assert host.last_audited(call="CreateCapture", uid=ADA, selector={"pids": [host.bobs.pid]})["target_uid"] == BOB
    none = host.call(host.ada, "CreateCapture", request_of(2**22 + 1))
    assert (real.code, real.reason) == ("PERMISSION_DENIED", "NOT_YOUR_PROCESS")
    assert "the role admin may trace a process of another user" in real.message
    assert none.message == real.message.replace(str(host.bobs.pid), str(2**22 + 1))
    assert "target_uid" not in host.last_audited(call="CreateCapture", selector={"pids": [2**22 + 1]})
    real = host.call(host.ada, "DiagnoseProcess", pb.DiagnoseProcessRequest(pid=host.bobs.pid))
    assert host.last_audited(call="DiagnoseProcess", asked_pid=host.bobs.pid)["target_uid"] == BOB
    none = host.call(host.ada, "DiagnoseProcess", pb.DiagnoseProcessRequest(pid=2**22 + 1))
    assert none.message == real.message.replace(str(host.bobs.pid), str(2**22 + 1))


def stacks_of(pid: int) -> pb.ReadStacksRequest:
    return pb.ReadStacksRequest(selector=pb.Selector(pids=[pid]))


def test_stacks_of_another_user_are_refused_like_those_of_a_process_that_does_not_exist(host: Host) -> None:
    real = host.call(host.ada, "ReadStacks", stacks_of(host.bobs.pid))
    assert host.last_audited(call="ReadStacks", uid=ADA, selector={"pids": [host.bobs.pid]})["target_uid"] == BOB
    none = host.call(host.ada, "ReadStacks", stacks_of(2**22 + 1))
    assert (real.code, real.reason) == ("PERMISSION_DENIED", "NOT_YOUR_PROCESS")
    assert none.message == real.message.replace(str(host.bobs.pid), str(2**22 + 1))
    answer = host.call(host.vera, "ReadStacks", stacks_of(host.bobs.pid))
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "NOT_YOUR_PROCESS")
    assert host.call(host.bob, "ReadStacks", stacks_of(host.bobs.pid)).only.process.pid == host.bobs.pid


def test_stacks_need_a_condition(host: Host) -> None:
    answer = host.call(host.ada, "ReadStacks", pb.ReadStacksRequest())
    assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert "selector: must have at least one condition" in answer.message


def test_a_viewer_traces_nothing(host: Host) -> None:
    answer = host.call(host.vera, "CreateCapture", request_of(host.bobs))
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "NOT_YOUR_PROCESS")
    assert "is not allowed to trace it (roles: jobs, own, viewer)" in answer.message
    assert host.call(host.vera, "DiagnoseProcess", pb.DiagnoseProcessRequest(pid=host.bobs.pid)).code == OK


def test_an_administrator_traces_everybodys_processes_and_owns_the_captures(host: Host) -> None:
    capture_id = finished(host, host.olga, host.bobs)
    assert host.call(host.bob, "GetCapture", pb.GetCaptureRequest(id=capture_id)).code == "NOT_FOUND"
    line = host.last_audited(call="CreateCapture", capture=capture_id)
    assert (line["uid"], line["owner_uid"]) == (OLGA, OLGA)
    assert line["targets"] == [{"pid": host.bobs.pid, "uid": BOB}]
    assert host.last_audited(call="(end of capture)", capture=capture_id)["verdicts"] == {"DONE": 1}
    assert host.call(host.olga, "DeleteCapture", pb.DeleteCaptureRequest(id=capture_id)).code == OK


def test_a_selector_finds_only_what_the_caller_may_trace(host: Host) -> None:
    spec = pb.CaptureSpec(selector=pb.Selector(command_regex="scripted_agent"), duration_ns=SECOND_NS, no_attach=True)
    host.bobs.tell("capture")
    created = host.call(host.bob, "CreateCapture", pb.CreateCaptureRequest(spec=spec)).only
    assert host.bobs.told() == "ok"
    assert [target.pid for target in created.targets] == [host.bobs.pid]
    watch_to_end(host.daemon.stub(), created.id)


def test_a_process_with_rights_of_its_own_is_an_administrators(host: Host) -> None:
    with RemoteAgent(host.daemon.agent_socket, prefix=as_user(ADA)) as privileged:
        privileged.do("hello")
        answer = host.call(host.ada, "CreateCapture", request_of(privileged))
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "NOT_YOUR_PROCESS")
    assert "the kernel would not let that user trace it" in answer.message


@pytest.fixture
def job() -> Iterator[Path]:
    """A Slurm job's control group as slurmstepd makes it."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    root = next((Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"), None)
    folder = root and root / f"system.slice/slurmstepd.scope/job_{os.getpid()}"
    if folder is None or "0::/\n" not in Path("/proc/self/cgroup").read_text():
        pytest.skip("the root of the control groups is not in sight")
    try:
        folder.mkdir(parents=True)
    except OSError as exc:
        pytest.skip(f"control groups cannot be made: {exc}")
    yield folder
    for made in (folder, *folder.parents[:2]):
        until(lambda made=made: removed(made), f"{made} is empty")  # type: ignore[misc]


def removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # a process is still on its way out, or the folder was there before
        folder.rmdir()
    return not folder.exists() or any(each.is_dir() for each in folder.iterdir())


@pytest.mark.slow
def test_the_owner_of_a_job_traces_processes_of_other_users_in_it(host: Host, job: Path) -> None:
    assert host.call(host.ada, "CreateCapture", request_of(host.bobs)).reason == "NOT_YOUR_PROCESS"
    with (
        RemoteAgent(host.daemon.agent_socket, python=plain_python(ADA)) as first,
        RemoteAgent(host.daemon.agent_socket, python=plain_python(BOB)) as second,
    ):
        for agent in (first, second):
            agent.do("hello")
            (job / "cgroup.procs").write_text(str(agent.pid))
        until(lambda: host.call(host.ada, "DiagnoseProcess", pb.DiagnoseProcessRequest(pid=second.pid)).code == OK, "")
        capture_id = finished(host, host.ada, second)
        assert host.call(host.ada, "DeleteCapture", pb.DeleteCaptureRequest(id=capture_id)).code == OK
        assert host.call(host.bob, "CreateCapture", request_of(first)).reason == "NOT_YOUR_PROCESS"


def test_an_idempotency_key_is_its_users_alone(host: Host) -> None:
    with ExitStack() as stack:
        made = []
        for who, agent in ((host.ada, host.adas), (host.bob, host.bobs)):
            made.append(host.call(who, "CreateCapture", request_of(agent, key="same")).only.id)
            stack.callback(host.call, who, "CancelCapture", pb.CancelCaptureRequest(id=made[-1]))
            agent.do("await_start")
        assert len(set(made)) == 2
        assert host.call(host.ada, "CreateCapture", request_of(host.adas, key="same")).only.id == made[0]
        answer = host.call(host.ada, "CreateCapture", request_of(host.adas))
        assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_CAPTURES")
        assert "already has 1 running capture, the limit for one user" in answer.message
        for agent, capture_id in ((host.adas, made[0]), (host.bobs, made[1])):
            agent.tell(f"cancelled {capture_id}")


def test_gprcs_own_socket_is_closed_to_others_and_knows_nobody(host: Host) -> None:
    folder = host.daemon.agent_socket.with_name("agent.sock.grpc")
    assert folder.stat().st_mode & 0o777 == 0o700
    with grpc.insecure_channel(f"unix:{folder}/plain") as channel:
        answer = call(channel, "GetHost", pb.GetHostRequest())
    assert (answer.code, answer.reason) == ("UNAUTHENTICATED", "NOT_IDENTIFIED")


@pytest.mark.slow
def test_ones_own_daemon_lets_oneself_and_root_in() -> None:
    with running_daemon(uid=ADA) as daemon, CallsAs(ADA) as ada, CallsAs(BOB) as bob:
        for folder in (daemon.root, daemon.runtime_dir):
            folder.chmod(0o755)  # as if somebody had opened it by mistake
        daemon.rpc_socket.chmod(0o666)
        assert ada.call(daemon.address, "GetHost", pb.GetHostRequest()).code == OK
        assert daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).hostname
        assert bob.call(daemon.address, "GetHost", pb.GetHostRequest()).code == "UNAVAILABLE"


@dataclass(frozen=True)
class Changing:
    """A daemon whose settings each test chooses, and a user with a process."""

    daemon: Daemon
    config: Path
    loopback: str
    ada: CallsAs
    adas: RemoteAgent

    def configure(self, *lines: str) -> None:
        """Puts these settings about access in force."""

        def reloads() -> int:
            return self.daemon.log().count("the configuration was reloaded")

        before = reloads()
        self.config.write_text("\n".join(("[access]", "loopback_without_tls = true", *lines)))
        os.kill(self.daemon.pid, signal.SIGHUP)
        until(lambda: reloads() > before, "the daemon has reloaded")


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    config = tmp_path_factory.mktemp("changing") / "config.toml"
    config.write_text("[access]\nloopback_without_tls = true\n")
    loopback = free_address()
    with (
        open_daemon("--config", str(config), "--listen", loopback) as daemon,
        CallsAs(ADA, groups=[OPS, 0]) as ada,
        RemoteAgent(daemon.agent_socket, python=plain_python(ADA)) as agent,
    ):
        agent.do("hello")
        yield Changing(daemon, config, loopback, ada, agent)


@pytest.mark.slow
def test_loopback_without_tls_knows_users_too(changing: Changing) -> None:
    changing.configure()
    with ScriptedAgent(changing.daemon.agent_socket) as agent:
        agent.hello()
        listed = changing.ada.call(changing.loopback, "ListProcesses", EVERYTHING).only.processes
        assert [process.pid for process in listed] == [changing.adas.pid]
        with grpc.insecure_channel(changing.loopback) as channel:
            listed = call(channel, "ListProcesses", EVERYTHING).only.processes
        assert {process.pid for process in listed} == {changing.adas.pid, os.getpid()}


def test_who_has_no_role_is_told_so_until_a_reload_gives_one(changing: Changing) -> None:
    changing.configure("local_roles = []")
    answer = changing.ada.call(changing.daemon.address, "GetHost", pb.GetHostRequest())
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "NO_ROLE")
    changing.configure("local_roles = []", 'viewer_groups = ["root"]')
    assert changing.ada.call(changing.daemon.address, "GetHost", pb.GetHostRequest()).code == OK


def test_a_caller_that_asks_too_often_waits(changing: Changing) -> None:
    changing.configure("requests_per_second = 1")

    def refused() -> Answer | None:
        answer = changing.ada.call(changing.daemon.address, "GetHost", pb.GetHostRequest())
        return None if answer.code == OK else answer

    answer = until(refused, "more has been asked than may be")  # which takes the longer the slower the machine is
    assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
    assert changing.daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).hostname
    changing.configure()


def test_a_user_who_stores_as_much_as_the_quota_is_refused(changing: Changing) -> None:
    changing.configure('quota_per_user = "1"')
    address, ada = changing.daemon.address, changing.ada
    changing.adas.tell("capture")
    created = ada.call(address, "CreateCapture", request_of(changing.adas)).only
    assert changing.adas.told() == "ok"
    watch_to_end(changing.daemon.stub(), created.id)
    answer = ada.call(address, "CreateCapture", request_of(changing.adas))
    assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
    assert ada.call(address, "DeleteCapture", pb.DeleteCaptureRequest(id=created.id)).code == OK


def test_a_thousand_connections_that_say_nothing_keep_no_caller_out(host: Host) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(1000)]
    for each in silent:
        each.connect(str(host.daemon.rpc_socket))
    with grpc.insecure_channel(host.daemon.address) as channel:
        assert call(channel, "GetHost", pb.GetHostRequest()).code == OK
    assert host.call(host.ada, "GetHost", pb.GetHostRequest()).code == OK
    for each in silent:
        each.close()
