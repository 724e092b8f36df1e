"""Sizes and times of a recording through a collector, and what its end tells the user: the same for all vendors."""

from typing import Callable, List, Protocol

BUFFER_BYTES = 4 << 20  # Kineto's size: 20,000 kernels
# CUPTI uses a buffer for each thread that launches (CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, by default), and
# drops the records of a thread for which none is left: so there are this many, each for at least 300 kernels. NVIDIA's
# own samples use buffers of 32 KiB.
THREAD_BUFFERS = 256
LEAST_BUFFER_BYTES = 64 << 10
STRINGS_BYTES = 8 << 20  # 60,000 kernel names of 120 bytes
PREFAULT_BYTES = 8 << 20  # 2 buffers, 6 ms of page faults; the collector's thread then stays 4 ahead of use
# A flush hands over partly filled buffers, so it bounds what a crash loses and costs a buffer each time.
FLUSH_PERIOD_MS = 500
STOP_LIMIT_MS = 2000  # a forced flush of CUPTI takes 1-9 ms, of PTI up to 13 ms
# The program waits for it while a call of the vendor's library is in progress: using both at once would harm both.
GIVE_WAY_LIMIT_MS = 200


def thread_buffer_bytes(limit_bytes: int) -> int:
    """The size of a buffer where each thread of the program has one of its own."""
    return min(max(limit_bytes // THREAD_BUFFERS // LEAST_BUFFER_BYTES, 1) * LEAST_BUFFER_BYTES, BUFFER_BYTES)


class StopResult(Protocol):
    """What kc_stop_result and kit_stop_result have in common."""

    names_lost: int
    irregular_records: int
    timed_out: int
    flush_result: int


def stop_warnings(
    title: str, stopped: StopResult, limit_ms: int, calls_unnamed: int, result_text: Callable[[int], str]
) -> List[str]:
    """Warnings for the user, [] if all is well. title: of the library. limit_ms: what the stop was given."""
    warnings = []
    if stopped.timed_out:
        warnings.append("%s did not hand over its last records within %d ms: the trace ends early" % (title, limit_ms))
    if stopped.flush_result != 0:
        text = result_text(stopped.flush_result)
        warnings.append("%s's last flush failed (%s): the trace may end early" % (title, text))
    lost = stopped.names_lost + calls_unnamed
    if lost:
        warnings.append("%d kernel and call names are missing: the string table was full" % lost)
    if stopped.irregular_records:
        warnings.append(
            "%d records were dropped because this version of %s has records of one kind in several sizes"
            % (stopped.irregular_records, title)
        )
    return warnings
