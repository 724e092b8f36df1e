"""Runs the bootstrap as a pending call: the main thread executes it between two bytecodes.

PyRun_SimpleString happens to have the signature of a pending call, int (*)(void *): no code is needed for it.
"""

import time

from kinetod.attach.hand_over import Plan, Request, hand_over
from kinetod.attach.image import PythonImage, TargetImage
from kinetod.attach.interface import AttachCode, AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.threads import PendingCallPolicy
from kinetod.attach.trampoline import PAYLOAD_OFFSET

_QUEUE_FULL_RETRY_S = 0.02
_MAX_QUEUE_FULL = 10  # every one costs the target a page


class PendingCall:
    """Implements interface.Method."""

    name = "pending_call"

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Raises AttachError."""
        python = python_of(target)
        run, add = python.address("PyRun_SimpleString"), python.address("Py_AddPendingCall")
        check = python.address("Py_IsInitialized")

        def request(region: int, _placed: tuple[int, ...]) -> Request:
            return Request(add, (run, region + PAYLOAD_OFFSET), bootstrap.source + b"\0", check)

        plan = Plan(PendingCallPolicy(target), request)
        for _attempt in range(_MAX_QUEUE_FULL):
            outcome = hand_over(target, plan, deadline)
            if not outcome.initialised:
                raise starting_or_ending(target)
            if outcome.result & 0xFFFFFFFF == 0:
                return outcome.stop
            if deadline.left_s < _QUEUE_FULL_RETRY_S:
                break
            time.sleep(_QUEUE_FULL_RETRY_S)
            target.refresh()
        raise AttachError(
            AttachCode.FAILED,
            f"the queue of pending calls of process {target.pid} is full: its main thread does not come round",
        )

    def finish(self) -> None:
        """Nothing of it waits outside of the process."""


def python_of(target: TargetImage) -> PythonImage:
    """Raises AttachError when it is no Python process."""
    if target.python is None:
        raise AttachError(AttachCode.UNSUPPORTED, f"process {target.pid} ({target.exe}) has no Python interpreter")
    return target.python


def starting_or_ending(target: TargetImage) -> AttachError:
    """The error for an interpreter that is not initialised."""
    return AttachError(
        AttachCode.UNSUITABLE, f"the Python interpreter of process {target.pid} is starting or ending; try again"
    )
