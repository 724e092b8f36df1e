"""Starts a thread of our own in the target: pthread_create on constant code, with an argument in the region's page."""

import os
import struct
from collections.abc import Callable

from kinetod.attach.hand_over import Outcome, Plan, Request, hand_over
from kinetod.attach.image import TargetImage
from kinetod.attach.interface import AttachCode, AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.machine import this_machine
from kinetod.attach.pending_call import python_of, starting_or_ending
from kinetod.attach.threads import NativeThreadPolicy
from kinetod.attach.trampoline import PAYLOAD_OFFSET, PYTHON_THREAD, SPARE_OFFSET

_TABLE = struct.Struct("<6Q")  # see thread_*.S


class NativeThread:
    """Implements interface.Method. The thread takes the GIL, runs the bootstrap and ends."""

    name = "native_thread"

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Raises AttachError."""
        python = python_of(target)
        functions = (
            target.libc_symbol("pthread_self"),
            target.libc_symbol("pthread_detach"),
            python.address("PyGILState_Ensure"),
            python.address("PyRun_SimpleString"),
            python.address("PyGILState_Release"),
        )

        def argument(address: int) -> bytes:
            return _TABLE.pack(*functions, address + _TABLE.size) + bootstrap.source + b"\0"

        code = PYTHON_THREAD[this_machine().name]
        outcome = _start(target, code, argument, deadline, python.address("Py_IsInitialized"))
        if not outcome.initialised:
            raise starting_or_ending(target)
        return _checked(target, outcome)

    def finish(self) -> None:
        """Nothing of it waits outside of the process."""


def start_thread(image: TargetImage, code: bytes, argument: bytes, deadline: Deadline) -> Stop:
    """Start a thread on machine code, its first parameter the address of a copy of `argument`. Raises AttachError.

    The code: position-independent and constant (it is shared by all attaches to this process, and stays), at most
    some hundred bytes, its last byte not zero, on aarch64 its first instruction `bti c`. The argument: at most 4032
    bytes; it stays too, writable. All signals are blocked in the thread. It is joinable: the code should begin by
    pthread_detach(pthread_self()).
    """
    return _checked(image, _start(image, code, lambda _address: argument, deadline, 0))


def _start(
    image: TargetImage, code: bytes, argument: Callable[[int], bytes], deadline: Deadline, check: int
) -> Outcome:
    create = image.libc_symbol("pthread_create")

    def request(region: int, placed: tuple[int, ...]) -> Request:
        address = region + PAYLOAD_OFFSET
        return Request(create, (region + SPARE_OFFSET, 0, placed[0], address), argument(address), check)

    return hand_over(image, Plan(NativeThreadPolicy(image), request, (code,)), deadline)


def _checked(image: TargetImage, outcome: Outcome) -> Stop:
    error = outcome.result & 0xFFFFFFFF
    if error:
        raise AttachError(
            AttachCode.LIMIT,
            f"process {image.pid} cannot start a thread: {os.strerror(error)}; raise its limits: of threads"
            " (pids.max of its control group, 'ulimit -u') or of addresses ('ulimit -v')",
        )
    return outcome.stop
