"""A small arena as bytes."""

import struct

from kineto_agent.protocol import arena

BUFFERS, BUFFER_BYTES, STRINGS_BYTES = 3, 512, 256


def small_arena(*, ready: int) -> bytes:
    """So many of its buffers are READY and full; its string table is half full."""
    strings_at = arena.HEADER_BYTES + BUFFERS * arena.DESCRIPTOR_BYTES
    strings_at += -strings_at % 8
    buffers_at = strings_at + STRINGS_BYTES
    total = buffers_at + BUFFERS * BUFFER_BYTES
    data = bytearray(total)
    fixed = {
        "magic": arena.MAGIC, "header_bytes": arena.HEADER_BYTES, "buffer_count": BUFFERS,
        "buffer_bytes": BUFFER_BYTES, "descriptors_offset": arena.HEADER_BYTES, "strings_offset": strings_at,
        "strings_bytes": STRINGS_BYTES, "buffers_offset": buffers_at, "total_bytes": total,
    }  # fmt: skip
    arena.FIXED.pack_into(data, 0, *(fixed[name] for name in arena.FIXED_FIELDS))
    struct.pack_into("<Q", data, arena.STRINGS_USED, STRINGS_BYTES // 2)
    for index in range(ready):
        at = arena.HEADER_BYTES + index * arena.DESCRIPTOR_BYTES
        struct.pack_into("<Q", data, at + arena.BUFFER_VALID_BYTES, BUFFER_BYTES)
        struct.pack_into("<Q", data, at + arena.BUFFER_SEQUENCE, index)
        struct.pack_into("<I", data, at, arena.READY)
    return bytes(data)
