"""The plug-ins that the daemon sends to an agent: one sealed memfd, read as a whole. No I/O.

Theory of operation
    kinetod loads the plug-ins that its configuration allows (kinetod.plugins), in processes of its own, and sends every
    agent that accepts them a `wire.Plugins` with one memfd. `pack` creates its content, `unpack` reads it:

        magic, u64 length of the head, head (JSON), the shared libraries one after the other

    The Python files come as pieces of some lines, so that an agent compiles them without keeping the GIL for long. The
    agent passes the schema on with the arenas as data; only decoders read it.
"""

import json
import struct
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Tuple

from kineto_agent.protocol.wire import PLUGIN_INTERFACE

SOURCE_FILE = "source.py"  # the file that has SOURCE
MAX_BUNDLE_BYTES = 16 << 20  # an agent keeps it in memory
DETACH_FULL, DETACH_IDLE, DETACH_NEVER = "full", "idle", "never"
DETACHES = (DETACH_FULL, DETACH_IDLE, DETACH_NEVER)
# Modules that a plug-in's Python files may import besides the standard library and each other.
PLUGIN_API = ("kineto_agent.sources.plugins.api", "kineto_agent.sources.interface")

_MAGIC = b"KPLUGIN1"
_HEAD = struct.Struct("<8sQ")


class Signs(NamedTuple):
    """Signs that a process uses the accelerator. Cheap: nothing is loaded or opened.

    Each non-empty member must have at least one match. Patterns are those of fnmatch, case-sensitive.
    """

    libraries: Tuple[str, ...] = ()  # names of mapped files: "libnpu.so*"
    device_files: Tuple[str, ...] = ()  # paths that exist: "/dev/npu[0-9]*"
    environment: Tuple[str, ...] = ()  # variables that are set, or have a value: "NPU_HOME", "NPU_MODE=train*"
    modules: Tuple[str, ...] = ()  # Python modules that the program has imported: "torch_npu"


class PluginFile(NamedTuple):
    """A Python file. pieces: (first line, text), whole statements. annotations: it postpones their evaluation."""

    pieces: Tuple[Tuple[int, str], ...]
    annotations: bool


class Plugin(NamedTuple):
    """One plug-in as sent to an agent; kinetod.plugins.accelerator explains the members."""

    name: str
    signs: Signs
    schema: Mapping[str, Any]  # in the form of schema.to_json
    files: Mapping[str, PluginFile]  # by name, such as "source.py"
    libraries: Mapping[str, bytes]  # by name, such as "libnpu_collector.so"
    conflicts: FrozenSet[str] = frozenset()
    needs_from_start: str = ""
    detach: str = DETACH_FULL
    interface_version: int = PLUGIN_INTERFACE

    @property
    def activity_types(self) -> FrozenSet[str]:
        """The activity types that its schema declares."""
        return frozenset(self.schema["types"])


def pack(plugins: List[Plugin]) -> bytes:
    """The content of the memfd. Raises ValueError if it is too large for an agent."""
    rows, libraries, offset = [], [], 0
    for plugin in plugins:
        places = {}
        for name, data in plugin.libraries.items():
            places[name] = (offset, len(data))
            libraries.append(data)
            offset += len(data)
        rows.append({**plugin._asdict(), "libraries": places, "conflicts": sorted(plugin.conflicts)})
    head = json.dumps(rows, separators=(",", ":")).encode()
    size = _HEAD.size + len(head) + offset
    if size > MAX_BUNDLE_BYTES:
        raise ValueError("all plug-ins together have %d bytes, but at most %d can be sent" % (size, MAX_BUNDLE_BYTES))
    return b"".join((_HEAD.pack(_MAGIC, len(head)), head, *libraries))


def unpack(data: bytes) -> List[Plugin]:
    """Reads the plug-ins in a content, without those of another interface version. Raises ValueError."""
    if len(data) < _HEAD.size or len(data) > MAX_BUNDLE_BYTES:
        raise ValueError("a bundle of plug-ins has %d to %d bytes, not %d" % (_HEAD.size, MAX_BUNDLE_BYTES, len(data)))
    magic, length = _HEAD.unpack_from(data)
    begin = _HEAD.size + length
    if magic != _MAGIC or begin > len(data):
        raise ValueError("not a bundle of plug-ins: it begins with %r" % data[: _HEAD.size])
    try:
        rows = json.loads(data[_HEAD.size : begin])
        return [_plugin(row, data, begin) for row in rows if row["interface_version"] == PLUGIN_INTERFACE]
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise ValueError("the header of the plug-ins is damaged: %r" % exc) from exc


def _plugin(row: Dict[str, Any], data: bytes, begin: int) -> Plugin:
    if not isinstance(row["schema"]["types"], dict):
        raise TypeError("a schema without types")
    files = {}
    for name, (pieces, annotations) in row["files"].items():
        files[name] = PluginFile(tuple((int(line), str(text)) for line, text in pieces), bool(annotations))
    libraries = {}
    for name, (offset, size) in row["libraries"].items():
        if not (offset >= 0 and size >= 0 and begin + offset + size <= len(data)):
            raise ValueError("the library %.80s lies beyond the end of the plug-ins" % name)
        libraries[name] = data[begin + offset : begin + offset + size]
    return Plugin(
        name=str(row["name"]),
        signs=Signs(*(tuple(map(str, patterns)) for patterns in row["signs"])),
        schema=row["schema"],
        files=files,
        libraries=libraries,
        conflicts=frozenset(map(str, row["conflicts"])),
        needs_from_start=str(row["needs_from_start"]),
        detach=str(row["detach"]),
    )
