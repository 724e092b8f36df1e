"""What every way into a Python process can do."""

from typing import Protocol

from kinetod.attach.attach_types import AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.inspect.target_image import TargetImage


class Method(Protocol):
    """One way to make a Python process run the bootstrap. Blocking; used in the helper process only."""

    name: str

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Hands the bootstrap over. Raises AttachError; the target then does not have the code."""

    def problem(self) -> AttachError | None:
        """Why the injected code does not run and never will; None if it runs, has run or may still run."""

    def finish(self) -> None:
        """Withdraws code that has not run yet. Idempotent, never raises, waits at most 50 ms."""
