"""Whether the memory that a plug-in announces is an arena: the daemon ends the whole capture over one that is not."""

import fcntl
import os
import struct

from kineto_agent.protocol import arena
from kineto_agent.sources.interface import SourceCounts
from kineto_agent.sources.plugins.worker import PluginLie

_F_GET_SEALS = 1034  # Linux; named in fcntl only if its headers had it when Python was built
_SIZE_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW
_MAX_BUFFERS = 1 << 16
_MAX_BUFFER_BYTES = 64 << 20
_SLACK_BYTES = 64 << 20  # for the header, strings, and the least buffers that a collector works with
_COUNTS = struct.Struct("=QQQ")  # at arena.RECORDS


def check_arena(descriptor: object, limit_bytes: int) -> int:
    """The descriptor, if it is that of an arena within twice the limit. Raises PluginLie, OSError."""
    if type(descriptor) is not int or descriptor <= 2:
        raise PluginLie("announced %.40r as the descriptor of its arena" % (descriptor,))
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as exc:
        raise PluginLie("announced descriptor %d, which is no memfd" % descriptor) from exc
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise PluginLie("announced memory whose size is not sealed")
    size = os.fstat(descriptor).st_size
    if size < arena.HEADER_BYTES or size > 2 * limit_bytes + _SLACK_BYTES:
        raise PluginLie("announced %d bytes of memory; the buffer limit is %d" % (size, limit_bytes))
    _check_header(os.pread(descriptor, arena.FIXED.size, 0), size)
    return descriptor


def _check_header(header: bytes, size: int) -> None:
    found = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack(header)))
    count, buffer_bytes, strings = found["buffer_count"], found["buffer_bytes"], found["strings_offset"]
    descriptors, buffers = found["descriptors_offset"], found["buffers_offset"]
    good = (
        found["magic"] == arena.MAGIC
        and found["header_bytes"] == arena.HEADER_BYTES
        and found["total_bytes"] == size
        and 0 < count <= _MAX_BUFFERS
        and 0 < buffer_bytes <= _MAX_BUFFER_BYTES
        and arena.HEADER_BYTES <= descriptors <= descriptors + count * arena.DESCRIPTOR_BYTES <= strings
        and strings + found["strings_bytes"] <= buffers <= buffers + count * buffer_bytes <= size
        and not (descriptors % 8 or strings % 8 or buffers % 8)
    )
    if not good:
        raise PluginLie("announced memory whose header is not that of an arena")


def counts_in(descriptor: int) -> SourceCounts:
    """What the arena itself says to hold. Raises PluginLie, OSError."""
    records, dropped, size = _COUNTS.unpack(os.pread(descriptor, _COUNTS.size, arena.RECORDS))
    if max(records, dropped, size) >= 1 << 63 or records > size:
        raise PluginLie("left %d records in %d bytes, %d dropped, in its arena" % (records, size, dropped))
    return SourceCounts(records, size, dropped)
