"""Starts a thread of our own in the target: pthread_create on constant code, with an argument in the region's page."""

from collections.abc import Callable

from kinetod.attach.attach_types import Bootstrap, Deadline, Stop
from kinetod.attach.inject.injection import CallOutcome, CallRequest, Plan, hand_over
from kinetod.attach.inject.thread_policy import NativeThreadPolicy
from kinetod.attach.inject.trampoline import PAYLOAD_OFFSET, SPARE_OFFSET
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods import python_entry
from kinetod.attach.methods.pending_call import python_of, starting_or_ending
from kinetod.attach.methods.python_entry import Handed, PythonEntry

_Argument = Callable[[int, tuple[int, ...]], bytes]  # from its own address and those of the codes


class NativeThread(PythonEntry):
    """Implements `method.Method`. The thread takes the GIL, runs the bootstrap and ends."""

    name = "native_thread"

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """See Method."""
        self.finish()
        python = python_of(target)

        def argument(page: int, placed: tuple[int, ...]) -> bytes:
            self.handed = Handed(target, page)
            return python_entry.argument(target, python, python_entry.THREAD, page, placed, bootstrap.source)

        outcome = _start(target, python_entry.codes(), argument, deadline, python.address("Py_IsInitialized"))
        if not outcome.initialised:
            raise starting_or_ending(target)
        return _checked(target, outcome)


def start_thread(image: TargetImage, code: bytes, argument: bytes, deadline: Deadline) -> Stop:
    """Starts a thread on machine code; its first parameter is the address of a copy of `argument`. Raises AttachError.

    code: position-independent and constant (all attaches to this process share it, and it stays), at most a few hundred
    bytes, its last byte not zero, on aarch64 its first instruction `bti c`. argument: at most 4032 bytes; it stays too,
    writable. All signals are blocked in the thread. It is joinable: the code should begin with
    pthread_detach(pthread_self()).
    """
    return _checked(image, _start(image, (code,), lambda _page, _placed: argument, deadline, 0))


def _start(
    image: TargetImage, codes: tuple[bytes, ...], argument: _Argument, deadline: Deadline, check: int
) -> CallOutcome:
    create = image.libc_symbol("pthread_create")

    def request(region: int, placed: tuple[int, ...]) -> CallRequest:
        address = region + PAYLOAD_OFFSET
        return CallRequest(create, (region + SPARE_OFFSET, 0, placed[0], address), argument(address, placed), check)

    return hand_over(
        image, Plan(NativeThreadPolicy(image), request, codes, min(len(codes), python_entry.CODES_NEEDED)), deadline
    )


def _checked(image: TargetImage, outcome: CallOutcome) -> Stop:
    error = outcome.result & 0xFFFFFFFF
    if error:
        raise python_entry.no_thread(image.pid, error)
    return outcome.stop
