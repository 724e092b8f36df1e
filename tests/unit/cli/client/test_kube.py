"""Pods as places: the official client, asked through an API server of the test's own."""

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.client import kube
from kinetoctl.client.host_targets import PlaceOptions, places
from kinetoctl.client.kube import TUNNELS, Cluster, KubeOptions, KubePlace, kube_places, parse_kube
from kinetoctl.errors import KubeFailed, NoKinetod, NoSuchPod, PodNotRunning
from kinetoctl.kubectl import complete
from kinetoctl.kubectl import main as kubectl_kineto
from kubernetes.config import incluster_config
from support.peers import api_server as fake
from support.peers.dripping import BODY, HANDSHAKE, HEAD, dripping
from support.waiting import scaled, until

TOKEN = "ada-s"
CERTIFICATES = {"KINETO_TLS_CA": "/etc/ca.pem"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[fake.ApiServer]:
    with fake.api_server(tmp_path / "cluster") as server:
        server.users[TOKEN] = {"username": "ada"}
        for number in range(3):
            server.pods.append(fake.pod(f"llama-{number}", uid=f"u{number}", node=f"node-{number % 2}"))
            server.pods[-1]["metadata"]["labels"] = {"job-name": "llama"}
        server.pods += [fake.kinetod(f"node-{number}", grpc=50051, tokens=50052) for number in range(2)]
        yield server
        TUNNELS.close()
        until(lambda: not forwards(), "the client's connections are closed")


def forwards() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Kubernetes port forward")]


def found(
    cluster: fake.ApiServer, *targets: str, environ: dict[str, str] = CERTIFICATES, **options: Any
) -> tuple[list[KubePlace], list[str]]:
    """By certificates, unless said otherwise: nothing is connected then."""
    notes: list[str] = []
    made = KubeOptions(
        targets=tuple(map(parse_kube, targets)), kubeconfig=cluster.kubeconfig(TOKEN, namespace="training"), **options
    )
    return kube_places(made, notes.append, environ=environ, tunnels=TUNNELS), notes


def brief(places: list[KubePlace]) -> list[tuple[str, str, list[str]]]:
    return [(place.node, place.address, list(place.selector.pod_uids)) for place in places]


@pytest.mark.parametrize("text", ["", "a/", "/b", "a/b/c", "Training/x", "a b/c", "-a"])
def test_what_is_no_pod_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAMESPACE/POD"):
        parse_kube(text)


def test_pods_of_one_node_are_one_place(cluster: fake.ApiServer) -> None:
    everything = [("node-0", "10.0.0.9:50051", ["u0", "u2"]), ("node-1", "10.0.0.9:50051", ["u1"])]
    by_labels, notes = found(cluster, "training", selector="job-name=llama")
    assert (brief(by_labels), notes) == (everything, [])
    by_name, _ = found(cluster, *(f"training/llama-{number}" for number in (2, 1, 0, 0)))
    assert brief(by_name) == everything


def test_long_lists_come_in_pages(cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "PAGE", 1)
    assert len(found(cluster, "training", selector="job-name=llama")[0]) == 2
    assert len(cluster.asked("namespaces/training/pods")) == 3


def test_an_ipv6_address_is_in_brackets(cluster: fake.ApiServer) -> None:
    for each in cluster.pods:
        each["status"]["podIP"] = "fd00::9"
    assert found(cluster, "training/llama-1")[0][0].address == "[fd00::9]:50051"


def test_pods_that_do_not_run_are_left_out_of_a_selection_and_refused_by_name(cluster: fake.ApiServer) -> None:
    cluster.pods[0]["status"]["phase"] = "Succeeded"
    made, notes = found(cluster, "training", selector="job-name=llama")
    assert brief(made)[0] == ("node-0", "10.0.0.9:50051", ["u2"])
    assert notes == ["left out because they are not running: training/llama-0"]
    with pytest.raises(PodNotRunning, match="training/llama-0 is not running: it is Succeeded"):
        found(cluster, "training/llama-0")


def test_a_pod_that_is_being_deleted_does_not_run(cluster: fake.ApiServer) -> None:
    cluster.pods[0]["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    with pytest.raises(PodNotRunning, match="it is Terminating"):
        found(cluster, "training/llama-0")


def test_no_pod_is_told(cluster: fake.ApiServer) -> None:
    with pytest.raises(NoSuchPod, match="no pod in the namespace training has the labels a=b"):
        found(cluster, "training", selector="a=b")


def test_a_node_without_kinetod_is_a_place_where_nobody_answers(cluster: fake.ApiServer) -> None:
    cluster.pods[-1]["status"]["phase"] = "Failed"
    made, notes = found(cluster, "training", selector="job-name=llama")
    assert made[1].node == "node-1" and made[1].address.startswith("unix:/")
    assert notes[0].startswith(
        "kinetod is not running on node-1, where training/llama-1 is; `kubectl -n kineto get pods"
    )
    with pytest.raises(NoKinetod, match="kinetod is not running on node-1"):
        found(cluster, "training/llama-1")


def test_a_pod_that_a_user_labels_as_kinetods_is_not_asked(cluster: fake.ApiServer) -> None:
    false = fake.kinetod("node-0", grpc=50051, tokens=50052)
    false["metadata"]["namespace"], false["status"]["podIP"] = "training", "10.0.0.66"
    cluster.pods.append(false)
    places, _ = found(cluster, "training/llama-0")
    assert [place.address for place in places] == ["10.0.0.9:50051"]


def test_a_kinetod_that_is_not_ready_is_told(cluster: fake.ApiServer) -> None:
    cluster.pods[-2:] = [fake.kinetod(f"node-{number}", ready=False, grpc=50051) for number in range(2)]
    _, notes = found(cluster, "training/llama-0")
    assert notes == [
        "kinetod on node-0 (kineto/kinetod-node-0) is not ready; see `kubectl -n kineto logs kinetod-node-0`"
    ]


@pytest.mark.parametrize(
    ("environ", "port", "component"), [(CERTIFICATES, "grpc", "remote"), ({}, "tokens", "permission")]
)
def test_a_component_that_is_missing_is_named(
    cluster: fake.ApiServer, environ: dict[str, str], port: str, component: str
) -> None:
    cluster.pods[-2:] = [fake.kinetod(f"node-{number}") for number in range(2)]
    with pytest.raises(NoKinetod, match=f"no port '{port}': it was installed without components/{component}"):
        found(cluster, "training/llama-0", environ=environ)


def test_hosts_and_pods_are_places_together(cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_TLS_CA", "/etc/ca.pem")
    options = PlaceOptions(
        hosts=("login1",), kube=(parse_kube("training/llama-1"),), kubeconfig=cluster.kubeconfig(TOKEN)
    )
    assert [(place.host, place.address) for place in places(options, print)] == [
        ("login1", "login1:50051"),
        ("node-1", "10.0.0.9:50051"),
    ]


def test_in_a_pod_its_own_account_is_taken(
    cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(cluster.account / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(cluster.account / "ca.crt"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(Cluster(None, None, {})) as found:
        assert (found.pod("training", "llama-1").uid, found.token()) == ("u1", fake.ACCOUNT_TOKEN)


def test_an_api_server_that_is_not_there_is_said(cluster: fake.ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(Path(cluster.kubeconfig(TOKEN)).read_text().replace(str(cluster.port), "9"))
    options = KubeOptions(targets=(parse_kube("training/llama-0"),), kubeconfig=str(path))
    with pytest.raises(KubeFailed, match=r"no usable answer from the API server \(https://127.0.0.1:9\): "):
        kube_places(options, print)


@pytest.mark.parametrize("said", [HANDSHAKE, HEAD, BODY])
def test_an_api_server_that_answers_byte_by_byte_is_given_up(
    cluster: fake.ApiServer, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "ANSWER_S", 0.5)
    with dripping(said, cluster.folder if said is not HANDSHAKE else None) as server:
        began, cluster.port = time.monotonic(), server.port
        with pytest.raises(KubeFailed, match=r"no usable answer from .*: the call did not finish within 0.5 s"):
            found(cluster, "training/llama-0")
        assert time.monotonic() - began < scaled(10)


def test_an_answer_without_an_end_is_not_kept(cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "MAX_ANSWER_BYTES", 100)
    with pytest.raises(KubeFailed, match=r"no usable answer from .*: its answer has more than 100 bytes"):
        found(cluster, "training/llama-0")


def test_a_list_that_always_goes_on_is_given_up(cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "PAGE", 0)  # so many pods are on each
    monkeypatch.setattr(kube, "LIST_S", 0.5)
    with pytest.raises(KubeFailed, match=r"cannot list pods .* the list was not complete after 0.5 s"):
        found(cluster, "training", selector="job-name=llama")


def test_an_api_server_that_forwards_nothing_is_given_up(
    cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Cluster.forward

    def impatient(*arguments: Any) -> socket.socket:
        monkeypatch.setattr(kube, "ANSWER_S", 0.5)  # from now on: what is asked before is answered
        return forward(*arguments)

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Cluster, "forward", impatient)
    monkeypatch.setattr(cluster, "_forward", silent)
    with pytest.raises(
        KubeFailed, match=r"cannot forward ports to kineto/kinetod-node-0 .*: no usable answer from the API server"
    ):
        found(cluster, "training/llama-0", environ={})


def test_without_the_client_the_extra_is_named(cluster: fake.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(KubeFailed, match=r"pip install kubernetes"):
        found(cluster, "training/llama-0")


# ---------------------------------------------------------------- forwarded ports


def echo() -> socket.socket:
    """A listener that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(peer,), daemon=True).start()

    def answer(peer: socket.socket) -> None:
        with peer:
            while data := peer.recv(1 << 16):
                peer.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def talk(address: str, data: bytes) -> bytes:
    """What comes back for it, until all of it has, or the other end has gone."""
    received = b""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(scaled(30))
        sock.connect(address.removeprefix("unix:"))

        def send() -> None:
            with contextlib.suppress(OSError):
                sock.sendall(data)

        threading.Thread(target=send, daemon=True).start()
        while len(received) < len(data) and (more := sock.recv(1 << 16)):
            received += more
    return received


def test_a_forwarded_port_carries_megabytes_both_ways_over_several_connections(cluster: fake.ApiServer) -> None:
    data = bytes(range(256)) * 8192
    with echo() as listener:
        cluster.addresses["kinetod-node-0", 50052] = listener.getsockname()
        (place,), notes = found(cluster, "training/llama-0", environ={})
        assert [talk(place.address, data) == data for _ in range(2)] == [True, True]
        listener.shutdown(socket.SHUT_RDWR)
    assert notes == [] and Path(place.address.removeprefix("unix:")).parent.stat().st_mode & 0o077 == 0


def test_a_port_that_cannot_be_forwarded_later_is_told(cluster: fake.ApiServer) -> None:
    (place,), notes = found(cluster, "training/llama-0", environ={})
    assert talk(place.address, b"x") == b""  # nobody listens in the pod
    cluster.forbidden.add(("ada", "portforward"))
    assert talk(place.address, b"x") == b""
    (note,) = notes
    assert note.startswith("node-0: Kubernetes does not let you forward ports to kineto/kinetod-node-0")


# ---------------------------------------------------------------- kubectl kineto


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["training/llama-7"], "training/pods/llama-7"),
        (["pod/llama-7"], "training/pods/llama-7"),  # the context's namespace
        (["-n", "other", "llama-7"], "other/pods/llama-7"),
        (["-n", "other", "-l", "a=b"], "other/pods"),
        (["-l", "a=b"], "training/pods"),
    ],
)
def test_kubectl_s_ways_to_name_pods_are_taken(
    cluster: fake.ApiServer, arguments: list[str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-kineto", "ps", *arguments])
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig(TOKEN, namespace="training"))
    assert kubectl_kineto() == 3
    assert cluster.requests[-1][1] == f"/api/v1/namespaces/{asked}"


def test_kubectl_kineto_without_pods_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-kineto", "trace"])
    assert kubectl_kineto() == 2
    assert "no pod is selected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["trace"]),
        (["sta"], ["stacks"]),
        (["trace", "--dur"], ["--duration"]),
        (["ps", "--names"], ["--namespace"]),
        (["x", "y"], []),
    ],
)
def test_kubectl_completes_commands_and_options(
    words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(words) == 0
    assert capsys.readouterr().out.split() == [*offered, ":4"]
