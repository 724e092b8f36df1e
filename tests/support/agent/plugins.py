"""Plug-ins as a daemon sends them, and sources of plug-ins that do everything wrong.

Runs wherever the agent runs (CPython 3.9 and later).
"""

import fcntl
import os
from typing import Any, List, Mapping

from kineto_agent.protocol.plugin_bundle import Plugin, PluginFile, Signs, pack
from kineto_agent.protocol.schema import DEVICE_TRACK, HEADED, Activity, Record, Schema, Texts, to_json
from kineto_agent.system.descriptors import memfd

F_ADD_SEALS, ALL_SEALS = 1033, 0xF
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
HERE = Signs(modules=("sys",))  # in every process
NOWHERE = Signs(modules=("no_such_module",))

# Records three kernels of a microsecond at each start.
GOOD = """
import struct
import time
from kineto_agent.sources.plugins.api import DECLARED_FORMAT, ArenaWriter, SourceError, SourceOutcome

RECORD = struct.Struct("<IIqqII")  # kind, bytes, start, end, name, device


class Session:
    format = DECLARED_FORMAT
    yields = False

    def __init__(self, request):
        self.arena = ArenaWriter("toy", request.buffer_limit_bytes, 4096)
        self.arena_fd = self.arena.fd
        self.metadata = {"way": "by hand"}

    def start(self):
        for number in range(3):
            now_ns = time.time_ns()
            self.arena.append(RECORD, 1, RECORD.size, now_ns, now_ns + 1000, number, 0)
        self.arena.publish()

    def counts(self):
        return self.arena.counts()

    def stop(self):
        self.arena.finish()
        return SourceOutcome(self.arena.counts(), {"version": "7"}, [], 0, 0)

    def give_way(self):
        self.arena.finish()

    def close(self):
        self.arena.close()


class Toy:
    on_request = frozenset()

    def activity_types(self):
        return ["toy_kernel"]

    def prepare(self, request):
        return Session(request)


SOURCE = Toy()
"""


def toy_schema(name: str = "toy") -> Schema:
    """Of what GOOD records."""
    record = Record(
        type=name + "_kernel",
        size=24,
        fields={"start": ("q", 0), "end": ("q", 8), "name": ("I", 16), "device": ("I", 20)},
        name="name",
        texts=Texts(values={0: "first", 1: "second", 2: "third"}),
        device="device",
    )
    activity = Activity(track=DEVICE_TRACK, meaning="A kernel of the toy.")
    return Schema(name=name, types={name + "_kernel": activity}, records={1: record}, framing=HEADED)


def plugin(source: str = GOOD, *, name: str = "toy", signs: Signs = HERE, **members: Any) -> Plugin:
    """One with this source file, and with what `members` say."""
    files = {"source.py": one_piece(source), **members.pop("files", {})}
    libraries: Mapping[str, bytes] = members.pop("libraries", {})
    return Plugin(name, signs, to_json(toy_schema(name)), files, libraries, **members)


def one_piece(text: str, annotations: bool = False) -> PluginFile:
    """A Python file in one piece."""
    return PluginFile(((1, text),), annotations)


def bad(method: str, body: str) -> str:
    """GOOD with another body of one method of Toy or Session; `body` is one line."""
    lines: List[str] = []
    skip = False
    for line in GOOD.splitlines():
        if line.startswith("    def "):
            skip = line.startswith("    def %s(" % method)
            lines.append(line)
            if skip:
                lines.append("        " + body)
            continue
        if skip and line.startswith("        "):
            continue
        skip = False
        lines.append(line)
    text = "\n".join(lines) + "\n"
    assert body in text, method
    return text


def sealed(plugins: List[Plugin], seals: int = ALL_SEALS) -> int:
    """A memfd with them."""
    return sealed_bytes(pack(plugins), seals)


def sealed_bytes(data: bytes, seals: int = ALL_SEALS) -> int:
    """A memfd with these bytes."""
    descriptor = memfd("plugins", MFD_CLOEXEC | MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor
