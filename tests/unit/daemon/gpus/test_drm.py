"""GPUs by the kernel's drivers alone, on made-up hosts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kinetod.gpus.drm import DrmGpus
from kinetod.gpus.gpu_types import GpuProcess, GpuState, LibraryError, LibraryState
from kinetod.gpus.reader_process import joined
from support.accelerators.drm_host import DrmHost, client

MIB = 1 << 20
FIRST, SECOND = "0000:03:00.0", "0000:c1:00.0"


@pytest.fixture
def host(tmp_path: Path) -> DrmHost:
    return DrmHost(tmp_path)


def clock(*seconds: float) -> Callable[[], int]:
    times = iter(seconds)
    return lambda: int(next(times) * 1e9)


def test_an_amd_gpu_is_measured_by_the_files_of_its_driver(host: DrmHost) -> None:
    host.gpu(
        "amdgpu", SECOND, 128,
        product_name="AMD Instinct MI300X", unique_id="8d62c3a1b2f40011", device="0x74a1",
        mem_info_vram_total=str(192 << 30), mem_info_vram_used=str(3 << 30), gpu_busy_percent="42",
        mem_busy_percent="7", hwmon__hwmon5__power1_average="140000000", hwmon__hwmon5__power1_cap="750000000",
        hwmon__hwmon5__temp1_label="junction", hwmon__hwmon5__temp1_input="55000", hwmon__hwmon5__temp2_label="mem",
        hwmon__hwmon5__temp2_input="48000", hwmon__hwmon5__freq1_label="sclk", hwmon__hwmon5__freq1_input="2100000000",
        ras__umc_err_count="ue: 1\nce: 12\nde: 3",
    )  # fmt: skip
    library = DrmGpus(host.proc, host.sys)
    assert library.open() == "amdgpu of Linux 6.12.1"
    assert library.read() == [
        GpuState(
            vendor="amd",
            index=0,
            uuid="8d62c3a1b2f40011",
            name="AMD Instinct MI300X",
            pci_bus_id=SECOND,
            device="renderD128",
            memory_total_bytes=192 << 30,
            memory_used_bytes=3 << 30,
            utilization=0.42,
            memory_utilization=0.07,
            power_watts=140,
            power_limit_watts=750,
            temperature_celsius=55,
            memory_temperature_celsius=48,
            sm_clock_hertz=2.1e9,
            ecc_corrected=12,
            ecc_uncorrected=1,
        )
    ]


def test_an_intel_gpu_has_what_its_driver_has_files_for(host: DrmHost) -> None:
    host.gpu(
        "xe", FIRST, 128, device="0xe20b", hwmon__hwmon2__energy1_input="1234500000",
        hwmon__hwmon2__power1_max="190000000", hwmon__hwmon2__temp2_label="pkg", hwmon__hwmon2__temp2_input="51000",
        tile0__gt0__freq0__act_freq="2400",
    )  # fmt: skip
    (gpu,) = DrmGpus(host.proc, host.sys).read()
    assert (gpu.vendor, gpu.name, gpu.uuid) == ("intel", "Intel GPU e20b", FIRST)
    assert (gpu.energy_joules, gpu.power_limit_watts, gpu.temperature_celsius) == (1234.5, 190, 51)
    assert (gpu.sm_clock_hertz, gpu.memory_total_bytes, gpu.utilization) == (2.4e9, None, None)


def test_a_process_that_only_opened_a_gpu_does_not_hold_it(host: DrmHost) -> None:
    for minor, address in ((128, FIRST), (129, SECOND)):
        host.gpu("xe", address, minor)
    idle = client(SECOND, 8, drm_total_vram0="0", drm_resident_vram0="0", drm_total_system="4 MiB", drm_cycles_ccs="0")
    used = client(FIRST, 7, drm_resident_vram0="64 MiB", drm_resident_gtt="9 MiB", drm_cycles_ccs="10")
    host.process(77, {3: ("/dev/dri/renderD128", used), 4: ("/dev/dri/renderD129", idle), 5: ("/dev/null", "")})
    host.process(78, {3: ("/dev/dri/renderD129", idle)})
    library = DrmGpus(host.proc, host.sys)
    assert [gpu.processes for gpu in library.read()] == [(GpuProcess(pid=77, memory_bytes=64 * MIB),), ()]
    assert [gpu.processes for gpu in library.read_processes()] == [(GpuProcess(pid=77),), ()]


@pytest.mark.parametrize(
    ("before", "after", "ratio"),
    [
        ({"drm_engine_compute": "1000000000 ns"}, {"drm_engine_compute": "1500000000 ns"}, 0.25),
        (
            {"drm_cycles_ccs": "100", "drm_total_cycles_ccs": "1000", "drm_engine_capacity_ccs": "4"},
            {"drm_cycles_ccs": "900", "drm_total_cycles_ccs": "1400", "drm_engine_capacity_ccs": "4"},
            0.5,
        ),
        ({"drm_engine_copy": "0 ns"}, {"drm_engine_copy": "900000000 ns"}, 0.0),
        ({"drm_engine_rcs": "9 ns"}, {"drm_engine_rcs": "99999999999 ns"}, 1.0),
    ],
)
def test_time_on_engines_that_run_kernels_becomes_a_ratio(
    host: DrmHost, before: dict[str, str], after: dict[str, str], ratio: float
) -> None:
    host.gpu("i915", FIRST, 128)
    library = DrmGpus(host.proc, host.sys, clock(10, 12))
    host.process(77, {3: ("/dev/dri/renderD128", client(FIRST, 7, drm_resident_local0="1 MiB", **before))})
    assert library.read()[0].processes[0].utilization is None
    host.process(77, {3: ("/dev/dri/renderD128", client(FIRST, 7, drm_resident_local0="1 MiB", **after))})
    (gpu,) = library.read()
    assert gpu.processes[0].utilization == pytest.approx(ratio)
    assert gpu.utilization == pytest.approx(ratio)


def test_a_client_that_two_processes_share_counts_once(host: DrmHost) -> None:
    host.gpu("xe", FIRST, 128)
    library = DrmGpus(host.proc, host.sys, clock(0, 1))
    for engine_ns in (0, 400_000_000):
        told = client(FIRST, 7, drm_resident_vram0="8 MiB", drm_engine_ccs=f"{engine_ns} ns")
        for pid in (77, 78):
            host.process(pid, {3: ("/dev/dri/renderD128", told), 9: ("/dev/dri/renderD128", told)})
        (gpu,) = library.read()
    assert gpu.utilization == pytest.approx(0.4)
    assert [(each.pid, each.memory_bytes) for each in gpu.processes] == [(77, 8 * MIB), (78, 8 * MIB)]


def test_rocms_processes_hold_the_gpus_on_which_they_have_memory_or_queues(host: DrmHost) -> None:
    for node, (minor, address) in enumerate(((128, FIRST), (136, SECOND))):
        host.gpu("amdgpu", address, minor)
        host.kfd_node(node + 1, 50_000 + node, minor)
    host.kfd_node(0, 0, 0)
    opened = {3: ("/dev/dri/renderD128", client(FIRST, 5, drm_memory_vram="2 MiB", drm_resident_vram="2 MiB"))}
    host.process(77, opened)
    host.kfd_process(77, vram={50_000: 40 * MIB, 50_001: 0}, queues={})
    host.kfd_process(78, vram={50_000: 0, 50_001: 0}, queues={0: 50_001})
    host.kfd_process(79, vram={50_000: 0, 50_001: 0}, queues={})
    first, second = DrmGpus(host.proc, host.sys).read()
    assert first.processes == (GpuProcess(pid=77, memory_bytes=40 * MIB),)
    assert second.processes == (GpuProcess(pid=78, memory_bytes=0),)


def test_numbers_are_places_among_all_gpus_of_the_host(host: DrmHost) -> None:
    (host.proc / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    host.gpu("xe", FIRST, 130)
    host.gpu("amdgpu", SECOND, 128)
    host.gpu("amdgpu", "0000:21:00.0", 129)
    host.gpu("i915", "0000:00:02.0", 131)  # integrated
    host.gpu("nvidia", "0000:01:00.0", 132)
    gpus = DrmGpus(host.proc, host.sys).read()
    assert [(gpu.index, gpu.device) for gpu in gpus] == [(1, "renderD129"), (2, "renderD128"), (3, "renderD130")]


def test_an_integrated_gpu_counts_where_it_is_the_only_one(host: DrmHost) -> None:
    host.gpu("i915", "0000:00:02.0", 128)
    assert [gpu.index for gpu in DrmGpus(host.proc, host.sys).read()] == [0]


def test_a_host_without_such_gpus_says_so(host: DrmHost) -> None:
    with pytest.raises(LibraryError, match="no AMD or Intel GPU") as caught:
        DrmGpus(host.proc, host.sys).open()
    assert caught.value.state is LibraryState.ABSENT


def test_what_the_vendors_library_does_not_tell_is_the_kernels_word() -> None:
    library = GpuState(vendor="amd", index=3, uuid="GPU-0f", name="MI300X", pci_bus_id=FIRST, power_watts=140)
    alone = GpuState(vendor="nvidia", index=0, uuid="GPU-1", name="H200")
    kernel = GpuState(
        vendor="amd", index=0, uuid="0f", name="AMD GPU 74a1", pci_bus_id=FIRST, device="renderD128", power_watts=1,
        temperature_celsius=50, processes=(GpuProcess(pid=7),),
    )  # fmt: skip
    other = GpuState(vendor="amd", index=1, uuid="10", name="AMD GPU 74a1", pci_bus_id=SECOND)
    assert joined([alone, library, kernel, other]) == (
        alone,
        GpuState(
            vendor="amd", index=0, uuid="0f", name="MI300X", pci_bus_id=FIRST, device="renderD128", power_watts=140,
            temperature_celsius=50, processes=(GpuProcess(pid=7),),
        ),
        other,
    )  # fmt: skip


@pytest.mark.parametrize(
    "info", ["", "drm-client-id:\t7\n", f"drm-pdev:\t{FIRST}\ndrm-client-id:\tx\n", "drm-pdev\n:::\n\0"]
)
def test_a_descriptor_that_tells_nothing_useful_is_left_out(host: DrmHost, info: str) -> None:
    host.gpu("xe", FIRST, 128)
    host.process(77, {3: ("/dev/dri/renderD128", info)})
    assert DrmGpus(host.proc, host.sys).read()[0].processes == ()
