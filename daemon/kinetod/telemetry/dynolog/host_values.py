"""The host as Dynolog reports it: differences and percentages over an interval, from /proc.

Theory of operation
    Dynolog's values are gauges over its last interval, where kinetod's own are counters, so somebody has to remember
    the counters of the interval before. `read_counters` takes them, `host_values` is a pure function of two readings.

    What Dynolog counts differs from what kinetod counts, and is kept: time in guests is part of the user's, waiting for
    disks is busy time, percentages are 0 to 100, and every interface of the network namespace is there, loopback too.
    What was not seen at both ends of an interval has no value: the first reading only has the uptime, an interface that
    has come or was reset waits for the next one. (Dynolog reports 0 for a new interface, and garbage for a reset one.)
    An interface is known by the kernel's number: another one may have got its name, with counters that happen to be
    higher.

    Any byte but a blank, a slash and a colon may be in the name of an interface; what is no UTF-8 is spelled out.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
# The first line of /proc/stat, and the letters of Dynolog's names. Guests are in user and nice already.
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
_IN_TOTAL = MODES[:8]
MILLISECONDS = {
    "cpu_u_ms": "user",
    "cpu_s_ms": "system",
    "cpu_w_ms": "iowait",
    "cpu_n_ms": "nice",
    "cpu_x_ms": "irq",
    "cpu_y_ms": "softirq",
    "cpu_z_ms": "steal",
    "cpu_guest_ms": "guest",
    "cpu_guest_nice_ms": "guest_nice",
}
PERCENTAGES = {
    "cpu_u": "user",
    "cpu_s": "system",
    "cpu_i": "idle",
    "cpu_guest": "guest",
    "cpu_guest_nice": "guest_nice",
}
# Columns of /proc/net/dev after the name.
NETWORK = {
    "rx_bytes": 0,
    "rx_packets": 1,
    "rx_errors": 2,
    "rx_drops": 3,
    "tx_bytes": 8,
    "tx_packets": 9,
    "tx_errors": 10,
    "tx_drops": 11,
}
_TICKS_PER_SECOND = 100  # USER_HZ, the same on every architecture that Linux has today
_COLUMNS = 16
_SPELLED_OUT = "backslashreplace"

Value = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounters:
    """What the kernel has counted since the boot."""

    time_ns: int  # Unix
    uptime_s: int
    cpu_ticks: Mapping[str, int]  # by MODES, of all CPUs, in hundredths of a second
    interfaces: Mapping[str, tuple[int, ...]]  # by name, the columns of NETWORK in its order
    numbers: Mapping[str, int] = field(default_factory=dict)  # of interfaces, by name


def read_counters(
    proc: Path = PROC, numbered: Callable[[], Iterable[tuple[int, str]]] = socket.if_nameindex
) -> HostCounters:
    """Reads /proc. Blocks briefly. Raises OSError, and ValueError if the kernel writes something else there.

    numbered: numbers and names of the interfaces.
    """
    first, *_ = (proc / "stat").read_text().splitlines()
    name, *ticks = first.split()
    if name != "cpu" or len(ticks) < len(_IN_TOTAL):
        raise ValueError(f"{proc}/stat begins with {first!r:.80}")
    return HostCounters(
        time_ns=time.time_ns(),
        uptime_s=int(float((proc / "uptime").read_text().split()[0])),
        cpu_ticks=dict(zip(MODES, map(int, ticks), strict=False)),
        interfaces=_interfaces((proc / "net/dev").read_bytes().decode(errors=_SPELLED_OUT)),
        numbers={os.fsencode(name).decode(errors=_SPELLED_OUT): number for number, name in numbered()},
    )


def _interfaces(text: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for line in text.removesuffix("\n").split("\n")[2:]:
        name, _, rest = line.rpartition(":")
        columns = rest.split()
        if len(columns) < _COLUMNS:
            raise ValueError(f"net/dev has the line {line!r:.80}")
        found[name.strip(" ")] = tuple(int(columns[place]) for place in NETWORK.values())
    return found


def host_values(before: HostCounters | None, after: HostCounters, prefixes: Sequence[str] = ()) -> dict[str, Value]:
    """The values under Dynolog's names: percentages 0 to 100 as float, all else as int; `rx_bytes.eth0` of interfaces.

    before: the reading at the beginning of the interval, or None. prefixes: how the names of the interfaces begin that
    are wanted; none: all of them.
    """
    values: dict[str, Value] = {"uptime": after.uptime_s}
    if before is None:
        return values
    # The kernel may take back some idle and iowait ticks; a negative time would be nonsense.
    spent = {
        mode: max(0, ticks - before.cpu_ticks[mode])
        for mode, ticks in after.cpu_ticks.items()
        if mode in before.cpu_ticks
    }
    if total := sum(spent[mode] for mode in _IN_TOTAL):
        values["cpu_util"] = 100 * (1 - spent["idle"] / total)
        values |= {name: 100 * spent[mode] / total for name, mode in PERCENTAGES.items() if mode in spent}
        values |= {
            name: spent[mode] * 1000 // _TICKS_PER_SECOND for name, mode in MILLISECONDS.items() if mode in spent
        }
    for interface, counts in after.interfaces.items():
        old = before.interfaces.get(interface)
        if old is None or not _wanted(interface, prefixes) or any(a < b for a, b in zip(counts, old, strict=True)):
            continue
        if before.numbers.get(interface) != after.numbers.get(interface):
            continue
        values |= {f"{name}.{interface}": a - b for name, a, b in zip(NETWORK, counts, old, strict=True)}
    return values


def _wanted(interface: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or interface.startswith(tuple(prefixes))
