"""ELF files in which the daemon looks for device code that launches graphs."""

import os
from collections.abc import Iterator

from kinetod.attach.inspect import process_inspection
from kinetod.attach.inspect.device_graph_code import launches_graphs
from support.machine import device_code

_fd = os.memfd_create("fuzz")


def play(data: bytes) -> None:
    os.ftruncate(_fd, 0)
    os.pwrite(_fd, data, 0)
    try:
        launches_graphs(_fd)
        process_inspection._section_names(_fd)
    except OSError:
        return


def seeds() -> Iterator[bytes]:
    """What the tests' own programs have."""
    for code in (device_code.LAUNCHING, device_code.cubin({"kernel": 1})):
        yield device_code.program(device_code.fatbin(code))
