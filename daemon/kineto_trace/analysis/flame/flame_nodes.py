"""What a flame graph draws: frames with the frames that they called, as many as fit on a page."""

from dataclasses import dataclass
from enum import StrEnum

NS, SAMPLES = "ns", "samples"  # units


class FlameKind(StrEnum):
    """What a frame is; a colour of the drawing."""

    ALL = "all"  # the outermost frame: everything
    THREAD = "thread"
    FUNCTION = "function"  # a line of it, too
    ANNOTATION = "annotation"
    OPERATOR = "operator"
    GPU = "gpu"  # a kernel, copy or fill
    WAITING = "waiting"  # for the GIL
    IDLE = "idle"
    MODULE = "module"
    OTHERS = "others"  # frames that are too narrow to be drawn, as one


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameNode:
    """A frame and what it called. Values are whole ns or samples: `total` is `own` and the children's totals, exactly.

    key: names the frame in addresses; equal stacks have equal ones. start, width: where it is drawn, in the same unit
    from the beginning of the graph; width is total, except for OTHERS in order of time, which spans what it stands for.
    frames: how many it stands for. base_total, base_own: of the baseline, scaled to as many steps or seconds; None
    without a baseline.
    """

    name: str
    kind: FlameKind
    key: str
    start: int
    width: int
    total: int
    own: int
    frames: int = 1
    base_total: float | None = None
    base_own: float | None = None
    children: tuple["FlameNode", ...] = ()
