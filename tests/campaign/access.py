"""Tests every role against every call: over the Unix socket, loopback and TLS, as root.

    .venv/bin/python tests/campaign/access.py

What each caller may do is written out here a second time, apart from the daemon's own table. Prints a line for each
caller and each problem; exit status 1 if there is one. Every call must also have its line in the audit log.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent
from support.peers.certificates import DAY, Authority, Pair, write_server_files
from support.service.calls_as import OK, Answer, CallsAs, call, plain_python
from support.service.daemon import Daemon, as_user, running_daemon, watch_to_end
from support.waiting import until

ADA, BOB, VERA, OLGA, GINA = 61001, 61002, 61003, 61004, 61005
DAEMON = 1  # a user that every host has
NO_PID, NO_CAPTURE = 2**22 + 1, "20200101-000000-000-000000"
SEES_ALL, MAY_ALL = ("root", "olga", "gina", "vera", "viewer", "operator"), ("root", "olga", "gina", "operator")
SETTINGS = """
[access]
viewer_users = ["{vera}"]
admin_users = ["{olga}"]
admin_groups = ["root"]
loopback_without_tls = true
requests_per_second = 100000
max_captures_per_user = 8
audit_file = "{folder}/audit.jsonl"
tls_certificate = "{folder}/server.pem"
tls_key = "{folder}/server.key"
tls_client_ca = "{folder}/clients.pem"
[access.certificates]
"CN:daemon" = "own, jobs as daemon"
"CN:viewer" = "viewer"
"CN:operator" = "admin"
"""
CAPTURE_CALLS = (
    "GetCapture", "WatchCapture", "FetchTrace", "VerifyCapture", "StartCapture", "CancelCapture", "PinCapture",
    "DeleteCapture",
)  # fmt: skip
CHANGES = ("StartCapture", "CancelCapture", "PinCapture", "DeleteCapture")
Make = Callable[[str, Message], Answer]


@dataclass
class Caller:
    """A caller. name: as in SEES_ALL; uid: the owner of the processes and captures that are the caller's own."""

    name: str
    via: str
    uid: int | None
    make: Make

    @property
    def sees_all(self) -> bool:
        return self.name in SEES_ALL

    @property
    def may_all(self) -> bool:
        return self.name in MAY_ALL


@dataclass
class Campaign:
    """One daemon, processes of several users, and the problems that were found."""

    daemon: Daemon
    folder: Path
    agents: dict[int, RemoteAgent]
    privileged: RemoteAgent
    problems: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def ask(self, caller: Caller, name: str, request: Message, expected: str) -> Answer:
        """Makes a call that must end with the given code, or code and reason."""
        answer = caller.make(name, request)
        self.calls[name] += 1
        found = answer.code if answer.code in (OK, "UNAVAILABLE") else f"{answer.code} {answer.reason}"
        if found != expected:
            self.problems.append(
                f"{caller.name} ({caller.via}) {name} {str(request)[:100]!r}: {found}, not {expected}: {answer.message}"
            )
        return answer

    def check(self, caller: Caller, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.problems.append(f"{caller.name} ({caller.via}) {what}: {found}, not {expected}")

    def capture_of(self, caller: Caller, agent: RemoteAgent) -> str:
        """Makes a capture and returns it once it has ended."""
        created = caller.make("CreateCapture", created_by(agent.pid)).only
        self.calls["CreateCapture"] += 1
        agent.do("capture")
        watch_to_end(self.daemon.stub(), created.id)
        self.calls["WatchCapture"] += 1
        return str(created.id)


def created_by(pid: int) -> pb.CreateCaptureRequest:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=10**9, no_attach=True)
    return pb.CreateCaptureRequest(spec=spec)


def about_the_host(run: Campaign, caller: Caller) -> None:
    """Calls that name no object, and lists."""
    run.ask(caller, "GetHost", pb.GetHostRequest(), OK)
    run.ask(caller, "GetClock", pb.GetClockRequest(), OK)
    run.ask(caller, "DiagnoseHost", pb.DiagnoseHostRequest(), OK)
    if caller.name == "viewer":
        run.ask(caller, "WatchCounters", pb.WatchCountersRequest(), "PERMISSION_DENIED ROLE_NEEDED")
    agents = {agent.pid: uid for uid, agent in run.agents.items()} | {run.privileged.pid: ADA}
    expected = {pid for pid, uid in agents.items() if caller.sees_all or uid == caller.uid}
    listed = run.ask(caller, "ListProcesses", pb.ListProcessesRequest(), OK).only.processes
    run.check(caller, "ListProcesses", {process.pid for process in listed}, expected)
    (sample,) = run.ask(caller, "WatchHost", pb.WatchHostRequest(include_without_agent=True), OK).messages[:1]
    strange = {each.process.uid for each in sample.processes} - {caller.uid}
    run.check(caller, "WatchHost shows others", bool(strange), caller.sees_all)


def about_processes(run: Campaign, caller: Caller) -> None:
    """Calls that look at and trace processes: everybody's, and ones that do not exist."""
    targets: list[tuple[int, int, bool, RemoteAgent | None]]
    targets = [(agent.pid, uid, True, agent) for uid, agent in run.agents.items()]
    targets += [(run.privileged.pid, ADA, False, run.privileged), (NO_PID, -1, True, None)]
    for pid, uid, plain, agent in targets:
        nobody = "NOT_FOUND NO_SUCH_PROCESS" if caller.sees_all else "PERMISSION_DENIED NOT_YOUR_PROCESS"
        denied = "PERMISSION_DENIED NOT_YOUR_PROCESS"
        seen = caller.sees_all or uid == caller.uid
        run.ask(caller, "DiagnoseProcess", pb.DiagnoseProcessRequest(pid=pid), OK if agent and seen else nobody)
        traced = agent is not None and (caller.may_all or (uid == caller.uid and plain))
        if caller.name == "viewer":  # a certificate that has no role in which anything could be traced
            expected = "PERMISSION_DENIED ROLE_NEEDED"
        else:
            expected = OK if traced else (nobody if agent is None else denied)
        answer = run.ask(caller, "CreateCapture", created_by(pid), expected)
        if answer.code == OK and agent is not None:
            agent.do("capture")
            watch_to_end(run.daemon.stub(), answer.only.id)
            run.calls["WatchCapture"] += 1


def about_captures(run: Campaign, caller: Caller, owners: dict[int, Caller]) -> None:
    """Calls that look at and change captures: everybody's, and ones that do not exist."""
    captures = {run.capture_of(owners[uid], run.agents[uid]): uid for uid in owners}
    listed = run.ask(caller, "ListCaptures", pb.ListCapturesRequest(page_size=1000), OK).only.captures
    strange = {each.owner_uid for each in listed} - {caller.uid}
    run.check(caller, "ListCaptures shows others", bool(strange), caller.sees_all)
    for capture_id, uid in (*captures.items(), (NO_CAPTURE, -1)):
        seen = uid != -1 and (caller.sees_all or uid == caller.uid)
        changed = uid != -1 and (caller.may_all or uid == caller.uid)
        for name in CAPTURE_CALLS:
            request: Any = getattr(pb, f"{name}Request")()
            setattr(request, "capture_id" if name == "FetchTrace" else "id", capture_id)
            if not seen:
                expected = "NOT_FOUND NO_SUCH_CAPTURE"
                if name in CHANGES and caller.name == "viewer":
                    expected = "PERMISSION_DENIED ROLE_NEEDED"
            else:
                allowed = "FAILED_PRECONDITION CAPTURE_NOT_ARMED" if name == "StartCapture" else OK
                expected = "PERMISSION_DENIED ROLE_NEEDED" if name in CHANGES and not changed else allowed
            run.ask(caller, name, request, expected)


def turned_away(run: Campaign, caller: Caller, expected: str) -> None:
    """Calls of a caller who is refused everything."""
    for method in pb.DESCRIPTOR.services_by_name["Profiler"].methods:
        run.ask(caller, method.name, getattr(pb, f"{method.name}Request")(), expected)


def over_tls(authority: Authority, address: str, client: Pair | None) -> Make:
    def make(name: str, request: Message) -> Answer:
        with authority.channel(address, client) as channel:
            return call(channel, name, request, most=1 if name == "WatchHost" else 1000)

    return make


def as_a_user(user: CallsAs, address: str) -> Make:
    return lambda name, request: user.call(address, name, request, most=1 if name == "WatchHost" else 1000)


def over_the_socket(address: str) -> Make:
    def make(name: str, request: Message) -> Answer:
        with grpc.insecure_channel(address) as channel:
            return call(channel, name, request, most=1 if name == "WatchHost" else 1000)

    return make


@contextlib.contextmanager
def prepared() -> Iterator[tuple[Campaign, list[Caller], list[tuple[Caller, str]]]]:
    """Starts the daemon; yields the admitted callers, and the others with the code that each of their calls gets."""
    authority = Authority()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="access-")))
        write_server_files(folder, authority.issue(dns="localhost"), authority.certificate)
        config = folder / "config.toml"
        config.write_text(SETTINGS.format(vera=VERA, olga=OLGA, folder=folder))
        loopback = free_address("127.0.0.1")
        remote = free_address(socket.gethostbyname(socket.gethostname()))
        if remote.startswith("127."):  # a host that knows itself by loopback only
            remote = free_address("0.0.0.0").replace("0.0.0.0", "127.0.0.1")
        listen = ("--listen", loopback, "--listen", remote.replace("127.0.0.1", "0.0.0.0"))
        daemon = stack.enter_context(running_daemon("--config", str(config), "--agent-deadline", "5s", *listen))
        daemon.root.chmod(0o755)
        agents = {
            uid: stack.enter_context(RemoteAgent(daemon.agent_socket, python=plain_python(uid)))
            for uid in (ADA, BOB, DAEMON, 0)
        }
        privileged = stack.enter_context(RemoteAgent(daemon.agent_socket, prefix=as_user(ADA)))
        for agent in (*agents.values(), privileged):
            agent.do("hello")
        users = {
            "ada": ADA, "bob": BOB, "vera": VERA, "olga": OLGA, "gina": GINA, "daemon": DAEMON,
        }  # fmt: skip
        processes = {
            name: stack.enter_context(CallsAs(uid, groups=[0] if name == "gina" else [])) for name, uid in users.items()
        }
        callers = [Caller("root", "unix", 0, over_the_socket(daemon.address))]
        for via, address in (("unix", daemon.address), ("loopback", loopback)):
            for name, user in processes.items():
                if (via, name) != ("loopback", "gina"):  # the table of connections does not show groups
                    callers.append(Caller(name, via, users[name], as_a_user(user, address)))
        for name, uid in (("daemon", DAEMON), ("viewer", None), ("operator", 0)):
            callers.append(Caller(name, "tls", uid, over_tls(authority, remote, authority.issue(name))))
        bad = {
            "expired": authority.issue("operator", lasts=-DAY),
            "of a stranger": Authority().issue("operator"),
            "none": None,
        }
        outside = [
            (Caller(name, "tls", None, over_tls(authority, remote, pair)), "UNAVAILABLE") for name, pair in bad.items()
        ]
        unmapped = Caller("unmapped", "tls", None, over_tls(authority, remote, authority.issue("mallory")))
        outside.append((unmapped, "PERMISSION_DENIED UNKNOWN_CERTIFICATE"))
        direct = over_the_socket(f"unix:{daemon.agent_socket}.grpc/plain")
        outside.append((Caller("around the front", "unix", None, direct), "UNAUTHENTICATED NOT_IDENTIFIED"))
        outside.append((Caller("without TLS", "tls", None, over_the_socket(remote)), "UNAVAILABLE"))
        yield Campaign(daemon, folder, agents, privileged), callers, outside


def free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def audited(run: Campaign, unheard: int) -> None:
    """Checks that exactly the calls that reached the daemon have a line in the audit log."""
    made = run.calls.total() - unheard

    def lines() -> list[dict[str, object]]:
        text = (run.folder / "audit.jsonl").read_text()
        return [each for each in map(json.loads, text.splitlines()) if each["decision"] != "ended"]

    until(lambda: len(lines()) >= made, "all lines are written")
    found = lines()
    decisions = Counter(f"{line['decision']} {line.get('reason', '')}".strip() for line in found)
    print(f"audit log: {len(found)} lines for {made} calls: " + ", ".join(f"{n} {d}" for d, n in decisions.items()))
    if len(found) != made:
        run.problems.append(f"the audit log has {len(found)} lines for {made} calls")
    if named := [
        line for line in found if line["decision"] == "allowed" and "uid" not in line and "certificate" not in line
    ]:
        run.problems.append(f"{len(named)} lines name nobody, for example {named[0]}")


def main() -> int:
    """Runs the campaign."""
    if os.getuid() != 0:
        print("the users are played by root: run this as root", file=sys.stderr)
        return 2
    with prepared() as (run, callers, outside):
        owners = {
            caller.uid: caller for caller in callers if caller.via == "unix" and caller.uid in (ADA, BOB, DAEMON, 0)
        }
        for caller in callers:
            before, problems = run.calls.total(), len(run.problems)
            about_the_host(run, caller)
            about_processes(run, caller)
            about_captures(run, caller, {uid: each for uid, each in owners.items() if uid is not None})
            wrong = len(run.problems) - problems
            print(f"{caller.via:9s} {caller.name:9s} {run.calls.total() - before:4d} calls, {wrong} wrong", flush=True)
        unheard = 0
        for caller, expected in outside:
            before, problems = run.calls.total(), len(run.problems)
            turned_away(run, caller, expected)
            count = run.calls.total() - before
            unheard += count if expected == "UNAVAILABLE" else 0
            print(f"{caller.via:9s} {caller.name}: {count} calls, {len(run.problems) - problems} not {expected}")
        audited(run, unheard)
    for problem in run.problems:
        print("PROBLEM:", problem)
    print(f"{run.calls.total()} calls, {len(run.problems)} problems")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
