import json
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.sources.torch.torch_profiler import MAX_STALL_NS, PieceLength, flags
from support.agent.python_child import environment
from support.targets import torch_forks

torch = pytest.mark.torch


def run(plan: str, tmp_path: Path, expected: int = 0) -> Any:
    """Carries out the plan in a process of its own, and gives what it printed last, as JSON."""
    found = torch_forks.run("-m", "support.agent.torch_session", plan, env=environment(TMPDIR=str(tmp_path)))
    assert found.returncode == expected, found.stdout + found.stderr
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("kineto-")]
    lines = found.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None


def test_flops_need_the_shapes() -> None:
    assert flags({"with_flops": True}) == (True, True)
    assert flags({"record_shapes": True}) == (True, False)
    assert flags({"with_stack": True, "stack_trace": True, "with_modules": True}) == (False, False)  # other sources'


def test_a_piece_is_cut_to_half_of_what_may_stall() -> None:
    length = PieceLength()
    first = length.seconds
    length.ended(MAX_STALL_NS // 4)
    assert length.seconds == pytest.approx(2 * first)
    length.ended(MAX_STALL_NS)
    assert length.seconds == pytest.approx(first)
    assert length.longest_stall_ns == MAX_STALL_NS


@torch
def test_ops_of_all_threads_are_those_that_torch_records_around_the_same_steps(tmp_path: Path) -> None:
    found = run(
        """
import collections, tempfile, threading, torch
from torch._C._profiler import _ExperimentalConfig
from torch.utils.data import DataLoader, TensorDataset
model = Model()
batches = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2)
def work(tids):
    tids.append(threading.get_native_id())
    for _ in range(20):
        model.step()
    for (batch,) in batches:
        batch.sum()
def both():
    tids = []
    work(tids)
    thread = threading.Thread(target=work, args=(tids,))
    thread.start()
    thread.join()
    return tids
def counts(rows):
    return collections.Counter((row["cat"], row["name"]) for row in rows if row["cat"] in ("cpu_op", "user_annotation"))
both()
recording = Recording()
tids = both()
ours = rows(recording.stop()[1])
everybody = _ExperimentalConfig(profile_all_threads=True)
with torch.profiler.profile(experimental_config=everybody) as profile:
    both()
path = Path(tempfile.gettempdir()) / "theirs.json"
profile.export_chrome_trace(str(path))
theirs = [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"]
steps = collections.Counter(row["tid"] for row in ours if row["name"] == "step")
backward = {row["tid"] for row in ours if row["args"].get("Fwd thread id")}
print(json.dumps({
    "same": counts(ours) == counts(theirs),
    "different": str(counts(ours) - counts(theirs)) + str(counts(theirs) - counts(ours)),
    "steps": [steps[tid] for tid in tids],
    "backward": backward == set(tids),  # without a GPU a thread runs its own
}))
""",
        tmp_path,
    )
    assert found.pop("same"), found
    assert (found["steps"], found["backward"]) == ([20, 20], True)


@torch
def test_shapes_are_there_and_calls_of_python_never(tmp_path: Path) -> None:
    found = run(
        """
model = Model()
model.step()
recording = Recording(stack_trace=True, with_modules=True, record_shapes=True)
model.step()
outcome, data = recording.stop()
shapes = [row["args"]["Input Dims"] for row in rows(data) if row["name"] == "aten::addmm"]
calls = sum(row["cat"] == "python_function" for row in rows(data))
print(json.dumps({"calls": calls, "shapes": shapes, "way": outcome.metadata["way"]}))
""",
        tmp_path,
    )
    assert found["calls"] == 0
    assert found["shapes"] == [[[8], [4, 8], [8, 8], [], []]] * 2
    assert found["way"] == "torch.profiler: a test"


@pytest.mark.slow
@torch
def test_the_program_goes_on_while_a_session_ends_and_memory_does_not_grow(tmp_path: Path) -> None:
    found = run(
        """
import threading
model = Model()
def session(steps):
    recording = Recording()
    for _ in range(steps):
        model.step()
    results = []
    stopping = threading.Thread(target=lambda: results.append(recording.stop()))
    begin = time.monotonic()
    stopping.start()
    count, longest = model.step_until(lambda: not stopping.is_alive())
    return len(rows(results[0][1])), count, longest, recording.stopped_after_s, results[0][0].metadata["way"]
session(30)
session(30)
before = kept_bytes()
small, grown = [], []
for _ in range(20):
    small.append(session(30)[0])
    grown.append(kept_bytes() - before)
ended = [session(600) for _ in range(3)]  # the training thread itself may be put aside in one
events, count, longest, took, way = min(ended, key=lambda each: each[2] / each[3])
print(json.dumps({"small": small, "grown": grown, "events": events, "steps": count, "longest": longest,
                  "took": took, "way": way}))
""",
        tmp_path,
    )
    assert min(found["small"]) > 1000
    assert found["grown"][-1] < 24 << 20, found
    assert found["steps"] > 5, found
    assert found["longest"] < 0.6 * found["took"], found
    assert "pieces" not in found["way"]


@pytest.mark.slow
@torch
def test_a_session_that_takes_too_much_memory_is_ended_and_another_begun(tmp_path: Path) -> None:
    plan = """
import json, torch
recording = Recording(limit_bytes=16 << 20)
x = torch.ones(2)
before, most = rss_bytes(), 0
while len(recording.session._times) < 3:
    for _ in range(100):
        x + x
    time.sleep(0.002)  # the thread that looks at the memory may be put aside for a second
    most = max(most, rss_bytes() - before)
deadline = time.monotonic() + 30
while not recording.session._recorder.on and time.monotonic() < deadline:
    time.sleep(0.01)  # the recorder's thread needs the GIL
x @ x
outcome, data = recording.stop()
after = b"aten::dot" in data
print(json.dumps({"missing": outcome.incomplete, "pieces": len(documents(data)), "most": most, "after": after}))
"""
    found = run(plan, tmp_path)
    assert "to limit memory use, torch's profiler recorded in " in found["missing"]
    assert found["pieces"] > 3 and found["after"]
    assert found["most"] < 160 << 20, found  # a session that was not ended would take 2 KiB for each op


@torch
def test_a_session_whose_memory_does_not_come_back_is_the_last_one(tmp_path: Path) -> None:
    plan = """
import re, torch
recording = Recording(limit_bytes=16 << 20)
session = recording.session
session._growth._give_back = lambda: hoard.append(b"x" * (64 << 20))
hoard = []
x = torch.ones(2)
while session._worker.is_alive():
    for _ in range(100):
        x + x
    time.sleep(0.001)
outcome, data = recording.stop()
print(json.dumps({"missing": outcome.incomplete, "pieces": len(documents(data))}))
"""
    found = run(plan, tmp_path)
    assert found["pieces"] == 1
    assert found["missing"].startswith("to limit memory use, torch's profiler recorded in 1 pieces, and ")


@torch
def test_nothing_is_missing_of_the_time_after_the_end_of_the_recording(tmp_path: Path) -> None:
    """The end falls into the time in which a session that took too much memory is written."""
    plan = """
import json, re, torch
begin = time.monotonic()
recording = Recording(limit_bytes=16 << 20)
session, write, length = recording.session, recording.session._write_piece, []
def slow():
    while not session._over:
        time.sleep(0.001)
    length.append(time.monotonic() - begin)
    time.sleep(length[0])  # to write it takes longer than all that was recorded
    return write()
session._write_piece = slow
x = torch.ones(2)
while session._recorder.on:
    for _ in range(100):
        x + x
    time.sleep(0.001)
outcome, data = recording.stop()
missing = float(re.search(r"([0-9.]+) s between", outcome.incomplete)[1])
print(json.dumps({"missing": missing, "length": length[0]}))
"""
    found = run(plan, tmp_path)
    assert found["missing"] < found["length"], found


@pytest.mark.slow
@torch
def test_without_trusted_functions_a_recording_is_cut_into_pieces(tmp_path: Path) -> None:
    found = run(
        """
in_pieces()
model = Model()
model.step()
recording = Recording()
end = time.monotonic() + 1.5
model.step_until(lambda: time.monotonic() > end and len(recording.session._times) > 2)
outcome, data = recording.stop()
print(json.dumps({
    "documents": len(documents(data)), "pieces": outcome.metadata["pieces"], "way": outcome.metadata["way"],
    "warnings": outcome.warnings, "steps": sum(row["name"] == "step" for row in rows(data)),
}))
""",
        tmp_path,
    )
    assert found["documents"] == found["pieces"] > 3
    assert found["way"].startswith("torch.profiler: a test (in %d pieces: the functions" % found["pieces"])
    assert "are missing" in found["warnings"][0]
    assert found["steps"] > 3


@torch
def test_the_programs_own_profiler_goes_first_and_is_whole(tmp_path: Path) -> None:
    found = run(
        """
import threading, torch
from kineto_agent.sources.interface import SourceError
model = Model()
model.step()
def user(during=lambda: None):
    with torch.profiler.profile() as profile:
        for _ in range(10):
            model.step()
        during()
    return sum(event.name == "step" for event in profile.events())
result = []
for _ in range(5):
    recording = Recording()
    for _ in range(30):
        model.step()
    recording.session.give_way()
    stopped = []
    stopping = threading.Thread(target=lambda: stopped.append(recording.stop()))
    result.append(user(stopping.start))
    stopping.join()
    outcome, data = stopped[0]
    result.append(sum(row["name"] == "step" for row in rows(data)))
    assert not outcome.warnings, outcome
refused = []
def refuse():
    try:
        Recording()
    except SourceError as error:
        refused.append(error.reason_code)
user(refuse)
print(json.dumps({"steps": result, "refused": refused}))
""",
        tmp_path,
    )
    assert found == {"steps": [10, 30] * 5, "refused": ["USER_PROFILER_ACTIVE"]}


@torch
@pytest.mark.parametrize(
    ("options", "end", "expected"),
    [
        ("stack_trace=True", "pass", 0),
        ("", "sys.exit(3)", 3),
        pytest.param("", "raise KeyError('of the program')", 1, marks=pytest.mark.slow),
        pytest.param("", "os._exit(4)", 4, marks=pytest.mark.slow),
        pytest.param("", "os.kill(os.getpid(), 15)", -15, marks=pytest.mark.slow),
    ],
)
def test_a_process_may_end_while_a_session_is_on(options: str, end: str, expected: int, tmp_path: Path) -> None:
    plan = "import os\nmodel = Model()\nrecording = Recording(%s)\nfor _ in range(30): model.step()\n" % options
    run(plan + end, tmp_path, expected)


@torch
def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    found = run(
        """
import os
model = Model()
def child():
    import torch
    torch.set_grad_enabled(False)
    x = torch.ones(3)
    for _ in range(2000):
        x + 1
    before = rss_bytes()
    for _ in range(100_000):
        x + 1
    return rss_bytes() - before
recording = Recording()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        os.write(writer, str(child()).encode())
    finally:
        os._exit(0)
os.waitpid(pid, 0)
model.step()
outcome, data = recording.stop()
print(json.dumps({"grown": int(os.read(reader, 100)), "steps": sum(row["name"] == "step" for row in rows(data))}))
""",
        tmp_path,
    )
    assert found["grown"] < 4 << 20
    assert found["steps"] == 1
