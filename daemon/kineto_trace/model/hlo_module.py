"""A module compiled by XLA, reduced to the kernels it launches and their order."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_UNNAMED = re.compile(r"\W")


class Launch(Enum):
    """What an instruction launches."""

    FUSION = "one kernel, named after it or after one that does the same"
    COPY = "a copy"
    COLLECTIVE = "kernels of a communication library"
    LIBRARY = "kernels of a library, or its own"
    CALL = "the instructions of a computation"
    LOOP = "the instructions of a condition and a body, any number of times"
    BRANCH = "the instructions of one of several computations"


@dataclass(frozen=True, slots=True)
class HloInstruction:
    """An instruction that launches something.

    same_kernel: equal for instructions that share a kernel.
    called: computations.
    """

    name: str
    launch: Launch
    same_kernel: str
    op_name: str
    source: str
    called: tuple[int, ...]

    @property
    def kernel_name(self) -> str:
        """Returns the name of a kernel that was made for it."""
        return _UNNAMED.sub("_", self.name)


@dataclass(frozen=True, slots=True)
class HloModule:
    """A compiled module. computations: by id, in the order of the schedule; entry: the one that it runs."""

    name: str
    entry: int
    computations: Mapping[int, tuple[HloInstruction, ...]]
