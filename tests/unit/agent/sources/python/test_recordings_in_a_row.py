"""Each recording of a process is right, whatever threads and functions the ones before it have met."""

from pathlib import Path

import pytest
from support.agent.python_child import environment, run_python

TESTS = Path(__file__).parents[4]
CALLS = """
from collections import Counter
from support.agent.calls_session import Recording, calls, short
def begin():
    return Recording(copies=False)
def check(recording, made, seen):
    _outcome, data, names = recording.stop()
    outer, found = {}, Counter()
    for call in calls(data, names):
        name = short(call.name)
        if is_workers(name):
            outer[call.thread] = name, call.depth
            found[name, call.thread] += 1
        elif name[0] == "g" and is_workers("f" + name[1:]):
            assert outer[call.thread] == ("f" + name[1:], call.depth - 1), (name, call, outer)
    assert set(found) <= set(seen), (found, seen)
    assert {key: found[key] for key in made} == made, (found, made)
"""
STACKS = """
from support.agent.stack_recorder import Recorder, plain
def begin():
    recorder = Recorder(stack_sample_hz=1000)
    recorder.wait(1)
    return recorder
def check(recorder, made, seen):
    recorder.wait(2)
    for sample in recorder.stop():
        names = [name for name in plain(sample.stack) if is_workers("f" + name[1:])]
        assert {("f" + name[1:], sample.thread_id) for name in names} <= set(seen), (sample, seen)
        assert len({name[1:] for name in names}) <= 1, sample
    recorder.close()
"""
IN_A_ROW = """
import os
from collections import Counter
from support.agent.named_workers import Crew, is_workers
def record(crew):
    crew.change()
    recording = begin()
    made = Counter(crew.turns())
    crew.change()  # threads end and begin meanwhile; whether the new ones are seen at once is left open
    later = crew.turns(only_new=True)
    check(recording, made, [*made, *later])
crew = Crew(SEED)
for _ in range(4):
    record(crew)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child = Crew(SEED + 1)
            record(child)
            record(child)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize("source", [CALLS, STACKS], ids=["calls", "stacks"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_record_is_its_threads_in_each_of_several_recordings_and_in_forked_children(
    source: str, seed: int
) -> None:
    env = environment(PYTHONWARNINGS="ignore")
    env["PYTHONPATH"] += ":" + str(TESTS)
    ran = run_python(["-c", "SEED = %d\n" % seed + source + IN_A_ROW], env=env)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
