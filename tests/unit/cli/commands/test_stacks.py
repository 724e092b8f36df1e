"""`kinetoctl stacks` against scripted daemons."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base.own_daemon import OwnDaemon
from support.service import stacks
from support.service.cli import Run
from support.service.fake_profiler import WAIT_FOR_CANCEL, Abort, FakeProfiler, FakeServer, WaitForCancel, serve
from support.service.stacks import at_lock, gpu, in_collective, on_gpu, read, running

VERDICT = "Rank 1 is not in the all_reduce in which 7 ranks wait: it waits for a lock in load_next_batch (train.py:6)."
HINT = "At first, a hang looks like a short wait: look again, or use --watch, to see whether anything moves."
NO_MATCH = Abort(grpc.StatusCode.NOT_FOUND, "no process matches rank 7", "NO_MATCH")


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with serve(FakeProfiler()) as running_server:
        yield running_server


def test_the_verdict_comes_first_then_the_odd_one_out_then_the_others(server: FakeServer, run: Run) -> None:
    server.profiler.stacks = [stacks.hanging()]
    result = run("stacks", "--rank", "all")
    assert server.profiler.requests == [pb.ReadStacksRequest(selector=pb.Selector(ranks=[-1]))]
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        VERDICT,
        "",
        "rank 1  pid 4243  main thread  waits for a lock",
        "    load_next_batch  train.py:6   lock.acquire()",
        "    main             train.py:20  load_next_batch()",
        "  and 1 thread outside the program's code",
        "",
        "7 ranks: 0, 2-7  main thread  waits in all_reduce",
        "    all_reduce  torch/distributed/distributed_c10d.py:2501  work.wait()",
        "    main        train.py:12                                 dist.all_reduce(loss)",
        "  and 7 threads outside the program's code",
        "",
        HINT,
    ]


def test_idle_threads_are_shown_on_request(server: FakeServer, run: Run) -> None:
    server.profiler.stacks = [stacks.hanging()]
    result = run("stacks", "--rank", "all", "--all-threads")
    assert "  7 threads pt_nccl_watchdg  waits for a lock" in result.stdout.splitlines()
    assert "without code" not in result.stdout


def test_threads_with_code_of_the_program_stand_below_the_main_one(server: FakeServer, run: Run) -> None:
    pin = stacks.thread("runs", pb.WAIT_NONE, stacks.frame("copy", 3, "/x/pin.py"), number=77, name="pin")
    pin.holds_gil, pin.frames[0].code, pin.left_out = True, "x" * 100, 5
    server.profiler.stacks = [[read(at_lock(), None, pin, pid=7)]]
    lines = run("stacks", "7").stdout.splitlines()
    assert lines[0] == "Process 7 waits for a lock in load_next_batch (train.py:6)."
    place = lines.index("  thread 77 pin  runs  holds the GIL")
    assert lines[place + 1].startswith("    copy  pin.py:3  xxx") and len(lines[place + 1]) == 80
    assert lines[place + 2] == "    and 5 outer frames"


def test_the_gpus_of_a_group_stand_below_its_main_thread(server: FakeServer, run: Run) -> None:
    ranks = [read(on_gpu(), rank, gpus=[gpu(rank, graphics_active=rank // 3)], world=4) for rank in range(4)]
    server.profiler.stacks = [ranks]
    lines = run("stacks", "--rank", "all").stdout.splitlines()
    assert lines[0] == "All 4 ranks wait for the GPU in train_step (train.py:30); no rank that was read is elsewhere."
    assert lines[3:6] == [
        "    train_step  train.py:30  loss.item()",
        "  GPUs 0-2 are idle",
        "  GPU 3 is busy 100 % of the time",
    ]


def test_functions_lines_and_names_of_threads_are_shown_as_they_come(server: FakeServer, run: Run) -> None:
    wait = stacks.frame("Condition.wait", 355, "/usr/lib/python3.12/threading.py", code="waiter.acquire()", own=False)
    step = stacks.frame("Trainer.fit.<locals>.step", 9, code="with self.lock, timed('step'):")
    main = stacks.thread("waits for a condition or an event", pb.WAIT_LOCK, wait, step)
    other = stacks.thread("runs", pb.WAIT_NONE, stacks.frame("Loader.run", 3), number=77, name="Thread-1 (worker)")
    server.profiler.stacks = [[read(main, None, other, pid=7)]]
    lines = run("stacks", "7").stdout.splitlines()
    assert lines[0] == "Process 7 waits for a condition or an event in Trainer.fit.<locals>.step (train.py:9)."
    assert lines[3:5] == [
        "    Condition.wait             threading.py:355  waiter.acquire()",
        "    Trainer.fit.<locals>.step  train.py:9        with self.lock, timed('step'):",
    ]
    assert lines[5:7] == ["  thread 77 Thread-1 (worker)  runs", "    Loader.run  train.py:3"]


def test_wide_shows_whole_paths_commands_and_what_the_kernel_says(server: FakeServer, run: Run) -> None:
    found = stacks.hanging()
    found[1].threads[0].system_call = "futex"
    server.profiler.stacks = [found]
    output = run("stacks", "--rank", "all", "-o", "wide").stdout
    assert "rank 1  pid 4243  main thread  waits for a lock  thread 0 sleeping in futex  0 ns of CPU" in output
    assert "7 ranks: 0, 2-7  main thread  waits in all_reduce\n" in output  # what the kernel says is of one thread
    assert "    rank 7  pid 4249  python train.py --epochs 3\n" in output
    assert "/home/ada/train.py:12" in output and "site-packages/torch/distributed" in output


def test_nothing_hints_at_a_hang_where_everything_runs(server: FakeServer, run: Run) -> None:
    server.profiler.stacks = [[read(running(), rank) for rank in range(2)]]
    output = run("stacks", "--rank", "0-1").stdout
    assert output.startswith("Both ranks run in train_step (train.py:20).\n") and HINT not in output


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_in_json_and_yaml_it_is_the_messages_with_verdict_and_groups(server: FakeServer, run: Run, form: str) -> None:
    server.profiler.stacks = [stacks.hanging()]
    document = yaml.safe_load(run("stacks", "--rank", "all", "-o", form).stdout)  # JSON is YAML
    assert list(document) == ["verdict", "groups", "processes", "errors"]
    assert (document["verdict"], document["errors"]) == (VERDICT, [])
    first, second = document["groups"]
    assert first["processes"] == [{"pid": 4243, "rank": 1}]
    assert (first["wait"], first["waits"], first["alike"]) == ("WAIT_LOCK", "waits for a lock", True)
    assert (first["place"]["function"], first["place"]["line"]) == ("load_next_batch", 6)
    assert [each["rank"] for each in second["processes"]] == [0, 2, 3, 4, 5, 6, 7]
    assert document["processes"][0]["threads"][0]["frames"][1]["code"] == "dist.all_reduce(loss)"
    assert "host" not in document["processes"][0]


def test_a_process_that_could_not_be_read_is_told_below_the_verdict_with_code_4(server: FakeServer, run: Run) -> None:
    found = [read(in_collective(), 0, world=2), read(None, 1, world=2, reason="you may not read it")]
    found[0].left_out = 1200
    server.profiler.stacks = [found]
    result = run("stacks", "--rank", "all")
    assert result.code == 4
    assert result.stdout.splitlines()[:4] == [
        "Rank 1 of 2 was not read; rank 0 waits in all_reduce (train.py:12).",
        "rank 0  pid 4242: 1,200 more threads were left out (the daemon's limit)",
        "rank 1  pid 4243: you may not read it",
        "",
    ]
    assert "rank 1  pid 4243  not read" in result.stdout
    group = run("stacks", "--rank", "all", "-o", "json").json()["groups"][1]
    assert (group["wait"], group["waits"], group["place"]) == (None, None, None)


@pytest.mark.parametrize(("uid", "told"), [(1000, True), (0, False)])
def test_what_a_daemon_of_the_commands_own_cannot_read_is_told_with_roots_command(
    server: FakeServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, told: bool
) -> None:
    reason = "the kernel does not let this daemon read it: that needs root or CAP_SYS_PTRACE"
    server.profiler.stacks = [[read(None, 1, world=2, reason=reason)]]
    (tmp_path / "kinetod.sock").symlink_to(server.address.removeprefix("unix:"))
    monkeypatch.setattr("kinetoctl.commands.stacks.reachable_daemon", lambda _settings, _say: OwnDaemon(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("sys.argv", ["kinetoctl", "stacks", "7"])
    result = run("stacks", "7")
    assert bool(re.search(r"^Root can read it: sudo \S+ -P -m kinetoctl stacks 7$", result.stderr, re.M)) == told


def test_of_a_process_without_frames_what_the_kernel_says_stands_in_its_group(server: FakeServer, run: Run) -> None:
    guess = stacks.thread("waits for data from a socket", pb.WAIT_NETWORK)
    reason = "its Python frames could not be read in time"
    server.profiler.stacks = [[read(in_collective(), 0), read(guess, 1, reason=reason)]]
    result = run("stacks", "--rank", "all")
    assert result.code == 4
    assert result.stdout.splitlines()[:2] == [
        "Rank 1 could not be read; rank 0 waits in all_reduce (train.py:12).",
        f"rank 1  pid 4243: {reason}",
    ]
    assert (
        "rank 1  pid 4243  not read\n    main thread, without its frames  waits for data from a socket\n"
    ) in result.stdout


def test_without_a_condition_nothing_is_asked(server: FakeServer, run: Run) -> None:
    result = run("stacks")
    assert result.code == 2
    assert "no process is selected: give a pid, or --command" in result.stderr
    assert "`kinetoctl ps` lists candidates" in result.stderr
    assert server.profiler.requests == []


@pytest.mark.parametrize(
    ("abort", "code"),
    [
        (NO_MATCH, 3),
        (Abort(grpc.StatusCode.PERMISSION_DENIED, "it belongs to ada", "NOT_YOUR_PROCESS"), 6),
        (Abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method"), 5),
    ],
)
def test_errors_have_their_own_codes(server: FakeServer, run: Run, abort: Abort, code: int) -> None:
    server.profiler.stacks = [[abort]]
    result = run("stacks", "7")
    assert (result.code, result.stdout) == (code, "")


def test_hosts_are_asked_at_once_and_named(server: FakeServer, other: FakeServer, run: Run) -> None:
    server.profiler.stacks = [[read(at_lock(), pid=7)]]
    other.profiler.stacks = [[read(running(), pid=7), read(running(), pid=8)]]
    hosts = ["--host", server.address, "--host", other.address]
    result = run("stacks", "--command", "train", *hosts)
    assert result.code == 0
    assert result.stdout.splitlines()[0] == (
        f"Process 7 on {server.address} waits for a lock in load_next_batch (train.py:6), and 2 processes run."
    )
    assert f"\n2 processes: 7 on {other.address} and 8 on {other.address}  main thread  runs\n" in result.stdout
    document = run("stacks", "--command", "train", *hosts, "-o", "json").json()
    assert [each["host"] for each in document["processes"]] == [server.address, other.address, other.address]
    assert document["groups"][0]["processes"] == [{"host": server.address, "pid": 7, "rank": None}]


def test_a_host_that_does_not_answer_is_told_below_the_verdict_with_code_4(
    server: FakeServer, other: FakeServer, run: Run
) -> None:
    server.profiler.stacks = [[read(at_lock(), pid=7)]]
    other.profiler.stacks = [[NO_MATCH]]
    hosts = ["--host", server.address, "--host", other.address]
    result = run("stacks", "7", *hosts)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1] == f"no process matches on {other.address}"
    other.profiler.stacks = [[Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", "TOO_MANY_CALLS")]]
    result = run("stacks", "7", *hosts)
    assert result.code == 4
    assert result.stdout.splitlines()[:3] == [
        "Process 7 waits for a lock in load_next_batch (train.py:6).",
        f"{other.address} was not read: too many calls",
        "",
    ]
    errors = run("stacks", "7", *hosts, "-o", "json").json()["errors"]
    assert errors == [{"host": other.address, "error": "too many calls"}]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (WAIT_FOR_CANCEL, "the daemon at {address} did not answer within 1 s"),
        (Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", "TOO_MANY_CALLS"), "too many calls"),
        (Abort(grpc.StatusCode.UNAVAILABLE, "it stops", "SHUTTING_DOWN"), "it stops"),
    ],
)
def test_what_came_before_the_stream_failed_is_shown_with_code_4(
    server: FakeServer, other: FakeServer, run: Run, end: Abort | WaitForCancel, error: str
) -> None:
    server.profiler.stacks = [[read(at_lock(), pid=7), end]]
    other.profiler.stacks = [[read(at_lock(), pid=8)]]
    error = error.format(address=server.address)
    result = run("stacks", "--command", "train", "--timeout", "1s")
    assert (result.code, result.stderr) == (4, "")
    assert result.stdout.splitlines()[:2] == [
        "Process 7 waits for a lock in load_next_batch (train.py:6).",
        f"the rest was not read: {error}",
    ]
    hosts = ["--host", server.address, "--host", other.address]
    result = run("stacks", "--command", "train", "--timeout", "1s", *hosts)
    assert (result.code, result.stderr) == (4, "")
    assert result.stdout.splitlines()[:2] == [
        "Both processes wait for a lock in load_next_batch (train.py:6).",
        f"the rest of {server.address} was not read: {error}",
    ]
    documents = [run("stacks", "7", "--timeout", "1s", "-o", "json", *more).json() for more in ([], hosts)]
    assert [each["errors"] for each in documents] == [[{"error": error}], [{"host": server.address, "error": error}]]
    assert [len(each["processes"]) for each in documents] == [1, 2]


def test_a_stream_that_fails_before_the_first_process_has_its_own_code(server: FakeServer, run: Run) -> None:
    server.profiler.stacks = [[WAIT_FOR_CANCEL]]
    assert run("stacks", "7", "--timeout", "500ms").code == 7


def test_a_process_with_very_many_frames_is_read(server: FakeServer, other: FakeServer, run: Run) -> None:
    large = stacks.thread("runs", pb.WAIT_NONE, *[stacks.frame("f" * 1000, 1)] * 5000, number=7)
    server.profiler.stacks = other.profiler.stacks = [[read(at_lock(), None, large, pid=7)]]
    for hosts in ([], ["--host", server.address, "--host", other.address]):
        assert run("stacks", "7", *hosts).code == 0


def test_hosts_without_any_match_are_code_3_and_name_those_that_failed(
    server: FakeServer, other: FakeServer, run: Run
) -> None:
    server.profiler.stacks = [[NO_MATCH]]
    other.profiler.stacks = [[Abort(grpc.StatusCode.INTERNAL, "a bug")]]
    result = run("stacks", "7", "--host", server.address, "--host", other.address)
    assert (result.code, result.stdout) == (3, "")
    assert f"{other.address}: " in result.stderr and "error: no process matches" in result.stderr


@pytest.fixture
def looks(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Three looks with --watch, at which rank 1 stays where it is and rank 0 comes into its place later."""
    asked: list[float] = []

    def pause(interval_s: float) -> None:
        asked.append(interval_s)
        if len(asked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kinetoctl.commands.stacks.time.sleep", pause)
    server.profiler.stacks = [
        [read(first, 0, seconds=at), read(at_lock(), 1, seconds=at)]
        for at, first in ((100, running()), (105, in_collective()), (111, in_collective()))
    ]
    return asked


def test_watching_tells_for_how_long_each_group_is_seen_in_its_place(run: Run, looks: list[float]) -> None:
    result = run("stacks", "--rank", "all", "--watch")
    assert (result.code, looks) == (0, [5.0] * 3)
    heads = [line for line in result.stdout.splitlines() if "main thread" in line]
    assert heads == [
        "rank 0  pid 4242  main thread  runs",
        "rank 1  pid 4243  main thread  waits for a lock",
        "rank 1  pid 4243  main thread  waits for a lock  the same at every look for 5 s",
        "rank 0  pid 4242  main thread  waits in all_reduce",
        "rank 1  pid 4243  main thread  waits for a lock  the same at every look for 11 s",
        "rank 0  pid 4242  main thread  waits in all_reduce  the same at every look for 6 s",
    ]
    assert result.stdout.count(HINT) == 1


def test_watching_in_json_is_a_line_for_each_look(run: Run, looks: list[float]) -> None:
    result = run("stacks", "--rank", "all", "--watch", "--interval", "2s", "-o", "json")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [[group["stood_ns"] // 10**9 for group in each["groups"]] for each in documents] == [[0, 0], [5, 0], [11, 6]]
    assert looks == [2.0] * 3
