"""Processes as `kinetoctl ps` lists them: one row each. Pure."""

from typing import TYPE_CHECKING

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.cell_values import NOTHING
from kinetoctl.output.json_yaml import plain
from kinetoctl.output.lists.listing import ListColumn, ListKind

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

OTHER_VERSION = "agent of another version"


def traceable(process: "pb.Process") -> str:
    """How a capture would reach it, or why none would."""
    state = enum_names.agent_state(process.agent_state)
    if process.obstacle or state == "INCOMPATIBLE":
        return f"no: {process.obstacle or OTHER_VERSION}"
    if state == "BUSY":
        return "busy"
    if state == "READY":
        return "attached" if process.attached else "ready"
    return "attach"


def rate(process: "pb.Process") -> str:
    """Iterations per second."""
    return f"{1e9 / process.iteration_ns:.3g}" if process.iteration_ns > 0 else NOTHING


def _agent(process: "pb.Process") -> str:
    """The state of the agent; KINETO where there is none, but a libkineto that polls."""
    state = enum_names.agent_state(process.agent_state)
    return "KINETO" if state == "NONE" and process.HasField("kineto") else state


def _libkineto(process: "pb.Process") -> str:
    if not process.HasField("kineto"):
        return NOTHING
    return "traces" if process.kineto.tracing else "polls"


def _rank(process: "pb.Process") -> str:
    return str(process.rank) if process.HasField("rank") else NOTHING


COLUMNS = (
    ListColumn(title="PID", cell=lambda each: str(each.pid)),
    ListColumn(title="USER", cell=lambda each: each.user or str(each.uid)),
    ListColumn(title="JOB", cell=lambda each: each.job_id or NOTHING, optional=True),
    ListColumn(title="RANK", cell=_rank),
    ListColumn(
        title="WORLD", cell=lambda each: str(each.world_size) if each.HasField("world_size") else NOTHING, wide=True
    ),
    ListColumn(title="GPU", cell=lambda each: ",".join(map(str, each.gpus)) or NOTHING),
    ListColumn(title="AGE", cell=lambda each: units.age(each.start_time_ns), moves=True),
    ListColumn(title="STARTED", cell=lambda each: units.moment(each.start_time_ns), wide=True),
    ListColumn(title="ITER", cell=lambda each: str(each.iterations) if each.iterations > 0 else NOTHING, moves=True),
    ListColumn(title="ITER/S", cell=rate, optional=True, moves=True),
    ListColumn(title="PARENT", cell=lambda each: str(each.parent_pid or NOTHING)),
    ListColumn(title="TRACE", cell=traceable),
    ListColumn(title="KINETO", cell=_libkineto, optional=True),
    ListColumn(title="FRAMEWORK", cell=lambda each: each.framework or NOTHING, wide=True),
    ListColumn(title="PYTHON", cell=lambda each: each.python_version or NOTHING, wide=True),
    ListColumn(title="AGENT", cell=_agent, wide=True),
    ListColumn(title="CONTAINER", cell=lambda each: each.container_id[:12] or NOTHING, wide=True, optional=True),
    ListColumn(title="POD", cell=lambda each: enum_names.pod(each) or NOTHING, optional=True),
    ListColumn(title="COMMAND", cell=lambda each: " ".join(each.command)),
)
PROCESSES = ListKind(
    columns=COLUMNS,
    key=lambda each: (each.pid, each.start_time_ns),
    document=plain,
    orders={
        "pid": (lambda each: each.pid, False),
        "age": (lambda each: each.start_time_ns, False),  # the oldest first
        "user": (lambda each: (each.user, each.pid), False),
        "job": (lambda each: (each.job_id == "", each.job_id, each.rank, each.pid), False),
        "rank": (lambda each: (not each.HasField("rank"), each.rank, each.pid), False),
        "gpu": (lambda each: (not each.gpus, list(each.gpus), each.pid), False),
        "iterations": (lambda each: each.iterations, True),
        "pace": (lambda each: 1 / each.iteration_ns if each.iteration_ns else 0.0, True),
    },
)
