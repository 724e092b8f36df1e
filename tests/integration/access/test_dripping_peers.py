"""Whom the daemon asks and tells answers byte by byte: it stops in time all the same, and says what it left."""

import contextlib
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import ScriptedAgent
from support.peers import api_server as fake
from support.peers.dripping import BODY, HEAD, HTTP2, Dripping, dripping
from support.peers.s3 import credentials
from support.service.daemon import Daemon, free_address, running_daemon, watch_to_end
from support.waiting import scaled

pytestmark = pytest.mark.slow

STOPS_S = 15.0  # half of what systemd and the kubelet give it


@dataclass(frozen=True)
class Peers:
    """All of them."""

    api_server: Dripping
    kubelet: Dripping
    object_store: Dripping
    receiver: Dripping


@pytest.fixture(params=[HEAD, BODY])
def peers(request: pytest.FixtureRequest) -> Iterator[tuple[Daemon, Peers, str, str]]:
    """With a daemon that has them, its address for tokens and that for metrics."""
    tokens, metrics = free_address(), free_address()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(fake.api_server(folder / "cluster"))
        drip = stack.enter_context
        made = Peers(
            drip(dripping(request.param, cluster.folder)),
            drip(dripping(HTTP2, path=folder / "kubelet.sock")),
            drip(dripping(HEAD)),
            drip(dripping(HEAD)),
        )
        environ = {
            **credentials(),
            **cluster.environ,
            "KUBERNETES_SERVICE_PORT": str(made.api_server.port),
            "KINETOD_ACCESS_KUBERNETES": "true",
            "KINETOD_ACCESS_KUBERNETES_LISTEN": tokens,
            "KINETOD_KUBERNETES_NODE_NAME": "node-1",
            "KINETOD_KUBERNETES_ACCOUNT_DIR": str(cluster.account),
            "KINETOD_KUBERNETES_POD_RESOURCES": "true",
            "KINETOD_KUBERNETES_KUBELET_SOCKET": str(folder / "kubelet.sock"),
            "KINETOD_METRICS_LISTEN": metrics,
            "KINETOD_UPLOAD_URL": "s3://bucket/prefix",
            "KINETOD_UPLOAD_ENDPOINT": f"http://127.0.0.1:{made.object_store.port}",
            "KINETOD_HOOKS_WEBHOOK": f"http://127.0.0.1:{made.receiver.port}/",
        }
        yield stack.enter_context(running_daemon(environ=environ)), made, tokens, metrics


def asked(tokens: str, said: list[str]) -> None:
    with grpc.insecure_channel(tokens) as channel:
        stub = ProfilerStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.GetHost(pb.GetHostRequest(), metadata=[("authorization", "Bearer x")], timeout=scaled(60))
        said.append(raised.value.code().name)


def scraped(address: str) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=scaled(30)).close()


def test_the_daemon_stops_in_time_and_says_what_it_left(peers: tuple[Daemon, Peers, str, str]) -> None:
    daemon, dripped_on, tokens, metrics = peers
    said: list[str] = []
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[os.getpid()]), duration_ns=10**9)
        created = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
        agent.capture(samples=10)
        watch_to_end(daemon.stub(), created.id)
    threads = [threading.Thread(target=asked, args=(tokens, said)), threading.Thread(target=scraped, args=(metrics,))]
    asking, scraping = threads
    scraping.start()
    for peer in (dripped_on.kubelet, dripped_on.object_store, dripped_on.receiver):
        assert peer.met.wait(scaled(30))
    asking.start()  # last: the daemon asks the API server for 3 s
    assert dripped_on.api_server.met.wait(scaled(30))
    began = time.monotonic()
    assert daemon.stop() == 0
    took_s = time.monotonic() - began
    for thread in threads:
        thread.join()
    assert took_s < scaled(STOPS_S) and said == ["UNAVAILABLE"], daemon.log()
    assert re.search(rf"hook \S+ of capture {created.id} was cancelled because the daemon is stopping", daemon.log())
    assert f"the upload of capture {created.id} was interrupted because the daemon is stopping" in daemon.log()
