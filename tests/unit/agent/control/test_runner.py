"""The whole agent against a daemon driven by hand: real socket, real thread, real sources."""

import contextlib
import os
import select
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
from kineto_agent.control import self_description
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import STEP_MARK
from kineto_agent.sources.interface import Source
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import RING_ITERATIONS, StepCounter
from kineto_agent.steps.step_marks import StepMarkSession
from kineto_agent.system.threads import thread_names
from support.agent.agent_daemon import Connection, Daemon, start_request
from support.agent.failing_source import Failing
from support.losses import without_losses
from support.waiting import scaled, until

S = 1_000_000_000


def our_threads() -> List[str]:
    return [name for name in thread_names(100).values() if name.startswith("kineto-")]


class Process:
    """An agent, its counter and its daemon."""

    def __init__(self, path: str) -> None:
        self.daemon = Daemon(path)
        self.counter = StepCounter()
        self.sources: List[Source] = [PythonStacksSource()]
        self.agent = Agent(self.counter, lambda: [path], lambda: self.sources)

    def connect(self) -> Connection:
        self.agent.start()
        return self.daemon.welcome()[0]

    def end(self) -> None:
        self.agent.stop("AGENT_STOPPED", "the test ends", timeout_s=20)
        assert not self.agent.alive
        if self.daemon.listener.fileno() >= 0:
            self.daemon.close()


@pytest.fixture
def process(tmp_path: Path, soon_back: None) -> Iterator[Process]:
    process = Process(str(tmp_path / "agent.sock"))
    yield process
    process.end()


def answer(connection: Connection, request: wire.Start) -> wire.Message:
    connection.send(request)
    message = connection.receive()
    assert message is not None
    return message


def test_the_agent_introduces_itself(process: Process) -> None:
    process.agent.start()
    _connection, hello = process.daemon.welcome()
    assert hello.pid == os.getpid()
    assert hello.sources == {"python_stacks": ["python_function"]}
    assert (hello.iterations, hello.busy_capture_id) == (-1, "")


def test_describe_is_answered_with_the_present(process: Process) -> None:
    connection = process.connect()
    process.counter.step()
    connection.send(wire.Describe())
    assert connection.expect(wire.Hello).iterations == 1


def test_a_capture_of_python_stacks_from_start_to_release(process: Process) -> None:
    connection = process.connect()
    requested_ns, duration_ns = time.time_ns(), S  # long enough for the sampler to get to run
    connection.send(start_request(duration_ns=duration_ns))
    result = connection.expect(wire.Result)
    assert connection.states == ["WARMUP", "COLLECT", "PROCESS"]
    assert (result.outcome, result.reason_code, without_losses(result.warnings)) == ("done", "", [])
    assert result.window_end_ns - result.window_start_ns == duration_ns
    assert result.window_start_ns >= requested_ns
    samples = connection.arenas[0].samples()
    counts = result.sources["python_stacks"]
    assert (counts["records"], counts["dropped"]) == (len(samples), 0)
    assert sum(result.window_start_ns <= sample.time_ns < result.window_end_ns for sample in samples) > 0
    assert result.threads[str(threading.get_native_id())] == "MainThread"
    assert " ".join(sorted(result.overhead)) == "agent_cpu_ns detach_ns least_step_ratio start_ns step_ratio stop_ns"
    assert 0 < result.overhead["start_ns"] < 10 * S
    assert 0 < result.overhead["agent_cpu_ns"] < 10 * S
    connection.send(wire.Release("c1"))
    connection.send(start_request("c2"))
    assert connection.expect(wire.Result).capture_id == "c2"


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_in_the_window_does_not_change_its_length(
    process: Process, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    connection = process.connect()
    began_ns, real = time.monotonic_ns(), time.time_ns
    connection.send(start_request())
    connection.expect_state("WARMUP")
    connection.expect_state("COLLECT")
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * S)
    result = connection.expect(wire.Result)
    assert result.window_end_ns - result.window_start_ns == 200_000_000
    assert S // 10 < time.monotonic_ns() - began_ns < scaled(10) * S
    assert result.outcome == "done"  # that the clock was set, the daemon sees


def test_a_second_capture_is_rejected_with_the_id_of_the_first(process: Process) -> None:
    connection = process.connect()
    connection.collect()
    answer = connection_rejects(connection, start_request("c2"))
    assert (answer.capture_id, answer.reason_code, answer.busy_capture_id) == ("c2", "BUSY", "c1")
    connection.send(wire.Describe())
    assert connection.expect(wire.Hello).busy_capture_id == "c1"


def connection_rejects(connection: Connection, request: wire.Start) -> wire.Rejected:
    connection.send(request)
    return connection.expect(wire.Rejected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"activity_types": ["kernal"]}, "UNKNOWN_ACTIVITY_TYPE"),
        ({"activity_types": ["kernel"]}, "NOTHING_TO_RECORD"),
        ({"duration_ns": 0}, "INVALID_REQUEST"),
        ({"duration_ns": None, "iterations": 5}, "NEVER_STEPPED"),
        ({"start_time_ns": 1}, "START_TIME_PAST"),
    ],
)
def test_what_cannot_be_done_is_rejected_and_the_agent_stays_free(
    process: Process, changes: Dict[str, Any], code: str
) -> None:
    connection = process.connect()
    assert connection_rejects(connection, start_request(**changes)).reason_code == code
    connection.send(start_request("c2", duration_ns=1))
    assert connection.expect(wire.Result).outcome == "done"


def test_a_bad_option_fails_the_capture_with_its_reason(process: Process) -> None:
    connection = process.connect()
    connection.send(start_request(options={"stack_sample_hz": 5000}))
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("failed", "INVALID_OPTION")
    assert "python_stacks: stack_sample_hz is 5000" in result.reason


def test_cancelling_throws_away_or_keeps_what_there_is(process: Process) -> None:
    connection = process.connect()
    for capture_id, keep, outcome in (("c1", False, "cancelled"), ("c2", True, "partial")):
        connection.collect(capture_id)
        connection.send(wire.Cancel(capture_id, keep))
        result = connection.expect(wire.Result)
        assert (result.outcome, result.reason_code) == (outcome, "CANCELLED")
        assert result.window_end_ns > result.window_start_ns > 0


@contextlib.contextmanager
def training(
    counter: StepCounter, pause_s: float, may_step: Callable[[], bool] = lambda: True
) -> Iterator[threading.Thread]:
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            if may_step():
                counter.step()
            select.select([], [], [], pause_s)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        yield trainer
    finally:
        done.set()
        trainer.join()


def marks(connection: Connection) -> List[Tuple[int, int, int]]:
    """Number, start and thread of the iterations that the last arena holds."""
    records = b"".join(connection.arenas[-1].take())
    return [(number, time_ns, thread) for time_ns, number, thread, _ in STEP_MARK.iter_unpack(records)]


def test_an_iteration_window_holds_exactly_those_iterations(process: Process) -> None:
    connection = process.connect()
    times: List[int] = []
    process.counter._time_ns = lambda: times.append(time.time_ns()) or times[-1]  # type: ignore[func-returns-value]
    with training(process.counter, pause_s=0.005) as trainer:
        until(lambda: process.counter.count > 20, "the training has begun")
        connection.send(start_request(duration_ns=None, iterations=10, iteration_roundup=50))
        result = connection.expect(wire.Result)
    assert result.outcome == "done"
    first = times.index(result.window_start_ns) + 1
    assert first % 50 == 0
    assert result.window_end_ns == times[first + 9]
    ratio = result.overhead["step_ratio"]
    assert ratio == 0 or ratio >= 0.9  # on a busy machine the pace says nothing
    found = marks(connection)
    assert {thread for _, _, thread in found} == {trainer.native_id}
    assert [(number, time_ns) for number, time_ns, _ in found if first <= number <= first + 10] == [
        (number, times[number - 1]) for number in range(first, first + 11)
    ]


def test_of_a_thousand_iterations_and_more_all_are_marked(process: Process) -> None:
    connection = process.connect()

    def is_followed() -> bool:
        """Whether an agent that gets no processor for a while loses none: what it has not copied is in the ring."""
        marks = getattr(process.agent._recording, "_marks", None)
        return marks is None or process.counter.count - marks._next < RING_ITERATIONS // 2

    with training(process.counter, pause_s=0.0002, may_step=is_followed):
        until(lambda: process.counter.count > 20, "the training has begun")
        connection.send(start_request(duration_ns=None, iterations=3000))
        result = connection.expect(wire.Result)
    assert result.outcome == "done"
    found = marks(connection)
    numbers = [number for number, _, _ in found]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    inside = [time_ns for _, time_ns, _ in found if result.window_start_ns <= time_ns <= result.window_end_ns]
    assert (inside[0], inside[-1], len(inside)) == (result.window_start_ns, result.window_end_ns, 3001)
    assert result.sources["steps"]["dropped"] == 0


def test_a_process_whose_first_iteration_comes_during_the_capture_gets_its_marks(process: Process) -> None:
    connection = process.connect()
    connection.collect()
    with training(process.counter, pause_s=0.005):
        until(lambda: process.counter.count > 20, "the training has begun")
        connection.send(wire.Cancel("c1", True))
        result = connection.expect(wire.Result)
    assert [number for number, _, _ in marks(connection)][:20] == list(range(1, 21))
    assert result.sources["steps"]["dropped"] == 0


def test_a_source_says_from_when_on_and_until_when_it_recorded(process: Process) -> None:
    connection = process.connect()
    requested_ns = time.time_ns()
    connection.send(start_request())
    result = connection.expect(wire.Result)
    began_ns, ended_ns = result.sources["python_stacks"]["metadata"]["covered_ns"]
    assert requested_ns <= began_ns <= result.window_start_ns
    assert result.window_end_ns <= ended_ns <= time.time_ns()


def test_a_process_without_iterations_has_no_source_for_them(process: Process) -> None:
    connection = process.connect()
    connection.send(start_request())
    assert list(connection.expect(wire.Result).sources) == ["python_stacks"]


def test_a_later_start_time_is_acknowledged_and_kept(process: Process) -> None:
    connection = process.connect()
    warmup_ns = int(scaled(0.8) * S)  # until then the agent must have got to run, and in this time to start its sources
    start_ns = time.time_ns() + 2 * warmup_ns
    connection.send(start_request(start_time_ns=start_ns, warmup_ns=warmup_ns, duration_ns=S // 10))
    result = connection.expect(wire.Result)
    assert connection.states == ["WAIT_FOR_REQUEST", "WARMUP", "COLLECT", "PROCESS"]
    assert (result.window_start_ns, result.window_end_ns) == (start_ns, start_ns + S // 10)


def test_stopping_the_agent_ends_a_capture_with_what_it_has(process: Process) -> None:
    connection = process.connect()
    connection.collect()
    process.agent.stop("TARGET_EXITING", "the process exited")
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "TARGET_EXITING")
    connection.expect_end()
    assert connection.arenas[0].samples() != []


# ---------------------------------------------------------------- sources in trouble


@pytest.mark.parametrize("where", ["prepare", "announce", "start", "stop"])
def test_one_source_that_fails_leaves_the_other_a_partial_trace(process: Process, where: str) -> None:
    process.sources.append(Failing(where))
    connection = process.connect()
    connection.send(start_request(activity_types=[]))
    result = connection.expect(wire.Result)
    assert result.outcome == "partial"
    assert result.reason_code == ("CUPTI_BUSY" if where == "prepare" else "SOURCE_FAILED")
    assert result.reason.startswith("failing: ")
    assert result.not_recorded == ({} if where == "stop" else {"kernel": result.reason})
    assert result.sources["python_stacks"]["records"] > 0
    assert "failing" not in result.sources


def test_iterations_that_cannot_be_announced_are_told_once(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StepMarkSession.__init__

    def too_long_to_send(session: StepMarkSession, *arguments: Any) -> None:
        made(session, *arguments)
        session.metadata = {"text": "x" * 70000}

    monkeypatch.setattr(StepMarkSession, "__init__", too_long_to_send)
    connection = process.connect()
    process.counter.step()
    connection.send(start_request(activity_types=[]))
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason[:7], result.reason.count("steps: ")) == ("partial", "steps: ", 1)


def test_a_type_that_is_not_there_makes_the_trace_partial(process: Process) -> None:
    connection = process.connect()
    connection.send(start_request(activity_types=["python_function", "kernel"]))
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "ACTIVITY_TYPE_UNAVAILABLE")
    assert result.reason == "this process cannot record kernel"
    assert result.not_recorded == {"kernel": "no source in this process can record it"}


def test_sources_report_counts_warnings_and_their_cost(process: Process) -> None:
    process.sources[:] = [Failing("close")]
    connection = process.connect()
    connection.send(start_request(activity_types=["kernel"], duration_ns=1))
    result = connection.expect(wire.Result)
    assert result.outcome == "done"
    del result.sources["failing"]["metadata"]["covered_ns"]
    assert result.sources == {"failing": {"records": 5, "bytes": 50, "dropped": 1, "metadata": {"k": 1}}}
    assert (result.warnings, result.overhead["detach_ns"]) == (["careful"], 7)
    connection.send(wire.Release("c1"))
    connection.send(wire.Describe())
    assert connection.expect(wire.Hello).busy_capture_id == ""


def test_when_every_source_fails_the_capture_has_failed(process: Process) -> None:
    process.sources[:] = [Failing("start")]
    connection = process.connect()
    connection.send(start_request(activity_types=["kernel"]))
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("failed", "SOURCE_FAILED")
    assert result.reason == "failing: unexpected RuntimeError: no driver"


def test_an_error_of_our_own_ends_the_capture_and_the_agent_comes_back(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    hellos = [lambda *_arguments, **_options: 1 / 0]  # once: it comes back sooner than this could be undone

    def hello(*arguments: Any, **options: Any) -> Any:
        return (hellos.pop() if hellos else usual)(*arguments, **options)

    usual = self_description.hello
    connection = process.connect()
    connection.collect()
    monkeypatch.setattr(self_description, "hello", hello)
    connection.send(wire.Describe())
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("failed", "AGENT_ERROR")
    assert result.reason == "error in the agent: ZeroDivisionError: division by zero"
    connection.expect_end()
    again = process.daemon.welcome()[0]
    again.send(start_request("c2", duration_ns=1))
    assert again.expect(wire.Result).outcome == "done"


# ---------------------------------------------------------------- the link in trouble


def test_the_agent_comes_back_to_a_restarted_daemon(process: Process) -> None:
    process.connect()
    process.daemon.close()
    process.daemon = Daemon(process.daemon.path)
    connection, _hello = process.daemon.welcome()
    connection.send(start_request(duration_ns=1))
    assert connection.expect(wire.Result).outcome == "done"


def test_a_capture_dies_with_the_daemon_and_the_next_daemon_finds_a_free_agent(process: Process) -> None:
    connection = process.connect()
    connection.collect()
    process.daemon.close()
    process.daemon = Daemon(process.daemon.path)
    again, hello = process.daemon.welcome()
    assert hello.busy_capture_id == ""
    until(lambda: "kineto-stacks" not in our_threads(), "the sampler's thread has ended")
    again.send(start_request("c2", duration_ns=1))
    assert again.expect(wire.Result).capture_id == "c2"


@pytest.mark.parametrize(
    "nonsense",
    [b"x", b"KNTO\x01\x00\x05\x00\x02\x00\x00\x00\x00\x00\x00\x00{}", b"y" * 70000],
    ids=["short", "a Start without fields", "too long"],
)
def test_nonsense_from_the_daemon_is_survived(process: Process, nonsense: bytes) -> None:
    connection = process.connect()
    connection.socket.send(nonsense)
    connection.expect_end()
    again, hello = process.daemon.welcome()
    assert hello.pid == os.getpid()
    again.send(wire.Describe())
    again.expect(wire.Hello)


def test_a_message_that_only_agents_send_is_nonsense_too(process: Process) -> None:
    connection = process.connect()
    connection.send(wire.State("c1", "WARMUP", 1))
    connection.expect_end()
    process.daemon.welcome()


def test_a_refused_agent_keeps_quiet(process: Process) -> None:
    process.agent.start()
    connection = process.daemon.accept()
    connection.expect(wire.Hello)
    connection.send(wire.Refuse("agents of version 0.1.0 are too old"))
    connection.send(wire.Describe())
    connection.socket.settimeout(0.3)
    with pytest.raises(socket.timeout):
        connection.receive()
    assert process.agent.alive


def test_a_program_that_closes_our_descriptors_is_left_alone(process: Process, tmp_path: Path) -> None:
    connection = process.connect()
    number = process.agent._wake_reader
    with (tmp_path / "users.txt").open("w") as stream:
        os.dup2(stream.fileno(), number)
        with contextlib.suppress(BrokenPipeError):  # it has noticed already
            connection.send(wire.Describe())
        until(lambda: not process.agent.alive, "the agent has ended")
        assert process.agent._link.connected is False
        os.write(number, b"still mine")
        os.close(number)
    assert (tmp_path / "users.txt").read_text() == "still mine"


# ---------------------------------------------------------------- costs nothing


def switches(tid: int) -> Tuple[bool, int]:
    """Whether the thread sleeps, not only waits for a processor, and how often it has been given one or lost it."""
    lines = Path("/proc/self/task/%d/status" % tid).read_text().splitlines()
    return "State:\tS (sleeping)" in lines, sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_an_idle_agent_does_not_wake_up(process: Process) -> None:
    connection = process.connect()
    connection.send(wire.Describe())
    connection.expect(wire.Hello)
    thread = process.agent._thread
    assert thread is not None
    before = settled(lambda: switches(thread.native_id))
    select.select([], [], [], 1.5)
    assert switches(thread.native_id) == before


def settled(read: Callable[[], Tuple[bool, int]]) -> Tuple[bool, int]:
    """The value once it has stopped to change and the thread sleeps."""
    values = [read()]

    def steady() -> bool:
        select.select([], [], [], 0.05)
        values.append(read())
        return values[-1][0] and values[-1] == values[-2]

    until(steady, "the agent is idle")
    return values[-1]


def test_nothing_is_left_behind(process: Process) -> None:
    def arenas() -> "Counter[str]":
        names = [os.path.realpath(str(entry)) for entry in Path("/proc/self/fd").iterdir()]
        return Counter(name for name in names if "memfd:" in name)

    before = arenas()
    connection = process.connect()
    connection.send(start_request(duration_ns=1))
    connection.expect(wire.Result)
    process.end()
    assert not arenas() - before
    until(lambda: our_threads() == [], "the thread has ended")
