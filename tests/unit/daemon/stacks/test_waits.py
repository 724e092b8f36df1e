"""What a thread is told to wait for."""

import pytest
from kinetod.stacks.thread_facts import BlockingCall, ThreadFacts, ThreadTable
from kinetod.stacks.thread_stacks import StackFrame
from kinetod.stacks.waits import explain

PYTHON = "/usr/lib/python3.12"
PACKAGES = f"{PYTHON}/site-packages"
UNSEEN = "waits for something that cannot be seen from outside"
DEADLINE = 0x7F0000000000


def frames(*calls: tuple[str, str]) -> list[StackFrame]:
    """Of the program's own where the path is relative."""
    return [StackFrame(function=name, file=file, line=1, own=not file.startswith("/")) for name, file in calls]


def told(
    *calls: tuple[str, str],
    state: str = "SLEEPING",
    call: BlockingCall | None = None,
    code: str = "",
    gil: str = "",
    wakes_per_s: float = 200.0,
    gpu: bool = False,
    driver_call: str = "",
    kernel_function: str = "",
    frozen: bool = False,
    tracer: int = 0,
    others: int = 1,
) -> tuple[str, str]:
    thread = ThreadFacts(
        thread=7,
        inner=7,
        name="python",
        state=state,
        call=call,
        kernel_function=kernel_function,
        wakes_per_s=wakes_per_s,
        driver_call=driver_call,
    )
    process = ThreadTable(pid=7, threads=[thread], left_out=others, uses_gpu=gpu, frozen=frozen, tracer=tracer)
    found = frames(*calls)
    if code:
        found[0].code = code
    return explain(thread, found, process, gil)


def test_the_function_that_says_most_names_the_wait() -> None:
    loader = (
        ("wait", f"{PYTHON}/threading.py"),
        ("get", f"{PYTHON}/queue.py"),
        ("_try_get_data", f"{PACKAGES}/torch/utils/data/dataloader.py"),
        ("train", "train.py"),
    )
    assert told(*loader) == ("WORKER", "waits for a DataLoader worker")
    assert told(*loader[:2], loader[3]) == ("QUEUE", "waits for an item from a queue")
    assert told(loader[0], loader[3]) == ("LOCK", "waits for a condition or an event")


def test_a_library_above_the_programs_own_frame_says_nothing_of_its_wait() -> None:
    beside = (("step", "train.py"), ("result", f"{PYTHON}/concurrent/futures/_base.py"))
    assert told(*beside, call=BlockingCall("clock_nanosleep", (0,) * 6)) == ("SLEEP", "sleeps")


@pytest.mark.parametrize("state", ["SLEEPING", "RUNNING"])
def test_a_collective_is_named_whether_it_sleeps_or_spins(state: str) -> None:
    inside = ("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py")
    assert told(inside, ("train", "train.py"), state=state) == ("COLLECTIVE", "waits in all_reduce")


def test_a_file_of_the_programs_own_is_no_library() -> None:
    assert told(("get", "queue.py"), call=BlockingCall("futex", (0,) * 6))[0] == "LOCK"
    assert told(("get", f"{PACKAGES}/persistent/queue.py"), call=BlockingCall("futex", (0,) * 6))[0] == "LOCK"


def test_packages_are_known_wherever_they_lie() -> None:
    built = ("all_reduce", "/home/ada/pytorch/torch/distributed/distributed_c10d.py")
    assert told(built, ("step", "train.py")) == ("COLLECTIVE", "waits in all_reduce")
    assert told(("dumps", f"{PYTHON}/pickle.py"), built, state="RUNNING") == ("NONE", "runs")


def test_what_an_event_loop_calls_is_not_the_event_loop() -> None:
    call = BlockingCall("recvfrom", (3, 0), "a socket")
    loop = (("_run", f"{PYTHON}/asyncio/events.py"), ("BaseEventLoop._run_once", f"{PYTHON}/asyncio/base_events.py"))
    assert told(("select", f"{PYTHON}/selectors.py"), loop[1]) == (
        "EVENTS",
        "waits in asyncio's event loop, with no task ready",
    )
    assert told(("fetch", f"{PACKAGES}/x.py"), *loop, call=call)[0] == "NETWORK"


@pytest.mark.parametrize("code", ["n = loss.item()", "x = loss.cpu()", "torch.cuda.synchronize()"])
def test_a_line_that_ends_in_a_call_for_the_gpus_result_waits_for_the_gpu_where_the_process_uses_one(code: str) -> None:
    assert told(("step", "train.py"), state="RUNNING", code=code, gpu=True) == ("GPU", f"waits for the GPU ({code})")
    assert told(("step", "train.py"), state="RUNNING", code=code) == ("NONE", "runs")


def test_a_call_of_the_driver_says_more_than_the_line_and_less_than_the_function_that_made_it() -> None:
    waits = ("GPU", "waits for the GPU (cuStreamSynchronize)")
    for code in ("n = float(loss)", "n = loss.item()"):
        assert told(("f", "a.py"), state="RUNNING", code=code, gpu=True, driver_call="cuStreamSynchronize") == waits
    synchronize = ("synchronize", f"{PACKAGES}/torch/cuda/__init__.py")
    assert told(synchronize, ("f", "a.py"), state="RUNNING", gpu=True, driver_call="cuCtxSynchronize") == (
        "GPU",
        "waits for the GPU (torch.cuda.synchronize)",
    )


@pytest.mark.parametrize("code", ["rows.tolist()", "heavy(x.item())", "x.cpu().numpy().tobytes()", "x.to('cpu')"])
def test_a_thread_that_runs_may_compute_in_other_calls(code: str) -> None:
    assert told(("step", "train.py"), state="RUNNING", code=code, gpu=True) == ("NONE", "runs")


@pytest.mark.parametrize(
    ("call", "code", "wait"),
    [
        (BlockingCall("clock_nanosleep", (0, 0)), "time.sleep(loss.item())", "SLEEP"),
        (BlockingCall("sendto", (3, 0), "a socket"), "sock.sendall(x.cpu())", "NETWORK"),
        (BlockingCall("write", (3, 0), "/data/x"), "n = file.write(x); y.cpu()", "FILE"),
        (BlockingCall("futex", (0,) * 6), "y = x.tolist()", "GPU"),
        (BlockingCall("ioctl", (3, 0), "/dev/nvidiactl"), "f(x)", "GPU"),
    ],
)
def test_a_call_of_something_else_is_not_the_gpus(call: BlockingCall, code: str, wait: str) -> None:
    assert told(("step", "train.py"), call=call, code=code, gpu=True)[0] == wait


def test_a_thread_that_runs_waits_for_no_lock() -> None:
    assert told(("wait", f"{PYTHON}/threading.py"), state="RUNNING") == ("NONE", "runs")


def test_the_gil_is_waited_for_with_a_deadline_while_another_thread_holds_it() -> None:
    waits = BlockingCall("futex", (1, 2, 3, DEADLINE, 5, 6))
    holder = "thread 8 (python) holds at a.py:3"
    assert told(("f", "a.py"), call=waits, gil=holder) == ("GIL", f"waits for the GIL, which {holder}")
    assert told(("wait", f"{PYTHON}/threading.py"), call=waits, gil=holder)[0] == "GIL"
    assert (
        told(("f", "a.py"), call=waits, gil=holder, wakes_per_s=0.0)[0] == "LOCK"
    )  # a wait with a deadline of its own
    assert told(("f", "a.py"), call=waits)[0] == "LOCK"
    assert told(("f", "a.py"), call=BlockingCall("futex", (1, 2, 3, 0, 5, 6)), gil=holder)[0] == "LOCK"
    assert told(call=waits, gil=holder)[0] == "LOCK"  # not a thread of Python


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (BlockingCall("read", (3, 0), "/data/train.bin"), ("FILE", "reads /data/train.bin")),
        (BlockingCall("write", (3, 0), "a pipe"), ("FILE", "writes a pipe")),
        (BlockingCall("read", (3, 0), "a socket"), ("NETWORK", "waits for data from a socket")),
        (BlockingCall("recvfrom", (3, 0), "10.0.0.2:29500"), ("NETWORK", "waits for data from 10.0.0.2:29500")),
        (BlockingCall("write", (3, 0), "10.0.0.2:29500"), ("NETWORK", "waits to send data to 10.0.0.2:29500")),
        (BlockingCall("accept4", (3, 0), "port 80"), ("NETWORK", "waits for a connection to port 80")),
        (BlockingCall("wait4", (4242, 0)), ("PROCESS", "waits for process 4242 to end")),
        (BlockingCall("wait4", ((1 << 64) - 1, 0)), ("PROCESS", "waits for a child process to end")),
        (BlockingCall("flock", (3, 2), "/tmp/lock"), ("FILE", "waits for the lock on /tmp/lock")),
        (BlockingCall("fcntl", (3, 7, 0), "/tmp/lock"), ("FILE", "waits for the lock on /tmp/lock")),
        (BlockingCall("ioctl", (3, 0), "/dev/nvidia0"), ("GPU", "waits in the GPU's driver (ioctl of /dev/nvidia0)")),
        (BlockingCall("epoll_wait", (3, 0)), ("EVENTS", "waits for events")),
        (BlockingCall("poll", (3, 0)), ("EVENTS", "waits until a file or a socket is ready")),
        (BlockingCall("select", (0, 0)), ("SLEEP", "sleeps")),
        (BlockingCall("waitid", (3, 9)), ("PROCESS", "waits for a child process to end")),
        (BlockingCall("vfork", (0, 0)), ("PROCESS", "waits for a new process to execute its program")),
        (BlockingCall("rt_sigsuspend", (0, 0)), ("EVENTS", "waits for a signal")),
        (BlockingCall("msgrcv", (0, 0)), ("LOCK", "waits for a semaphore or a message from another process")),
        (BlockingCall("openat", (3, 0)), ("FILE", "opens or looks up a file")),
        (
            BlockingCall("ioctl", (3, 0), "/dev/tty"),
            ("UNSPECIFIED", "waits for something that cannot be seen from outside"),
        ),
        (BlockingCall("read", (0, 0)), ("UNSPECIFIED", "waits for something that cannot be seen from outside")),
        (None, ("UNSPECIFIED", "waits for something that cannot be seen from outside")),
    ],
)
def test_a_system_call_tells_what_frames_do_not(call: BlockingCall | None, expected: tuple[str, str]) -> None:
    assert told(call=call) == expected


def test_a_lock_is_told_from_another_threads_signal_by_the_expression_only() -> None:
    waits, shared = BlockingCall("futex", (0, 0x189)), BlockingCall("futex", (0, 0x109))
    assert told(("f", "a.py"), call=waits, code="lock.acquire()") == ("LOCK", "waits for a lock")
    for call, words in ((waits, "for another thread"), (shared, "another thread or another process")):
        expected = ("LOCK", f"waits for a lock or {words}")
        assert told(("f", "a.py"), call=call, code="run('train with dropout')") == expected


def test_what_stops_a_process_comes_before_all_else() -> None:
    inside = ("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py")
    assert told(inside, state="STOPPED") == ("STOPPED", "is stopped (SIGSTOP or Ctrl-Z)")
    assert told(inside, state="TRACED", tracer=9) == ("STOPPED", "is stopped by a debugger (process 9)")
    assert told(inside, frozen=True) == ("STOPPED", "is frozen by a control group")
    assert told(state="ENDED") == ("NONE", "has ended")


def test_an_uninterruptible_wait_names_the_kernels_function() -> None:
    found = told(state="UNINTERRUPTIBLE", kernel_function="folio_wait_bit")
    assert found[0] == "KERNEL"
    assert found[1].endswith("swapped memory (folio_wait_bit)")


def test_a_lock_that_only_another_thread_could_release_is_told_so_where_there_is_none() -> None:
    private, shared = BlockingCall("futex", (1, 0x189, 0)), BlockingCall("futex", (1, 0x109, 0))
    lonely = ("LOCK", "waits for a lock, with no other thread in the process")
    assert told(("f", "a.py"), call=private, code="lock.acquire()", others=0) == lonely
    assert told(("f", "a.py"), call=private, code="lock.acquire()") == ("LOCK", "waits for a lock")
    assert told(("f", "a.py"), call=shared, code="lock.acquire()", others=0) == ("LOCK", "waits for a lock")


@pytest.mark.parametrize("code", ['db.execute("begin")', "self.connection.commit()", "cursor.executemany(text, rows)"])
def test_a_query_that_sleeps_waits_for_a_locked_database(code: str) -> None:
    sleeps = BlockingCall("clock_nanosleep", (0, 0))
    database = ("SLEEP", "sleeps, as SQLite does while another connection locks its database")
    assert told(("f", "a.py"), call=sleeps, code=code) == database
    assert told(("f", "a.py"), call=sleeps, code="time.sleep(9)") == ("SLEEP", "sleeps")


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (("_wait", "wait", "communicate"), "waits for a child process to end"),
        (("_communicate", "communicate", "run"), "waits for the pipes of a child process"),
        (("_execute_child", "__init__", "run"), "waits for a child process to execute its program"),
    ],
)
def test_what_a_child_process_is_waited_for_is_told(functions: tuple[str, ...], words: str) -> None:
    inside = [(name, f"{PYTHON}/subprocess.py") for name in functions]
    assert told(*inside, ("build", "train.py")) == ("PROCESS", words)
