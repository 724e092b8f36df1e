"""Containers and pods by recorded control groups."""

import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.processes import containers
from kinetod.processes.containers import Container, Names, container_in, container_of, names_in, names_of, pod_in

DATA = Path(__file__).parents[3] / "data/cgroups"
ID = "4f6d0c1e9b3a57820d1c4e6f8a9b0c2d3e4f5061728394a5b6c7d8e9f0a1b2c3"
POD = "8f2c1a34-9b7e-4d21-a0c5-3e6f7d8b9012"
EXPECTED = {
    "v1-containerd-cgroupfs": Container(id=ID, pod_uid=POD),
    "v1-containerd-mixed-drivers": Container(id=ID, runtime="containerd", pod_uid=POD),
    "v1-docker": Container(id=ID, runtime="docker"),
    "v1-docker-kubernetes": Container(id=ID, runtime="docker", pod_uid=POD),
    "v1-slurm-job": None,
    "v2-containerd-systemd": Container(id=ID, runtime="containerd", pod_uid=POD),
    "v2-crio-guaranteed": Container(id=ID, runtime="cri-o", pod_uid=POD),
    "v2-docker-in-pod": Container(id=ID, runtime="containerd", pod_uid=POD),
    "v2-docker-systemd": Container(id=ID, runtime="docker"),
    "v2-kind-node": Container(id=ID, runtime="containerd", pod_uid=POD),
    "v2-login-session": None,
    "v2-pod-sandbox-group": Container(pod_uid=POD),
    "v2-podman-conmon": None,
    "v2-podman-rootless": Container(id=ID, runtime="podman"),
    "v2-sibling-in-cgroup-namespace": Container(id=ID, runtime="containerd"),
    "v2-static-pod": Container(id=ID, runtime="containerd", pod_uid="0f1e2d3c4b5a69788796a5b4c3d2e1f0"),
}


def test_every_recorded_control_group_has_an_expectation() -> None:
    assert {path.name for path in DATA.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_container_and_pod_of_a_control_group(name: str) -> None:
    assert container_in((DATA / name).read_text()) == EXPECTED[name]


@pytest.mark.parametrize(
    "text",
    ["", "\0", "0::", "0::/", f"0::/{ID[:63]}", f"0::/{ID}0", f"0::/cri-containerd-{ID}.scope.old", "0::/podium"],
)
def test_what_only_looks_like_a_container_is_none(text: str) -> None:
    assert container_in(text) is None


def test_the_control_group_of_a_process_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text((DATA / "v2-containerd-systemd").read_text())
    assert container_of(7, tmp_path) == EXPECTED["v2-containerd-systemd"]
    assert container_of(8, tmp_path) is None


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (
            {"POD_NAME": "train-0", "POD_NAMESPACE": "ml", "CONTAINER_NAME": "main"},
            Names(pod="train-0", namespace="ml", container="main"),
        ),
        ({"HOSTNAME": "train-0"}, Names(pod="train-0")),
        ({"HOSTNAME": "node7"}, Names()),
        ({"POD_NAME": 'x"} evil 1', "HOSTNAME": "train-0"}, Names(pod="train-0")),
        ({"POD_NAME": "UPPER", "POD_NAMESPACE": "a" * 300}, Names()),
        ({}, Names()),
    ],
)
def test_names_come_from_variables_that_hold_kubernetes_names(environ: dict[str, str], names: Names) -> None:
    assert names_in(environ, "node7") == names


def test_names_are_read_from_a_real_process() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    environ = {"POD_NAME": "train-0", "POD_NAMESPACE": "ml"}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert names_of(process.pid, "node7") == Names(pod="train-0", namespace="ml")
        process.stdin.close()
    assert names_of(process.pid, "node7") == Names()


def test_a_real_process_has_what_its_control_group_says() -> None:
    assert container_of(1) == container_in(containers.read_cgroups(1))


# ---------------------------------------------------------------- the pod, for decisions


@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("v1-containerd-cgroupfs", POD),
        ("v1-docker-kubernetes", POD),
        ("v2-containerd-systemd", POD),
        ("v2-crio-guaranteed", POD),
        ("v2-docker-in-pod", POD),
        ("v2-pod-sandbox-group", POD),
        ("v2-static-pod", "0f1e2d3c4b5a69788796a5b4c3d2e1f0"),
        # A runtime with another driver than its kubelet's: its groups are not where the kubelet makes them.
        ("v1-containerd-mixed-drivers", ""),
        ("v2-kind-node", ""),  # the node is a container itself, with the host's processes beside it
        ("v1-docker", ""),
        ("v2-login-session", ""),
        ("v1-slurm-job", ""),
    ],
)
def test_a_process_is_in_the_pod_that_the_kubelet_has_made(name: str, pod: str) -> None:
    assert pod_in((DATA / name).read_text()) == pod


MINE, OTHER = "11111111-2222-3333-4444-555555555555", "99999999-8888-7777-6666-555555555555"
SLICE = f"kubepods-burstable-pod{OTHER.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("cgroups", "pod"),
    [
        # from the daemon's own pod, in a control group namespace of its own
        (f"0::/../../{SLICE}/cri-containerd-{'4f' * 32}.scope\n", OTHER),
        (f"0::/../../../kubepods-pod{OTHER.replace('-', '_')}.slice/crio-{'4f' * 32}.scope\n", OTHER),
        (f"0::/../../../besteffort/pod{OTHER}/{'4f' * 32}\n", OTHER),
        (f"0::/../../pod{OTHER}/{'4f' * 32}\n", OTHER),
        # folders that a user was given, or a container has made
        (f"0::/user.slice/user-1000.slice/user@1000.service/kubepods.slice/{SLICE}/x\n", ""),
        (f"0::/../../../../user.slice/user-1000.slice/{SLICE}\n", ""),
        (f"0::/kubepods/burstable/pod{MINE}/{'4f' * 32}/kubepods/burstable/pod{OTHER}\n", MINE),
        (f"0::/kubepods/burstable/x/y/pod{OTHER}\n", ""),
        (f"0::/kubepodsx/pod{OTHER}\n", ""),
        # controllers that do not agree
        (f"2:pids:/kubepods/pod{MINE}/a\n1:name=systemd:/kubepods/pod{OTHER}/b\n", ""),
        ("", ""),
    ],
)
def test_what_others_may_have_made_is_no_pod(cgroups: str, pod: str) -> None:
    assert pod_in(cgroups) == pod
