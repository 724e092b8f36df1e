"""Which containers use which GPUs, with recorded control groups in a folder that stands for /proc."""

import os
from pathlib import Path

from kinetod.gpus.gpu_owners import ContainerOwners, GpuContainer
from kinetod.gpus.gpu_types import GpuProcess, GpuState, Snapshot
from kinetod.kubernetes.pod_names import ContainerRef
from support.waiting import scaled

DATA = Path(__file__).parents[3] / "data/cgroups"
ID = "4f6d0c1e9b3a57820d1c4e6f8a9b0c2d3e4f5061728394a5b6c7d8e9f0a1b2c3"
POD = "8f2c1a34-9b7e-4d21-a0c5-3e6f7d8b9012"
IN_POD = GpuContainer(pod="train-0", namespace="ml", container_id=ID, runtime="containerd", pod_uid=POD)


def process(proc: Path, pid: int, cgroup: str, environ: str = "") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text((DATA / cgroup).read_text())
    (folder / "environ").write_text(environ)


def snapshot(**pids: tuple[int, ...]) -> Snapshot:
    return Snapshot(
        gpus=tuple(
            GpuState(vendor="nvidia", index=0, uuid=uuid, name="H200", processes=tuple(GpuProcess(pid=p) for p in each))
            for uuid, each in pids.items()
        )
    )


def test_processes_of_one_pod_are_one_owner_and_those_of_the_host_none(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd", "POD_NAME=train-0\0POD_NAMESPACE=ml\0")
    process(tmp_path, 8, "v2-containerd-systemd", "POD_NAME=train-0\0POD_NAMESPACE=ml\0")
    process(tmp_path, 9, "v2-login-session", "POD_NAME=nonsense\0")
    owners = ContainerOwners("node7", proc=tmp_path, deadline_s=scaled(20))
    assert owners(snapshot(a=(7, 8, 9), b=(9, 10), c=())) == {"a": [IN_POD]}


def test_variables_count_in_pods_only(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-docker-systemd", "POD_NAME=train-0\0HOSTNAME=4f6d0c1e9b3a\0")
    assert ContainerOwners("node7", proc=tmp_path)(snapshot(a=(7,))) == {
        "a": [GpuContainer(container_id=ID, runtime="docker")]
    }


def test_names_are_read_once_for_a_container_and_forgotten_with_it(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd", "POD_NAME=train-0\0POD_NAMESPACE=ml\0")
    owners = ContainerOwners("node7", proc=tmp_path, deadline_s=scaled(20))
    assert owners(snapshot(a=(7,))) == {"a": [IN_POD]}
    (tmp_path / "7/environ").write_text("POD_NAME=other\0POD_NAMESPACE=ml\0")
    assert owners(snapshot(a=(7,))) == {"a": [IN_POD]}
    assert owners(snapshot(a=())) == {}
    assert owners(snapshot(a=(7,)))["a"][0].pod == "other"


def test_a_process_that_lets_its_reader_wait_costs_the_names_only(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd")
    (tmp_path / "7/environ").unlink()
    os.mkfifo(tmp_path / "7/environ")  # opening it waits for somebody who writes
    owners = ContainerOwners("node7", proc=tmp_path, deadline_s=0.01)
    nameless = GpuContainer(container_id=ID, runtime="containerd", pod_uid=POD)
    assert owners(snapshot(a=(7,))) == {"a": [nameless]}
    assert owners(snapshot(a=(7,))) == {"a": [nameless]}
    with (tmp_path / "7/environ").open("w") as file:
        file.write("POD_NAME=train-0\0")


TRAINER = ContainerRef("ml", "llama-0", "trainer")
OTHER = ContainerRef("ml", "mistral-0", "main")
BY_KUBELET = GpuContainer(
    pod="llama-0", namespace="ml", container="trainer", container_id=ID, runtime="containerd", pod_uid=POD
)


def test_the_kubelets_word_counts_more_than_the_variables(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd", "POD_NAME=anything\0POD_NAMESPACE=else\0")
    owners = ContainerOwners("node7", held=lambda: {"a": (TRAINER,)}, proc=tmp_path)
    assert owners(snapshot(a=(7,))) == {"a": [BY_KUBELET]}


def test_a_gpu_that_is_held_and_not_used_has_an_owner(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd")
    owners = ContainerOwners("node7", held=lambda: {"a": (TRAINER,), "b": (TRAINER,), "c": (OTHER,)}, proc=tmp_path)
    idle = GpuContainer(pod="llama-0", namespace="ml", container="trainer")
    other = GpuContainer(pod="mistral-0", namespace="ml", container="main")
    assert owners(snapshot(a=(7,), b=(), c=())) == {"a": [BY_KUBELET], "b": [idle], "c": [other]}


def test_of_a_gpu_in_shares_the_one_that_uses_it_is_not_known_and_so_not_who_does_not(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd")
    owners = ContainerOwners("node7", held=lambda: {"a": (TRAINER, OTHER)}, proc=tmp_path)
    assert owners(snapshot(a=(7,))) == {"a": [GpuContainer(container_id=ID, runtime="containerd", pod_uid=POD)]}
    assert [owner.pod for owner in owners(snapshot(a=()))["a"]] == ["llama-0", "mistral-0"]


def test_a_gpu_is_known_by_its_bus_address_too(tmp_path: Path) -> None:
    process(tmp_path, 7, "v2-containerd-systemd")
    owners = ContainerOwners("node7", held=lambda: {"0000:03:00.0": (TRAINER,)}, proc=tmp_path)
    gpu = GpuState(
        vendor="amd", index=0, uuid="a", name="MI300X", pci_bus_id="00000000:03:00.0", processes=(GpuProcess(pid=7),)
    )
    assert owners(Snapshot(gpus=(gpu,))) == {"a": [BY_KUBELET]}
