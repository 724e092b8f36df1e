"""Sizes and times of a recording through a collector, the same for all vendors."""

BUFFER_BYTES = 4 << 20  # Kineto's size: 20,000 kernels
STRINGS_BYTES = 8 << 20  # 60,000 kernel names of 120 bytes
PREFAULT_BYTES = 8 << 20  # 2 buffers, 6 ms of page faults; the collector's thread goes on to stay 4 ahead of use
# A flush hands over partly filled buffers, so it bounds what a crash loses and costs a buffer each time.
FLUSH_PERIOD_MS = 500
STOP_LIMIT_MS = 2000  # a forced flush of CUPTI takes 1-9 ms, of PTI up to 13 ms
# The program waits for it, while a call of the vendor's library is in progress: to use it beside that would harm both.
GIVE_WAY_LIMIT_MS = 200
