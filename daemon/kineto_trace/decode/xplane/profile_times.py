"""When the events of a profile happened, in Unix ns."""

from kineto_trace.decode.xplane.xspace import Event, ProfileLine

_UNIX_NS = 1 << 58  # from 1979 on: smaller times are after the begin of the profile
_MOST_NS = 1 << 62
_PS = 1000


class ProfileTimes:
    """start_ns: when the profile began, in Unix ns, as it says; anything else: unknown."""

    def __init__(self, start_ns: object) -> None:
        self.known = isinstance(start_ns, int) and _UNIX_NS <= start_ns < _MOST_NS
        self._start_ns = start_ns if isinstance(start_ns, int) and self.known else 0

    def of(self, line: ProfileLine, event: Event) -> tuple[int, int]:
        """Returns start and duration in ns. Both borders are rounded down, so that rows nest as they did."""
        begin = line.timestamp_ns if line.timestamp_ns >= _UNIX_NS else self._start_ns + line.timestamp_ns
        start = min(max(begin + event.begin_ps // _PS, 0), _MOST_NS)
        end = min(max(begin + (event.begin_ps + event.duration_ps) // _PS, start), _MOST_NS)
        return start, end - start
