"""Users of Kubernetes trace the pods into which they may exec: a real daemon, an API server of the test's own with
forwarded ports, the official client, and a process in a pod's control group.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.__main__ import main
from support.machine.pod_group import CONTAINER_ID, container_group
from support.peers import api_server as fake
from support.peers.certificates import Authority, write_server_files
from support.service import subjects
from support.service.calls_as import OK, Answer, call
from support.service.cli import Result, environment, run_process
from support.service.daemon import Daemon, free_address, running_daemon
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
POD_UID = f"5a0ddeca-1111-2222-3333-{os.getpid():012x}"  # others may run these tests beside this process
TOKENS = {"ada-s": "ada", "bob-s": "bob"}


@dataclass(frozen=True)
class Node:
    """One node: its API server, its daemon, and a process in the pod training/llama-0, into which ada may exec."""

    cluster: fake.ApiServer
    daemon: Daemon
    tokens: str  # address of the port for tokens
    pid: int

    def call(self, name: str, request: Any, token: str = "ada-s") -> Answer:
        """Over a connection of its own; the token in plain metadata, as any gRPC client can send it.

        Again where the API server, a thread of the tests, was too slow for the daemon.
        """
        metadata = [("authorization", f"Bearer {token}")] if token else []

        def answered() -> Answer | None:
            with grpc.insecure_channel(self.tokens) as channel:
                answer = call(_sending(channel, metadata), name, request)
            late = answer.reason == "KUBERNETES_UNAVAILABLE" and "did not answer within" in answer.message
            return None if late else answer

        return until(answered, f"the API server answers in time to identify {token}")

    def kinetoctl(self, capsys: pytest.CaptureFixture[str], *arguments: str, token: str = "ada-s") -> Result:
        code = main([*arguments, "--kubeconfig", self.cluster.kubeconfig(token)])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def audited(self, call: str) -> list[Any]:
        """The lines of the audit log about a call."""
        lines = [line.partition("{") for line in self.daemon.log().splitlines() if '"call":' in line]
        return [each for each in (json.loads("{" + rest) for _, _, rest in lines) if each["call"] == call]


Details = collections.namedtuple("Details", ("method", "timeout", "metadata"))


class _Sends(grpc.UnaryUnaryClientInterceptor):
    """Adds metadata to calls."""

    def __init__(self, metadata: list[tuple[str, str]]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details = Details(client_call_details.method, client_call_details.timeout, self._metadata)
        return continuation(details, request)


def _sending(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Sends(metadata))


def free_port() -> int:
    return int(free_address().rpartition(":")[2])


def settings(cluster: fake.ApiServer, listen: str) -> str:
    return f"""
[access]
kubernetes = true
kubernetes_listen = "{listen}"
[kubernetes]
node_name = "node-1"
account_dir = "{cluster.account}"
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder, port = tmp_path_factory.mktemp("node"), free_port()
    with fake.api_server(folder / "cluster") as cluster, container_group(POD_UID) as enter:
        cluster.users = {token: {"username": name, "groups": ["ml"]} for token, name in TOKENS.items()}
        cluster.execs = {("ada", "training", "llama-0")}
        cluster.pods = [
            fake.pod("llama-0", uid=POD_UID),
            fake.pod("waiting", phase="Pending"),
            fake.kinetod(tokens=port),
        ]
        cluster.pods[0]["metadata"]["labels"] = {"job-name": "llama"}
        cluster.addresses["kinetod-node-1", port] = ("127.0.0.1", port)
        (folder / "config.toml").write_text(settings(cluster, f"127.0.0.1:{port}"))
        options = ("--config", str(folder / "config.toml"))
        with subjects.python("import threading") as pid, running_daemon(*options, environ=cluster.environ) as daemon:
            enter(pid)
            yield Node(cluster, daemon, f"127.0.0.1:{port}", pid)


def forwards() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Kubernetes port forward")]


@pytest.fixture(autouse=True)
def calm(node: Node) -> Iterator[None]:
    yield
    until(lambda: not forwards(), "the client's connections are closed")
    node.cluster.forbidden.clear()
    node.cluster.silent = False


def spec(*pids: int) -> pb.CreateCaptureRequest:
    return pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=pb.Selector(pids=pids), duration_ns=50_000_000))


def test_a_user_sees_and_traces_the_processes_of_a_pod_to_exec_into_and_nothing_else(node: Node) -> None:
    request = pb.ListProcessesRequest(include_without_agent=True, selector=pb.Selector(helpers=True))

    def named() -> Any:
        (process,) = node.call("ListProcesses", request).only.processes
        return process.pod_name and process  # a list waits half a second for names

    process = until(named, "the API server has said the name of the pod")
    found = (process.pid, process.pod_uid, process.container_id, process.pod_namespace, process.pod_name)
    assert found == (node.pid, POD_UID, CONTAINER_ID, "training", "llama-0")
    assert node.call("CreateCapture", spec(os.getpid())).reason == "NOT_YOUR_PROCESS"
    assert node.call("ListProcesses", request, token="bob-s").only.processes == []
    assert node.call("CreateCapture", spec(node.pid), token="bob-s").reason == "NOT_YOUR_PROCESS"
    assert node.call("GetHost", pb.GetHostRequest(), token="bob-s").code == OK


@pytest.mark.parametrize(("token", "text"), [("", "the call has none"), ("stolen", "did not accept this token")])
def test_whoever_shows_no_good_token_is_nobody_even_on_loopback(node: Node, token: str, text: str) -> None:
    answer = node.call("GetHost", pb.GetHostRequest(), token=token)
    assert (answer.code, answer.reason) == ("UNAUTHENTICATED", "NOT_IDENTIFIED")
    assert text in answer.message


def test_a_token_means_nothing_where_callers_are_known_by_the_kernel(node: Node) -> None:
    with grpc.insecure_channel(node.daemon.address) as channel:
        answer = call(_sending(channel, [("authorization", "Bearer bob-s")]), "ListCaptures", pb.ListCapturesRequest())
    assert answer.code == OK
    assert node.audited("ListCaptures")[-1]["via"] == "unix"


def test_pods_that_are_named_and_may_not_be_entered_are_refused_with_what_is_missing(node: Node) -> None:
    request = pb.ListProcessesRequest(selector=pb.Selector(pod_uids=[POD_UID]))
    answer = node.call("ListProcesses", request, token="bob-s")
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "POD_EXEC_NEEDED")
    assert "the Kubernetes user bob is not allowed to create pods/exec on this pod" in answer.message
    line = node.audited("ListProcesses")[-1]
    assert (line["user"], line["decision"], line["reason"]) == ("bob", "denied", "POD_EXEC_NEEDED")


def test_an_api_server_that_refuses_is_a_refusal_that_says_so(node: Node) -> None:
    node.cluster.forbidden.add((fake.ACCOUNT, "tokenreviews"))
    node.cluster.users["new"] = {"username": "carol"}
    answer = node.call("GetHost", pb.GetHostRequest(), token="new")
    assert (answer.code, answer.reason) == ("PERMISSION_DENIED", "KUBERNETES_UNAVAILABLE")
    assert "denied kinetod's account access to tokenreviews" in answer.message


def traced(result: Result) -> list[tuple[str, list[Any]]]:
    """The verdicts by host."""
    assert result.code == 0, result.stderr
    hosts = result.json()["hosts"]
    return [(host["host"], [each["verdict"] for each in host["capture"]["targets"]]) for host in hosts]


def test_kubectl_kineto_traces_a_pod_with_the_kubeconfig_alone(node: Node, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from kinetoctl.kubectl import main; sys.exit(main())"]
    arguments = ["trace", "training/llama-0", "--command", "threading", "--duration", "100ms", "-o", "json"]
    environ = environment(KUBECONFIG=node.cluster.kubeconfig("ada-s"))
    done = subprocess.run(
        [*command, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60)
    )
    assert traced(Result(done.returncode, done.stdout, done.stderr)) == [("node-1", ["VERDICT_DONE"])]
    assert list(tmp_path.glob("**/*.json.gz"))
    (line,) = [each for each in node.audited("CreateCapture") if each.get("selector", {}).get("pod_uids")]
    assert line["decision"] == "allowed"
    assert (line["via"], line["user"], line["roles"]) == ("kubernetes", "ada", ["pods"])
    assert line["owner_uid"] >= 1 << 31  # no user of this host; which number depends on who came first
    assert line["selector"]["pod_uids"] == [POD_UID] and line["targets"][0]["pid"] == node.pid


def test_captures_belong_to_the_user_who_made_them(node: Node) -> None:
    capture = node.call("CreateCapture", spec(node.pid)).only.id
    request = pb.GetCaptureRequest(id=capture)
    assert node.call("GetCapture", request).code == OK
    assert node.call("GetCapture", request, token="bob-s").reason == "NO_SUCH_CAPTURE"
    assert [each.id for each in node.call("ListCaptures", pb.ListCapturesRequest(), token="bob-s").only.captures] == []
    assert node.call("CancelCapture", pb.CancelCaptureRequest(id=capture), token="bob-s").reason == "NO_SUCH_CAPTURE"
    assert node.call("CancelCapture", pb.CancelCaptureRequest(id=capture)).code == OK


def test_ps_shows_the_pods_of_a_selector_by_name(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    def named() -> Result | None:
        found = node.kinetoctl(capsys, "ps", "--kube", "training", "-l", "job-name=llama", "--all")
        assert found.code == 0, found.stderr
        return found if "POD" in found.stdout else None

    result = until(named, "the API server has said the name of the pod")
    head, row = (line.split() for line in result.stdout.splitlines())
    assert (head[0], head[-2], row[0]) == ("HOST", "POD", "node-1")
    assert "training/llama-0" in row


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--kube", "training/gone"], 3, 'pods "gone" not found'),
        (["--kube", "training/waiting"], 5, "the pod training/waiting is not running: it is Pending"),
        (["--kube", "training", "-l", "a=b"], 3, "no pod in the namespace training has the labels a=b"),
        (["--kube", "training"], 2, "name a pod (NAMESPACE/POD) or select pods by their labels"),
        (["-l", "a=b"], 2, "add --kube NAMESPACE"),
        (["--kube", "training/llama-0", "--kube-context", "no"], 5, "the kubeconfig cannot be used"),
        (["--kube", "training/llama-0", "--kinetod-namespace", "other"], 7, "kinetod is not running on node-1"),
    ],
)
def test_what_cannot_be_found_is_said_with_what_to_do(
    node: Node, arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = node.kinetoctl(capsys, "ps", *arguments)
    assert (result.code, text in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("pods/llama-0", "get the pod training/llama-0"),
        ("namespaces/kineto/pods", "list pods in the namespace kineto"),
        ("portforward", "forward ports to kineto/kinetod-node-1 (pods/portforward)"),
    ],
)
def test_what_kubernetes_forbids_is_named_with_the_role_that_is_missing(
    node: Node, path: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.cluster.forbidden.add(("ada", path))
    result = node.kinetoctl(capsys, "ps", "--kube", "training/llama-0")
    assert result.code == 6, result.stderr
    assert f"Kubernetes does not let you {what}" in result.stderr and "kinetod-client" in result.stderr


def test_a_user_without_a_token_is_told_so(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    path = node.cluster.folder / "certificate-only"
    text = Path(node.cluster.kubeconfig("ada-s")).read_text()
    path.write_text(text.replace("token: ada-s", "username: ada\n    password: x"))
    node.cluster.users["Basic YWRhOng="] = {"username": "ada"}
    code = main(["ps", "--kube", "training/llama-0", "--kubeconfig", str(path)])
    assert (code, "has no token" in capsys.readouterr().err) == (5, True)


def test_a_user_who_may_not_exec_is_refused_by_the_daemon(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("trace", "--kube", "training/llama-0", "--duration", "100ms", "--output-dir", str(tmp_path))
    result = node.kinetoctl(capsys, *arguments, token="bob-s")
    assert result.code != 0 and "POD_EXEC_NEEDED" in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []


def test_over_the_network_tokens_need_tls_and_no_certificate_of_the_client(node: Node, tmp_path: Path) -> None:
    authority, port = Authority(), free_port()
    write_server_files(tmp_path, authority.issue(dns="localhost"), authority.certificate)
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_client_ca": "clients.pem"}
    tls = "".join(f'{key} = "{tmp_path / name}"\n' for key, name in files.items())
    (tmp_path / "config.toml").write_text(
        settings(node.cluster, f"0.0.0.0:{port}").replace("[kubernetes]", f"{tls}[kubernetes]")
    )
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    (tmp_path / "token").write_text("ada-s\n")
    environ = environment(
        KINETO_TLS_CA=str(tmp_path / "ca.pem"), KINETO_TLS_NAME="localhost", KINETO_TOKEN_FILE=str(tmp_path / "token")
    )
    with running_daemon("--config", str(tmp_path / "config.toml"), environ=node.cluster.environ) as daemon:
        found = run_process(["--address", f"127.0.0.1:{port}", "ps", "--all", "-o", "json"], environ)
        assert [process["pid"] for process in found.json()] == [node.pid], (found.stderr, daemon.log())
        with authority.channel(f"127.0.0.1:{port}", None) as channel:
            assert call(channel, "GetHost", pb.GetHostRequest()).reason == "NOT_IDENTIFIED"


# one user of forwarded ports beside another

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
GET_HOST = "/kineto.v1.Profiler/GetHost"


@contextlib.contextmanager
def held_calls(node: Node, token: str, *, connections: int, streams: int) -> Iterator[None]:
    """Calls whose request never comes."""
    never = threading.Event()

    def nothing() -> Iterator[Any]:
        never.wait()
        yield from ()

    with contextlib.ExitStack() as stack:
        stack.callback(never.set)
        metadata = (("authorization", f"Bearer {token}"),)
        for _ in range(connections):
            channel = stack.enter_context(grpc.insecure_channel(node.tokens, options=OWN_CONNECTION))
            with contextlib.suppress(grpc.FutureTimeoutError):  # it was refused
                grpc.channel_ready_future(channel).result(2)
            for _ in range(streams):
                stack.callback(channel.stream_stream(GET_HOST)(nothing(), metadata=metadata).cancel)
        yield


@pytest.mark.parametrize("token", ["stolen", "ada-s", ""])
def test_who_holds_all_calls_over_forwarded_ports_keeps_no_other_user_out(node: Node, token: str) -> None:
    with held_calls(node, token, connections=4, streams=32):
        assert node.call("GetHost", pb.GetHostRequest(), token="bob-s").code == OK


@pytest.mark.parametrize("token", ["stolen", "ada-s", ""])
def test_who_holds_all_connections_over_forwarded_ports_keeps_no_other_user_out(node: Node, token: str) -> None:
    with held_calls(node, token, connections=70, streams=1):
        assert node.call("GetHost", pb.GetHostRequest(), token="bob-s").code == OK
