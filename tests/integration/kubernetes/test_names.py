"""Pods by name: a real daemon with a kubelet of the test's own, GPUs of the fake NVML, and a process in a pod's control
group.
"""

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.kubernetes.pod_names import ContainerRef
from support.machine.gpus import FakeGpus
from support.machine.pod_group import CONTAINER_ID, container_group
from support.peers.kubelet import pod, running_kubelet
from support.service import subjects
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
POD_UID = f"6b1eeca1-1111-2222-3333-{os.getpid():012x}"
LLAMA, IDLE = ContainerRef("ml", "llama-0", "trainer"), ContainerRef("ml", "notebook", "jupyter")


UUIDS = [f"GPU-00000000-0000-0000-0000-{index:012}" for index in range(2)]  # the fake's


def page(daemon: Daemon) -> str:
    found = re.search(r"metrics on http://(127\.0\.0\.1:\d+)/metrics", daemon.log())
    assert found, daemon.log()
    with urllib.request.urlopen(f"http://{found[1]}/metrics", timeout=scaled(30)) as answer:
        text: str = answer.read().decode()
    return text


def labels(daemon: Daemon, family: str) -> list[dict[str, str]]:
    """Of each series, by GPU."""
    lines = [line for line in page(daemon).splitlines() if line.startswith(f"{family}{{")]
    return [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """llama-0 works on GPU 0; the notebook was given GPU 1 and does nothing."""
    gpus, socket = FakeGpus(tmp_path), tmp_path / "pod-resources/kubelet.sock"
    held = [pod(holder, "nvidia.com/gpu", uuid) for holder, uuid in zip((LLAMA, IDLE), UUIDS, strict=True)]
    environ = {
        **gpus.environ, "KINETOD_METRICS_LISTEN": "127.0.0.1:0", "KINETOD_KUBERNETES_POD_RESOURCES": "true",
        "KINETOD_KUBERNETES_KUBELET_SOCKET": str(socket),
    }  # fmt: skip
    with running_kubelet(socket, *held), container_group(POD_UID) as enter, subjects.python() as pid:
        enter(pid)
        gpus.say(f"process 0 {pid} 500 33")
        with running_daemon(environ=environ) as started:
            yield started


def test_gpus_have_the_names_of_the_containers_that_hold_them_used_or_not(daemon: Daemon) -> None:
    def named() -> list[tuple[str, str, str]]:
        return [(each["namespace"], each["pod"], each["container"]) for each in labels(daemon, "kineto_gpu_up")]

    until(lambda: named() == [("ml", "llama-0", "trainer"), ("ml", "notebook", "jupyter")], "the kubelet has said it")
    until(lambda: labels(daemon, "kineto_gpu_container_info"), "the process has been looked at")
    (info,) = labels(daemon, "kineto_gpu_container_info")
    found = (info["pod"], info["container"], info["container_id"], info["pod_uid"])
    assert found == ("llama-0", "trainer", CONTAINER_ID, POD_UID)
