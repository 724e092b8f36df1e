"""How well this kernel can confine a decoder, in words for the log and `kinetoctl doctor`."""

from dataclasses import dataclass

from kinetod.sandbox import landlock
from kinetod.sandbox import seccomp_filter as seccomp

_TCP_ABI, _SIGNAL_ABI = 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """landlock: its ABI; 0: there is none."""

    landlock: int
    seccomp: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing parts, each with its cost; empty if decoders are confined as documented."""
        lacking = []
        if not self.landlock:
            lacking.append("no Landlock: a decoder that is taken over can read all files of the daemon's user")
        if not self.seccomp:
            lacking.append("no seccomp filters: it can open connections and send signals")
        return tuple(lacking)

    @property
    def present(self) -> str:
        """The parts that the kernel has, for people."""
        parts = []
        if self.landlock:
            more = [name for name, since in (("TCP", _TCP_ABI), ("signals", _SIGNAL_ABI)) if self.landlock >= since]
            parts.append(f"Landlock ABI {self.landlock} (files{''.join(f', {name}' for name in more)})")
        if self.seccomp:
            parts.append("a seccomp filter")
        return ", ".join([*parts, "limits"])


def support() -> Support:
    """What this kernel supports, under the filters that the daemon itself has."""
    return Support(landlock=landlock.abi(), seccomp=seccomp.available())
