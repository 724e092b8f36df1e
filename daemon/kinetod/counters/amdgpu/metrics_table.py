"""gpu_metrics: the table that amdgpu gives of a GPU, in /sys, by its version. Pure.

Theory of operation
    A table begins with its size (u16) and its version (two bytes). Versions 1.1 to 1.8 are structures, of which only
    the fields that we use are named here; a table of another size than the version's is not read, since some kernels
    had other structures under the same version. Version 1.9 describes itself: a count of attributes (i32), and for each
    its encoding (u64: unit, type, number, length) and its values, without padding.

    A field whose bits are all one has no value.

Sources: `drivers/gpu/drm/amd/include/kgd_pp_interface.h` of Linux, and `rocm_smi_gpu_metrics.h` of ROCm, whose
structures were compiled for sizes and offsets; for 1.9 the enumerations of the former.
"""

import struct
from collections.abc import Mapping

import msgspec

MAX_BYTES = 1 << 16  # its size is a u16
GFX_CLOCKS = XGMI_LINKS = 8


class UnknownTableError(Exception):
    """The table cannot be read. The text says what it is."""


class MetricsTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table. fields: the values of each field by its name in the driver, without those that have none."""

    version: str
    fields: Mapping[str, tuple[int, ...]]


class _Field(msgspec.Struct, frozen=True):
    offset: int
    kind: str  # as `struct` has it
    count: int = 1


_V1_1 = {
    "temperature_hotspot": _Field(6, "H"),
    "average_gfx_activity": _Field(16, "H"),
    "average_umc_activity": _Field(18, "H"),
    "average_socket_power": _Field(22, "H"),
    "current_gfxclk": _Field(54, "H"),
    "current_uclk": _Field(58, "H"),
}
_V1_2 = _V1_1 | {"firmware_timestamp": _Field(96, "Q")}
_V1_3 = _V1_2 | {"indep_throttle_status": _Field(112, "Q")}


def _instinct(energy: int, xgmi: int, firmware: int) -> dict[str, _Field]:
    """1.4 and later, which have the same parts at other places. xgmi: of the bytes read; firmware: of its timestamp."""
    return {
        "temperature_hotspot": _Field(4, "H"),
        "curr_socket_power": _Field(10, "H"),
        "average_gfx_activity": _Field(12, "H"),
        "average_umc_activity": _Field(14, "H"),
        "energy_accumulator": _Field(energy, "Q"),
        "xgmi_read_data_acc": _Field(xgmi, "Q", XGMI_LINKS),
        "xgmi_write_data_acc": _Field(xgmi + 64, "Q", XGMI_LINKS),
        "firmware_timestamp": _Field(firmware, "Q"),
        "current_gfxclk": _Field(firmware + 8, "H", GFX_CLOCKS),
        "current_uclk": _Field(firmware + 48, "H"),
    }


_RESIDENCIES = (
    "accumulation_counter", "prochot_residency_acc", "ppt_residency_acc", "socket_thm_residency_acc",
    "vr_thm_residency_acc", "hbm_thm_residency_acc",
)  # fmt: skip


def _residencies(offset: int) -> dict[str, _Field]:
    return {name: _Field(offset + 4 * place, "I") for place, name in enumerate(_RESIDENCIES)}


_V1_7 = _instinct(24, 136, 288) | _residencies(40)
# Size and fields by version.
LAYOUTS: Mapping[tuple[int, int], tuple[int, Mapping[str, _Field]]] = {
    (1, 1): (96, _V1_1),
    (1, 2): (104, _V1_2),
    (1, 3): (120, _V1_3),
    (1, 4): (288, _instinct(24, 104, 232)),
    (1, 5): (360, _instinct(88, 176, 304)),
    (1, 6): (1664, _instinct(16, 128, 256) | _residencies(32)),
    (1, 7): (2208, _V1_7),
    (1, 8): (3872, _V1_7),
}
SELF_DESCRIBING = (1, 9)
_HEADER = struct.Struct("<HBB")
_ATTRIBUTES_AT = 8
_TYPES = "BbHhIiQq"  # amdgpu_metrics_attr_type
# amdgpu_metrics_attr_id
ATTRIBUTES: Mapping[int, str] = {
    0: "temperature_hotspot",
    3: "curr_socket_power",
    4: "average_gfx_activity",
    5: "average_umc_activity",
    7: "energy_accumulator",
    9: "accumulation_counter",
    10: "prochot_residency_acc",
    11: "ppt_residency_acc",
    12: "socket_thm_residency_acc",
    13: "vr_thm_residency_acc",
    14: "hbm_thm_residency_acc",
    29: "xgmi_read_data_acc",
    30: "xgmi_write_data_acc",
    32: "firmware_timestamp",
    33: "current_gfxclk",
    37: "current_uclk",
}


def read_table(data: bytes) -> MetricsTable:
    """Raises UnknownTableError."""
    if len(data) < _HEADER.size:
        raise UnknownTableError(f"a table of {len(data)} bytes has no version")
    size, *version = _HEADER.unpack_from(data)
    key = (version[0], version[1])
    name = f"{key[0]}.{key[1]}"
    if size != len(data):
        raise UnknownTableError(f"version {name} says it has {size} bytes, and {len(data)} were read")
    if key == SELF_DESCRIBING:
        return MetricsTable(version=name, fields=_described(data))
    layout = LAYOUTS.get(key)
    if layout is None:
        apu = "; such tables are of processors with graphics" if key[0] > 1 else ""
        raise UnknownTableError(f"version {name} is not known here{apu}")
    if size != layout[0]:
        raise UnknownTableError(f"version {name} has {size} bytes, not the {layout[0]} of the layout that is known")
    fields = {}
    for field, place in layout[1].items():
        if values := _values(data, place.offset, place.kind, place.count):
            fields[field] = values
    return MetricsTable(version=name, fields=fields)


def _described(data: bytes) -> dict[str, tuple[int, ...]]:
    """Raises UnknownTableError."""
    fields: dict[str, tuple[int, ...]] = {}
    try:
        (count,) = struct.unpack_from("<i", data, 4)
        at = _ATTRIBUTES_AT
        for _ in range(count):
            (encoding,) = struct.unpack_from("<Q", data, at)
            kind, number, length = _TYPES[encoding >> 20 & 0xF], encoding >> 10 & 0x3FF, encoding & 0x3FF
            at += 8
            values = _values(data, at, kind, length)
            at += struct.calcsize(f"<{length}{kind}")
            if values and number in ATTRIBUTES:
                fields[ATTRIBUTES[number]] = values
    except (struct.error, IndexError) as exc:
        raise UnknownTableError(f"version 1.9 describes itself wrongly: {exc}") from exc
    return fields


def _values(data: bytes, offset: int, kind: str, count: int) -> tuple[int, ...]:
    """Those that there are. Raises struct.error."""
    found = struct.unpack_from(f"<{count}{kind}", data, offset)
    none = (1 << 8 * struct.calcsize(kind)) - 1 if kind.isupper() else -1
    return tuple(value for value in found if value != none)
