"""Where threads stand, and the processes whose main threads stand in the same place. Pure.

Theory of operation
    The place of a stack is its innermost frame in code of the program, or its innermost frame if there is none.
    Processes are one group if their main threads wait for the same and have the same frames. If that gives more than
    MOST_GROUPS groups, it is enough that they wait for the same at the same place. A process whose threads or frames
    could not be read stands nowhere, unless the kernel says that it does not run; such processes are the last group.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import share
from kineto_trace.base.source_places import source_file

MOST_GROUPS = 5
TOGETHER = {pb.WAIT_COLLECTIVE, pb.WAIT_GPU}  # in which a rank waits for what others have to do as well
_IDLE = {pb.WAIT_EVENTS, pb.WAIT_QUEUE, pb.WAIT_LOCK, pb.WAIT_UNSPECIFIED}  # what pools of threads do without work
_IDLE_NATIVE = {*_IDLE, pb.WAIT_FILE, pb.WAIT_NETWORK, pb.WAIT_SLEEP}  # the same, of threads without Python
RUNS = "runs"
_BY_STATE = {
    pb.THREAD_STATE_RUNNING: RUNS,
    pb.THREAD_STATE_SLEEPING: "waits",
    pb.THREAD_STATE_UNINTERRUPTIBLE: "waits in the kernel",
    pb.THREAD_STATE_STOPPED: "is stopped",
    pb.THREAD_STATE_TRACED: "is stopped by a debugger",
    pb.THREAD_STATE_ENDED: "has ended",
}
_BY_WAIT = {pb.WAIT_NONE: RUNS, pb.WAIT_STOPPED: "is stopped"}
_IN_COLLECTIVE = re.compile(r"waits in (\w+)")
_WAITS_TO_JOIN = "waits for the other ranks to join"
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_DECORATOR = "wrapper"  # of the functions there, in PyTorch 2.0
_JOINS = re.compile(
    r"init_process_group|_new_process_group_helper|_store_based_barrier|rendezvous|_?(new|split)_\w*group\w*"
)
_POINT_TO_POINT = re.compile(r"i?(send|recv)(_\w+)?|batch_isend_irecv")
JOIN = "join"  # all by which process groups come into being, as one collective
_GPU_WORK = ("tensor_active", "fp64_active", "fp32_active", "fp16_active", "dram_active")
_GPU_ACTIVE, _GPU_BUSY = 0.02, 0.99  # below is idle, above is busy without a pause
_KERNEL_TELLS = {pb.THREAD_STATE_STOPPED, pb.THREAD_STATE_TRACED, pb.THREAD_STATE_ENDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProcess:
    """One process that was asked where it stands. host: its name, if there are several hosts."""

    stacks: pb.ProcessStacks
    host: str = ""

    @property
    def pid(self) -> int:
        """In the PID namespace of its daemon."""
        return self.stacks.process.pid

    @property
    def rank(self) -> int | None:
        """None: it has none."""
        return self.stacks.process.rank if self.stacks.process.HasField("rank") else None

    @property
    def main(self) -> pb.ThreadStack | None:
        """Its main thread; None if that could not be read.

        Without its frames, what it waits for is a guess, unless the kernel says that it is stopped or has ended.
        """
        main = self.main_without_frames
        if main is None or not self.stacks.reason or main.frames:
            return main
        return main if main.state in _KERNEL_TELLS or main.wait == pb.WAIT_STOPPED else None

    @property
    def main_without_frames(self) -> pb.ThreadStack | None:
        """Its main thread, even if its frames could not be read; None if nothing of it is known."""
        return next((thread for thread in self.stacks.threads if thread.main), None)

    @property
    def order(self) -> tuple[Any, ...]:
        """By rank, then by host and pid."""
        return (self.rank is None, self.rank or 0, self.host, self.pid)


def does(thread: pb.ThreadStack) -> str:
    """What it does, in words that follow "it "."""
    by_state = _BY_STATE.get(thread.state, "is in an unknown state")
    if thread.state == pb.THREAD_STATE_ENDED:
        return by_state
    return thread.waits or _BY_WAIT.get(thread.wait) or by_state


def gpu_does(gpu: pb.GpuSample) -> str:
    """What a GPU did during the look, in words that follow "GPU 0 "; empty: unknown."""
    if not gpu.works:
        return "is not responding (it has fallen off the bus or must be reset)"
    busy = next((getattr(gpu, name) for name in ("graphics_active", "utilization") if gpu.HasField(name)), None)
    work = [getattr(gpu, name) for name in _GPU_WORK if gpu.HasField(name)]
    if not work and gpu.HasField("memory_utilization"):
        work = [gpu.memory_utilization]
    if busy is None:
        return ""
    if busy < _GPU_ACTIVE:
        does = "is idle"
    elif busy > _GPU_BUSY and work and max(work) < _GPU_ACTIVE:
        does = "is busy without floating-point work or memory traffic, as when a kernel waits"
    else:
        does = f"is busy {share(busy, 1)} of the time"
    xids = ", ".join(map(str, sorted(gpu.xid_errors)))
    return f"{does}, with Xid {xids} reported" if xids else does


def gpus_do(processes: Iterable[ReadProcess]) -> dict[str, list[pb.GpuSample]]:
    """These processes' GPUs, grouped by what they do; GPUs whose state is unknown are left out."""
    found: dict[str, list[pb.GpuSample]] = {}
    gpus = {(each.host, gpu.gpu.index): gpu for each in processes for gpu in each.stacks.gpus}
    for gpu in gpus.values():
        if text := gpu_does(gpu):
            found.setdefault(text, []).append(gpu)
    return found


def place(thread: pb.ThreadStack) -> pb.Frame | None:
    """The frame where it stands; None if it has no Python frame."""
    return next((frame for frame in thread.frames if frame.own), next(iter(thread.frames), None))


def line_of(frame: pb.Frame, *, complete: bool = False) -> str:
    """`train.py:6`. complete: with the whole path."""
    path = frame.file if complete else source_file(frame.file)
    return f"{path}:{frame.line}" if frame.line > 0 else path


def stands(thread: pb.ThreadStack) -> str:
    """What it does and where: `waits for a lock in load (train.py:6)`, `waits in all_reduce (train.py:12)`.

    A comma ends words that have one themselves: `opens a file, which does not answer, in load (train.py:6)`.
    """
    frame = place(thread)
    if frame is None:
        return does(thread)
    what = does(thread)
    function = "" if thread.wait == pb.WAIT_COLLECTIVE else f"{',' if ', ' in what else ''} in {frame.function}"
    return f"{what}{function} ({line_of(frame)})"


def collective(thread: pb.ThreadStack) -> str:
    """The name of the collective in which it waits; empty if it is unknown or it waits in none.

    The program calls the outermost function of torch.distributed; how deep that calls others is a matter of the moment.
    """
    if thread.wait != pb.WAIT_COLLECTIVE:
        return ""
    inside = takewhile(lambda frame: not frame.own, thread.frames)
    functions = [frame.function.rpartition(".")[2] for frame in inside if frame.file.endswith(_COLLECTIVES)]
    names = [name for name in functions if name != _DECORATOR]
    said = _IN_COLLECTIVE.fullmatch(thread.waits)
    name = names[-1] if names else said[1] if said else ""
    joins = _JOINS.fullmatch(name) or (not name and thread.waits.startswith(_WAITS_TO_JOIN))
    return JOIN if joins else name


def is_point_to_point(name: str) -> bool:
    """Whether the function of this name sends or receives: the ranks of a pair call different ones."""
    return _POINT_TO_POINT.fullmatch(name) is not None


def stack_key(thread: pb.ThreadStack) -> tuple[Any, ...]:
    """Equal for threads that do the same in the same frames."""
    return (thread.wait, does(thread), *((frame.function, frame.file, frame.line) for frame in thread.frames))


def _place_key(thread: pb.ThreadStack) -> tuple[Any, ...]:
    frame = place(thread)
    return (thread.wait, collective(thread), *((frame.function, frame.file, frame.line) if frame else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Processes whose main threads stand in the same place, by rank. alike: whether all their frames are the same."""

    members: tuple[ReadProcess, ...]
    alike: bool = True

    @property
    def main(self) -> pb.ThreadStack | None:
        """The main thread of the first member."""
        return self.members[0].main

    @property
    def wait(self) -> "pb.Wait":
        """What that waits for; WAIT_UNSPECIFIED if it could not be read."""
        return pb.WAIT_UNSPECIFIED if self.main is None else self.main.wait


def grouped(processes: Iterable[ReadProcess]) -> list[StackGroup]:
    """All processes in groups, the smallest first and those that could not be read last.

    Of groups of one size, those come last that wait for the others or for the GPU.
    """
    ordered = sorted(processes, key=lambda each: each.order)
    read = [each for each in ordered if each.main is not None]
    found = _by(stack_key, read)
    if len(found) > MOST_GROUPS:
        found = _by(_place_key, read)
    found.sort(key=lambda group: (len(group.members), group.wait in TOGETHER, group.members[0].order))
    unread = tuple(each for each in ordered if each.main is None)
    return [*found, *([StackGroup(members=unread)] if unread else ())]


def _by(key: Callable[[pb.ThreadStack], tuple[Any, ...]], read: Sequence[ReadProcess]) -> list[StackGroup]:
    found: dict[tuple[Any, ...], list[ReadProcess]] = {}
    for each in read:
        assert each.main is not None
        found.setdefault(key(each.main), []).append(each)
    return [
        StackGroup(members=tuple(members), alike=len({stack_key(each.main) for each in members if each.main}) == 1)
        for members in found.values()
    ]


def is_idle(thread: pb.ThreadStack) -> bool:
    """Whether it waits for work outside of the program's code."""
    if any(frame.own for frame in thread.frames):
        return False
    return thread.wait in (_IDLE if thread.frames else _IDLE_NATIVE)


def other_threads(group: StackGroup) -> tuple[list[list[pb.ThreadStack]], list[list[pb.ThreadStack]]]:
    """The threads of a group's processes beside their main ones: first those that are not idle, then those that are.

    Threads that do the same in the same frames are one item.
    """
    busy: dict[tuple[Any, ...], list[pb.ThreadStack]] = {}
    idle: dict[tuple[Any, ...], list[pb.ThreadStack]] = {}
    for thread in (thread for each in group.members for thread in each.stacks.threads if not thread.main):
        (idle if is_idle(thread) else busy).setdefault(stack_key(thread), []).append(thread)
    return list(busy.values()), list(idle.values())
