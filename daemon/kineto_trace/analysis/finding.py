"""What a finding is: a cause of lost time that a person can do something about."""

from dataclasses import dataclass

# Nobody can say how much of their time can be saved.
GUESSES = frozenset(
    {
        "kernel_gaps",
        "queued",
        "unknown_idle",
        "unmeasured_convolutions",
        "busy_function",
        "framework_work",
        "memory_bound",
        "compute_bound",
        "latency_bound",
        "throttled_clock",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """saving_ns: over all steps that its rule looks at, as the mean of the GPUs.

    causes: the causes of view time_causes whose time it would take away; it never claims more than they have. op: row
    of cpu_op that shows it best; frame: likewise of python_function; -1: none. kernels: names, the longest first.
    where: function, file and line of the program's own code; "": none. replayed: whether the saving was found by
    running the steps again without what the finding names, and without what recording cost.
    """

    name: str
    title: str
    saving_ns: int
    advice: str
    evidence: str
    causes: tuple[str, ...] = ()
    op: int = -1
    frame: int = -1
    kernels: tuple[str, ...] = ()
    where: str = ""
    replayed: bool = False

    @property
    def guess(self) -> bool:
        """Whether nobody can say how much of the time can be saved; such findings come last."""
        return self.name in GUESSES
