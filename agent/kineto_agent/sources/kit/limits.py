"""Sizes and times of a recording through a collector, the same for all vendors."""

BUFFER_BYTES = 4 << 20  # Kineto's size: 20,000 kernels
# CUPTI takes a buffer for each thread that launches (CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, by default), and
# drops the records of a thread for which none is left: so there are this many, of at least 1,200 kernels each.
THREAD_BUFFERS = 256
LEAST_BUFFER_BYTES = 256 << 10
STRINGS_BYTES = 8 << 20  # 60,000 kernel names of 120 bytes
PREFAULT_BYTES = 8 << 20  # 2 buffers, 6 ms of page faults; the collector's thread goes on to stay 4 ahead of use
# A flush hands over partly filled buffers, so it bounds what a crash loses and costs a buffer each time.
FLUSH_PERIOD_MS = 500
STOP_LIMIT_MS = 2000  # a forced flush of CUPTI takes 1-9 ms, of PTI up to 13 ms
# The program waits for it, while a call of the vendor's library is in progress: to use it beside that would harm both.
GIVE_WAY_LIMIT_MS = 200


def thread_buffer_bytes(limit_bytes: int) -> int:
    """The size of a buffer where each thread of the program has one of its own."""
    return min(max(limit_bytes // THREAD_BUFFERS // LEAST_BUFFER_BYTES, 1) * LEAST_BUFFER_BYTES, BUFFER_BYTES)
