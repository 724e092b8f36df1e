"""What every way into a Python process can do."""

from typing import Protocol

from kinetod.attach.attach_types import AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.inspect.target_image import TargetImage


class Method(Protocol):
    """One way to make a Python process run the bootstrap. Blocking; used in the helper process only."""

    name: str

    def hand_over(self, target: TargetImage, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        """Raises AttachError; then the target is as it was and has not got the code."""

    def problem(self) -> AttachError | None:
        """Why what was handed over does not run and will not; None: it runs, has run, or may still do so."""

    def finish(self) -> None:
        """The code has run, or is given up: take back what waits for it. Idempotent, raises nothing, waits ≤ 50 ms."""
