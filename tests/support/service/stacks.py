"""Stacks of processes as a daemon would read them, for the tests of the command line."""

from collections.abc import Sequence

from kineto_protos.v1 import profiler_pb2 as pb

from support.service import captures

TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
SECOND_NS = 10**9


def frame(function: str, line: int, file: str = "/home/ada/train.py", *, code: str = "", own: bool = True) -> pb.Frame:
    """A call of the program's own code."""
    return pb.Frame(function=function, file=file, line=line, code=code, own=own)


def library(function: str, line: int, file: str, *, code: str = "") -> pb.Frame:
    """A call of a package, whose file is named from site-packages/torch on."""
    return frame(function, line, f"{TORCH}/{file}", code=code, own=False)


def thread(
    waits: str = "runs",
    wait: pb.Wait = pb.WAIT_NONE,
    *frames: pb.Frame,
    number: int = 0,
    name: str = "",
    state: pb.ThreadState = pb.THREAD_STATE_SLEEPING,
) -> pb.ThreadStack:
    """A thread; number 0: the main one."""
    return pb.ThreadStack(thread=number, main=not number, name=name, state=state, wait=wait, waits=waits, frames=frames)


def in_collective(name: str = "all_reduce", line: int = 12) -> pb.ThreadStack:
    """A main thread in a collective that a line of the program calls."""
    return thread(
        f"waits in {name}",
        pb.WAIT_COLLECTIVE,
        library(name, 2501, "distributed/distributed_c10d.py", code="work.wait()"),
        frame("main", line, code=f"dist.{name}(loss)"),
    )


def in_c10d(waits: str, *functions: str, line: int = 12) -> pb.ThreadStack:
    """A main thread in functions of torch.distributed, the innermost first, called by a line of the program."""
    inside = [library(function, 100 + at, "distributed/distributed_c10d.py") for at, function in enumerate(functions)]
    return thread(waits, pb.WAIT_COLLECTIVE, *inside, frame("main", line))


def at_lock(function: str = "load_next_batch", line: int = 6) -> pb.ThreadStack:
    """A main thread that waits for a lock in a function of the program."""
    return thread(
        "waits for a lock",
        pb.WAIT_LOCK,
        frame(function, line, code="lock.acquire()"),
        frame("main", 20, code=f"{function}()"),
    )


def on_gpu(line: int = 30) -> pb.ThreadStack:
    """A main thread that waits for the GPU."""
    return thread("waits for the GPU", pb.WAIT_GPU, frame("train_step", line, code="loss.item()"))


def running(line: int = 20) -> pb.ThreadStack:
    """A main thread that runs."""
    return thread("runs", pb.WAIT_NONE, frame("train_step", line, code="model(batch)"), state=pb.THREAD_STATE_RUNNING)


def gpu(number: int = 0, **values: float) -> pb.GpuSample:
    """A GPU, by default one that does nothing."""
    sample = pb.GpuSample(gpu=pb.Gpu(index=number), device=f"nvidia{number}", works=True, graphics_active=0.0)
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def read(
    main: pb.ThreadStack | None,
    rank: int | None = None,
    *others: pb.ThreadStack,
    pid: int = 0,
    world: int = 0,
    parent: int = 1,
    job: str = "",
    seconds: int = 100,
    reason: str = "",
    gpus: Sequence[pb.GpuSample] = (),
) -> pb.ProcessStacks:
    """A process, with the pid 4242 + rank unless another one is given. main: None if it could not be read."""
    process = captures.process(pid or 4242 + (rank or 0), rank)
    process.parent_pid, process.job_id = parent, job
    if world:
        process.world_size = world
    threads: Sequence[pb.ThreadStack] = [] if main is None else [main, *others]
    return pb.ProcessStacks(process=process, time_ns=seconds * SECOND_NS, threads=threads, reason=reason, gpus=gpus)


def hanging(late: int = 1, ranks: int = 8) -> list[pb.ProcessStacks]:
    """A job in which one rank waits for a lock, and the others for it."""
    idle = thread("waits for a lock", pb.WAIT_LOCK, number=9, name="pt_nccl_watchdg")
    return [read(at_lock() if rank == late else in_collective(), rank, idle, world=ranks) for rank in range(ranks)]
