"""Runs the bootstrap by a pending call: the main thread executes it between two bytecodes.

The call is python_stub.c, which starts a thread for the bootstrap: no Python runs on the main thread.
"""

import time

from kinetod.attach.attach_types import AttachCode, AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.inject.injection import CallRequest, Plan, hand_over
from kinetod.attach.inject.thread_policy import PendingCallPolicy
from kinetod.attach.inject.trampoline import PAYLOAD_OFFSET
from kinetod.attach.inspect.target_image import PythonImage, TargetImage
from kinetod.attach.methods import python_entry
from kinetod.attach.methods.python_entry import Handed, PythonEntry

_QUEUE_FULL_RETRY_S = 0.02
_MAX_QUEUE_FULL = 10  # each costs the target a page


class PendingCall(PythonEntry):
    """Implements `method.Method`."""

    name = "pending_call"

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """See Method."""
        self.finish()
        python = python_of(target)
        add, check = python.address("Py_AddPendingCall"), python.address("Py_IsInitialized")

        def request(region: int, placed: tuple[int, ...]) -> CallRequest:
            page = region + PAYLOAD_OFFSET
            self.handed = Handed(target, page)
            argument = python_entry.argument(target, python, python_entry.PENDING, page, placed, bootstrap.source)
            return CallRequest(add, (placed[0], page), argument, check)

        plan = Plan(PendingCallPolicy(target), request, python_entry.codes(), python_entry.CODES_NEEDED)
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
            f"the queue of pending calls of process {target.pid} is full: its main thread is not running them",
        )


def python_of(target: TargetImage) -> PythonImage:
    """Returns the interpreter of a process. Raises AttachError if it has none."""
    if target.python is None:
        raise AttachError(AttachCode.UNSUPPORTED, f"process {target.pid} ({target.exe}) has no Python interpreter")
    return target.python


def starting_or_ending(target: TargetImage) -> AttachError:
    """Error for an interpreter that is not initialised."""
    return AttachError(
        AttachCode.UNSUITABLE, f"the Python interpreter of process {target.pid} is starting or ending; try again"
    )
