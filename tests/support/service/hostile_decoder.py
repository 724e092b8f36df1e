"""A decode worker whose decoder was taken over: it runs the code that a job names as its format.

The code finds its own folder as `own` and the daemon's as it likes; what it puts into `said` is told. It stands for
any bug in a parser, so nothing in it goes through the decoder.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kinetod.captures.result.decode_worker import main
from kinetod.sandbox.confinement import ENVIRONMENT


class Taken(NamedTuple):
    """Stands in for a Conversion."""

    said: Any

    def to_dict(self) -> dict[str, Any]:
        """What the daemon gets as the answer."""
        return {"said": self.said}


def attack(target_dir: Path, *, formats: Sequence[str]) -> Taken:
    """Runs the code of the attack; there is none in what a worker decodes to warm up."""
    names: dict[str, Any] = {"own": target_dir, "said": None}
    exec("".join(formats), names)
    return Taken(names["said"])


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)  # before Arrow is there, as in the real one
    from kineto_trace.conversion import worker_job

    setattr(worker_job, "convert_target", attack)  # noqa: B010 - the name is imported there, not made
    sys.exit(main())
