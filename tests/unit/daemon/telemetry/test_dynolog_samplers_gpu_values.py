"""A GPU under Dynolog's names and in its units, and nothing that was not measured."""

import os
import pwd
from pathlib import Path

import pytest
from kinetod.gpus.gpu_owners import GpuContainer, SlurmNames
from kinetod.gpus.gpu_types import NAMES, GpuActivity, GpuProcess, GpuState
from kinetod.telemetry.dynolog_samplers import GpuUser, gpu_user, gpu_values, json_line

NOBODY = GpuUser()


def gpu(**changes: object) -> GpuState:
    values = {"vendor": "nvidia", "index": 3, "uuid": "GPU-3", "name": "H200", "device": "nvidia3"}
    return GpuState(**{**values, **changes})  # type: ignore[arg-type]


def test_units_are_dynologs() -> None:
    now = gpu(
        sm_clock_hertz=1.98e9,
        utilization=0.87,
        memory_utilization=0.29,
        power_watts=512.345,
        pcie_transmit_bytes_per_second=1024.0,
        pcie_receive_bytes_per_second=2048.0,
        nvlink_transmit_bytes=5000,
        nvlink_receive_bytes=7000,
    )
    user = GpuUser(
        job_id="42",
        username="ada",
        slurm_account="physics",
        slurm_partition="gpu",
        pod_namespace="ml",
        pod_name="p",
        container_name="c",
    )
    assert gpu_values(now, gpu(nvlink_transmit_bytes=1000, nvlink_receive_bytes=2000), 10.0, user) == {
        "gpu_frequency_mhz": 1980,
        "gpu_device_utilization": 87,
        "gpu_memory_utilization": 29,
        "gpu_power_draw": 512.345,
        "pcie_tx_bytes": 1024,
        "pcie_rx_bytes": 2048,
        "nvlink_tx_bytes": 400,
        "nvlink_rx_bytes": 500,
        "minor_id": 3,
        "gpu_name": "H200",
        "gpu_uuid": "GPU-3",
        "job_id": "42",
        "username": "ada",
        "slurm_account": "physics",
        "slurm_partition": "gpu",
        "pod_namespace": "ml",
        "pod_name": "p",
        "container_name": "c",
        "device": 3,
    }


ACTIVE = {"sm_active": 4.0, "tensor_active": 2.0, "pcie_transmit": 1000.0, "nvlink_receive": 5000.0}


def test_what_the_units_did_comes_before_what_the_driver_measured_for_a_moment() -> None:
    later = {
        name: total + 10.0 * rate for (name, total), rate in zip(ACTIVE.items(), (0.9, 0.25, 64, 128), strict=True)
    }
    before = gpu(activity=GpuActivity(since_ns=1, seconds=5.0, totals=ACTIVE), nvlink_receive_bytes=0)
    now = gpu(
        activity=GpuActivity(since_ns=1, seconds=15.0, totals=later),
        pcie_transmit_bytes_per_second=7.0,
        pcie_receive_bytes_per_second=8.0,
        nvlink_receive_bytes=90,
    )
    values = gpu_values(now, before, 10.0, NOBODY)
    assert values == {
        "sm_active_ratio": 0.9,
        "tensorcore_active": 0.25,
        "pcie_tx_bytes": 64,
        "pcie_rx_bytes": 8,  # the GPU does not count them
        "nvlink_rx_bytes": 128,
        "minor_id": 3,
        "gpu_name": "H200",
        "gpu_uuid": "GPU-3",
        "device": 3,
    }
    assert '"sm_active_ratio":"0.900"' in json_line(0, values)
    first = gpu_values(now, None, 10.0, NOBODY)
    assert (first["pcie_tx_bytes"], "sm_active_ratio" in first) == (7, False)


def test_every_profiling_field_of_dcgm_has_its_name() -> None:
    totals = dict.fromkeys(NAMES, 1.0)
    now, before = (gpu(activity=GpuActivity(since_ns=1, seconds=s, totals=totals)) for s in (2.0, 1.0))
    of_nobody = {"minor_id", "gpu_name", "gpu_uuid", "device"}
    assert gpu_values(now, before, 1.0, NOBODY).keys() - of_nobody == {
        "graphics_engine_active_ratio", "sm_active_ratio", "sm_occupancy", "tensorcore_active", "hbm_mem_bw_util",
        "fp64_active", "fp32_active", "fp16_active", "pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes",
        "nvlink_rx_bytes",
    }  # fmt: skip


def test_what_the_library_does_not_tell_is_left_out() -> None:
    only = {"minor_id": 3, "gpu_name": "H200", "gpu_uuid": "GPU-3", "device": 3}
    assert gpu_values(gpu(), None, 0.0, NOBODY) == only
    assert gpu_values(gpu(device="renderD128"), None, 0.0, NOBODY) == {k: only[k] for k in only if k != "minor_id"}


@pytest.mark.parametrize(
    ("before", "seconds"),
    [(None, 10.0), (gpu(), 10.0), (gpu(nvlink_transmit_bytes=9000), 10.0), (gpu(nvlink_transmit_bytes=1), 0.0)],
    ids=["first reading", "not known then", "reset", "no time"],
)
def test_a_rate_needs_two_ends(before: GpuState | None, seconds: float) -> None:
    assert "nvlink_tx_bytes" not in gpu_values(gpu(nvlink_transmit_bytes=5000), before, seconds, NOBODY)


def test_the_user_is_the_owner_of_the_processes() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    mine = GpuProcess(pid=os.getpid())
    assert gpu_user(gpu(processes=(mine,)), (), ()) == GpuUser(username=me)
    assert gpu_user(gpu(processes=(GpuProcess(pid=2**30),)), (), ()) == NOBODY  # it has ended


def process(proc: Path, pid: int, uid: int, job: str) -> GpuProcess:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text(
        f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t1\t1\t1\t1\nCapPrm:\t0000000000000000\n"
    )
    (folder / "environ").write_bytes(b"")
    (folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n")
    return GpuProcess(pid=pid)


def test_the_job_is_that_of_all_processes_by_their_control_groups(tmp_path: Path) -> None:
    one = process(tmp_path, 10, 65534, "77")
    same, other = process(tmp_path, 11, 65534, "77"), process(tmp_path, 12, 0, "78")
    assert gpu_user(gpu(processes=(one, same)), (), (), tmp_path).job_id == "77"
    shared = gpu_user(gpu(processes=(one, other)), (), (), tmp_path)
    assert (shared.job_id, shared.username) == ("", "")


def test_what_the_batch_system_says_counts_more_and_several_are_none(tmp_path: Path) -> None:
    on = gpu(processes=(process(tmp_path, 10, 65534, "77"),))
    assert gpu_user(on, (), ("90",), tmp_path).job_id == "90"
    assert gpu_user(on, (), ("90", "91"), tmp_path).job_id == ""


def test_the_account_is_what_the_processes_say(tmp_path: Path) -> None:
    on = gpu(processes=(process(tmp_path, 10, 65534, "77"),))
    said = {10: SlurmNames(account="physics", partition="gpu"), 99: SlurmNames(account="other")}
    user = gpu_user(on, (), (), tmp_path, said=said)
    assert (user.slurm_account, user.slurm_partition, user.job_id) == ("physics", "gpu", "77")


def test_a_gpu_of_several_containers_has_the_names_of_none() -> None:
    first, second = (GpuContainer(pod=name, namespace="ml", container="c") for name in "ab")
    assert gpu_user(gpu(), (first,), ()) == GpuUser(pod_namespace="ml", pod_name="a", container_name="c")
    assert gpu_user(gpu(), (first, second), ()) == NOBODY
