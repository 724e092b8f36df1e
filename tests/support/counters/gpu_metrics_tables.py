"""The structures of gpu_metrics as the kernel declares them, field by field, and a driver that plays them in a file."""

import ctypes
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.accelerators.drm_host import DrmHost
from support.machine import native

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, in a row; `name*8` is an array."""
    made: list[tuple[str, Any]] = []
    for word in names.split():
        name, _, count = word.partition("*")
        made.append((name, kind * int(count) if count else kind))
    return made


_HEADER = [("structure_size", U16), ("format_revision", U8), ("content_revision", U8)]
_V1_1 = [
    *_HEADER,
    *_fields(U16, "temperature_edge temperature_hotspot temperature_mem temperature_vrgfx temperature_vrsoc"),
    *_fields(U16, "temperature_vrmem average_gfx_activity average_umc_activity average_mm_activity"),
    *_fields(U16, "average_socket_power"),
    *_fields(U64, "energy_accumulator system_clock_counter"),
    *_fields(U16, "average_gfxclk_frequency average_socclk_frequency average_uclk_frequency"),
    *_fields(U16, "average_vclk0_frequency average_dclk0_frequency average_vclk1_frequency average_dclk1_frequency"),
    *_fields(U16, "current_gfxclk current_socclk current_uclk current_vclk0 current_dclk0 current_vclk1"),
    *_fields(U16, "current_dclk1"),
    *_fields(U32, "throttle_status"),
    *_fields(U16, "current_fan_speed pcie_link_width pcie_link_speed padding"),
    *_fields(U32, "gfx_activity_acc mem_activity_acc"),
    *_fields(U16, "temperature_hbm*4"),
]
_V1_2 = [*_V1_1, ("firmware_timestamp", U64)]
_V1_3 = [
    *_V1_2,
    *_fields(U16, "voltage_soc voltage_gfx voltage_mem padding1"),
    ("indep_throttle_status", U64),
]
_FIRST = _fields(
    U16, "temperature_hotspot temperature_mem temperature_vrsoc curr_socket_power average_gfx_activity "
    "average_umc_activity"
)  # fmt: skip
_LINKS = [
    *_fields(U32, "gfxclk_lock_status"),
    *_fields(U16, "pcie_link_width pcie_link_speed xgmi_link_width xgmi_link_speed"),
    *_fields(U32, "gfx_activity_acc mem_activity_acc"),
    *_fields(U64, "pcie_bandwidth_acc pcie_bandwidth_inst pcie_l0_to_recov_count_acc pcie_replay_count_acc"),
    *_fields(U64, "pcie_replay_rover_count_acc"),
]
_NAKS = _fields(U32, "pcie_nak_sent_count_acc pcie_nak_rcvd_count_acc")
_XGMI = _fields(U64, "xgmi_read_data_acc*8 xgmi_write_data_acc*8")
_CLOCKS = [
    ("firmware_timestamp", U64),
    *_fields(U16, "current_gfxclk*8 current_socclk*4 current_vclk0*4 current_dclk0*4 current_uclk"),
]
_ENERGY = _fields(U64, "energy_accumulator system_clock_counter")
_RESIDENCIES = _fields(
    U32, "accumulation_counter prochot_residency_acc ppt_residency_acc socket_thm_residency_acc vr_thm_residency_acc "
    "hbm_thm_residency_acc"
)  # fmt: skip


def _partitions(jpeg: int, limits: int) -> list[tuple[str, Any]]:
    class Partition(ctypes.Structure):
        _fields_ = (
            *_fields(U32, "gfx_busy_inst*8"), *_fields(U16, f"jpeg_busy*{jpeg} vcn_busy*4"),
            *_fields(U64, "gfx_busy_acc*8" + "".join(f" below_host_limit_acc_{number}*8" for number in range(limits))),
        )  # fmt: skip

    return [("num_partition", U16), ("xcp_stats", Partition * 8), ("pcie_lc_perf_other_end_recovery", U32)]


_STATUS = [*_LINKS, *_NAKS, *_XGMI, *_fields(U16, "xgmi_link_status*8 padding"), *_CLOCKS]
_FIELDS: Mapping[tuple[int, int], Sequence[tuple[str, Any]]] = {
    (1, 1): _V1_1,
    (1, 2): _V1_2,
    (1, 3): _V1_3,
    (1, 4): [
        *_HEADER, *_FIRST, *_fields(U16, "vcn_activity*4"), *_ENERGY, ("throttle_status", U32), *_LINKS, *_XGMI,
        *_CLOCKS, ("padding", U16),
    ],
    (1, 5): [
        *_HEADER, *_FIRST, *_fields(U16, "vcn_activity*4 jpeg_activity*32"), *_ENERGY, ("throttle_status", U32),
        *_LINKS, *_NAKS, *_XGMI, *_CLOCKS, ("padding", U16),
    ],
    (1, 6): [*_HEADER, *_FIRST, *_ENERGY, *_RESIDENCIES, *_LINKS, *_NAKS, *_XGMI, *_CLOCKS, *_partitions(32, 0)],
    (1, 7): [
        *_HEADER, *_FIRST, ("mem_max_bandwidth", U64), *_ENERGY, *_RESIDENCIES, *_STATUS, *_partitions(32, 1),
    ],
    (1, 8): [
        *_HEADER, *_FIRST, ("mem_max_bandwidth", U64), *_ENERGY, *_RESIDENCIES, *_STATUS, *_partitions(40, 4),
    ],
}  # fmt: skip
VERSIONS = tuple(_FIELDS)
# number, and type as `struct` has it with its number, of the attributes that the tests use
_ATTRIBUTES = {
    "temperature_hotspot": (0, 2), "curr_socket_power": (3, 2), "average_gfx_activity": (4, 2),
    "average_umc_activity": (5, 2), "mem_max_bandwidth": (6, 6), "energy_accumulator": (7, 6),
    "accumulation_counter": (9, 4), "prochot_residency_acc": (10, 4), "ppt_residency_acc": (11, 4),
    "socket_thm_residency_acc": (12, 4), "vr_thm_residency_acc": (13, 4), "hbm_thm_residency_acc": (14, 4),
    "xgmi_read_data_acc": (29, 6), "xgmi_write_data_acc": (30, 6), "firmware_timestamp": (32, 6),
    "current_gfxclk": (33, 2), "current_uclk": (37, 2),
}  # fmt: skip


def packed(version: tuple[int, int], values: Mapping[str, int | Sequence[int]]) -> bytes:
    """A table with these fields; the others have no value. Fields that the version does not have are left out."""
    if version == (1, 9):
        return _described(values)
    made = type("Table", (ctypes.Structure,), {"_fields_": list(_FIELDS[version])})
    table = made()
    ctypes.memset(ctypes.addressof(table), 0xFF, ctypes.sizeof(table))
    table.structure_size, table.format_revision, table.content_revision = ctypes.sizeof(table), *version
    kinds = dict(_FIELDS[version])
    for name, value in values.items():
        if name not in kinds:
            continue
        if issubclass(kinds[name], ctypes.Array):
            several = value if isinstance(value, Sequence) else (value,)
            for place, each in enumerate(several):
                getattr(table, name)[place] = each
        else:
            setattr(table, name, value[0] if isinstance(value, Sequence) else value)
    return bytes(table)


def _described(values: Mapping[str, int | Sequence[int]]) -> bytes:
    body, count = b"", 0
    for name, value in values.items():
        if name in _ATTRIBUTES:
            number, kind = _ATTRIBUTES[name]
            several = value if isinstance(value, Sequence) else (value,)
            body += struct.pack("<Q", kind << 20 | number << 10 | len(several))
            body += struct.pack(f"<{len(several)}{'BbHhIiQq'[kind]}", *several)
            count += 1
    return struct.pack("<HBBi", 8 + len(body), 1, 9, count) + body


class PlayedAmdgpu:
    """GPUs of AMD's in trees that stand for /sys and /proc: the n-th is busy n + 10 % of the time and takes 100 W."""

    def __init__(self, folder: Path, *versions: tuple[int, int]) -> None:
        self.host = DrmHost(folder)
        self.versions = versions
        self.folders = [
            self.host.gpu(
                "amdgpu", f"0000:c{number}:00.0", 128 + number, unique_id=f"a{number:015x}",
                product_name="AMD Instinct MI300X", power__runtime_status="active",
            )
            for number in range(len(versions))
        ]  # fmt: skip
        for number in range(len(versions)):
            self.host.write(
                self.host.sys / f"class/kfd/kfd/topology/nodes/{number}",
                {"gpu_id": str(number + 1), "properties": f"drm_render_minor {128 + number}\ngfx_target_version 90402"},
            )
        self.uuids = [f"a{number:015x}" for number in range(len(versions))]
        self.ticks = 0
        self.instead: dict[str, int] = {}  # of the values below
        self.tick()

    def environ(self) -> dict[str, str]:
        """Variables of a process that shall see these GPUs in its /sys."""
        flags = ["-O2", "-g", "-fPIC", "-shared"]
        library = native.build("libplayed_sysfs.so", [native.FAKES / "played_sysfs.c"], flags)
        return {"LD_PRELOAD": str(library), "PLAYED_SYSFS": str(self.host.sys)}

    def tick(self, milliseconds: int = 1) -> None:
        """Lets time pass on all GPUs."""
        self.ticks += milliseconds
        for number, version in enumerate(self.versions):
            self.show(number, packed(version, self.values(number)))

    def values(self, number: int) -> dict[str, int | Sequence[int]]:
        """All fields of a GPU at this tick, which is one of 1 ms."""
        energy = self.ticks * 65536 // 10  # 100 W
        return {
            "temperature_hotspot": 50 + number, "curr_socket_power": 99, "average_socket_power": 99,
            "average_gfx_activity": 10 + number, "average_umc_activity": 20 + number, "energy_accumulator": energy,
            "accumulation_counter": self.ticks, "prochot_residency_acc": 0, "ppt_residency_acc": self.ticks // 2,
            "socket_thm_residency_acc": 0, "vr_thm_residency_acc": self.ticks // 4, "hbm_thm_residency_acc": 0,
            "xgmi_read_data_acc": [self.ticks * 1000, self.ticks * 3000], "xgmi_write_data_acc": [self.ticks * 500, 0],
            "firmware_timestamp": self.ticks * 100_000, "current_gfxclk": [2100, 2000], "current_uclk": 1300,
            "indep_throttle_status": 1 << 36, **self.instead,
        }  # fmt: skip

    def show(self, number: int, table: bytes) -> None:
        """Replaces what a GPU's file has, as a whole."""
        path = self.folders[number] / "gpu_metrics"
        scratch = path.with_name("gpu_metrics.new")
        scratch.write_bytes(table)
        scratch.replace(path)

    @contextmanager
    def alive(self, milliseconds: int = 2) -> Iterator[None]:
        """A thread lets time pass as it does, so many milliseconds at once."""
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(milliseconds / 1000):
                self.tick(milliseconds)

        thread = threading.Thread(target=work, name="played amdgpu", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
