"""Layout of an arena, the memory that a source writes and the daemon reads. No I/O.

Theory of operation
    An arena is one memfd of ordinary pages, sealed against shrinking and growing. The daemon checks that and maps none
    of it: it reads with pread(2), so a target can never make it fault. The agent's side writes everything except one
    transition: the daemon sets a READY buffer back to FREE once it has copied it. READY buffers survive the target's
    death.

    header (4096 bytes) | descriptors (64 bytes each) | string table | buffers (page aligned)

    Buffer states:  FREE -> LOANED (a producer writes) -> COMPLETED (valid_bytes set) -> READY (names
    of its records are in the string table; sequence set) -> FREE (the daemon copied it).
    State words are stored with release and loaded with acquire order (natural-width stores on the
    Python side). The string table only grows; `strings_used` is published after the bytes.

    String table entry: u64 key, u32 space, u32 length, bytes padded to a multiple of 8.

    records.py defines the content of the buffers and the string table. agent/native/common/arena.h is the same in C;
    tests/unit/agent/protocol/test_arena.py compares the two.
"""

import struct

MAGIC = b"KINETOA1"
HEADER_BYTES = 4096
DESCRIPTOR_BYTES = 64
PAGE_BYTES = 4096

# header, constant after creation: magic, header bytes, buffer count, buffer bytes, offsets and sizes
FIXED = struct.Struct("<8sIIQQQQQQ")
FIXED_FIELDS = (
    "magic", "header_bytes", "buffer_count", "buffer_bytes", "descriptors_offset",
    "strings_offset", "strings_bytes", "buffers_offset", "total_bytes",
)  # fmt: skip

# header, written while recording: byte offsets of u64 words
STRINGS_USED = 64
RECORDS = 72  # in READY buffers, cumulative
DROPPED = 80  # records lost, cumulative
VALID_BYTES = 88  # in READY buffers, cumulative
SEQUENCE = 96  # READY buffers so far; the next one gets this number
CLOSED = 112  # 1: the source has stopped and every buffer with records is READY
RECORD_BYTES = 512  # u32[128]: observed size of a record by CUPTI activity kind, 0: none seen
RECORD_KINDS = 128
# CUPTI's records only: at the start of the recording and at its latest flush, u64 each: Unix ns, the CPU's time-stamp
# counter (0: none), CLOCK_MONOTONIC ns. Times of records may come from any of these clocks
# (agent/native/kit/clock_samples.c).
CLOCKS_FIRST = 1024
CLOCKS_LAST = 1048

# descriptor: byte offsets in its 64 bytes
STATE = 0  # u32
BUFFER_VALID_BYTES = 8  # u64
BUFFER_SEQUENCE = 16  # u64
BUFFER_RECORDS = 24  # u64

FREE, LOANED, COMPLETED, READY = range(4)

STRING_ENTRY = struct.Struct("<QII")  # key, space, length
