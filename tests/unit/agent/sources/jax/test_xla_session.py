"""Sessions of a real JAX's profiler, driven as the agent drives them, in processes of their own."""

import json
import signal
from typing import Any, Dict

import pytest
from kineto_agent.sources import collector_library, native_interface
from kineto_agent.sources.jax import xla_session
from support.agent.python_child import environment, run_python

pytestmark = pytest.mark.jax


def answer(plan: str, **variables: str) -> Dict[str, Any]:
    """What the last line of the plan's output says in JSON. It must have written nothing else, and no error."""
    code = "import json\n" + plan
    done = run_python(["-W", "ignore", "-m", "support.xla.jax_session", code], env=environment_of(**variables))
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    found: Dict[str, Any] = json.loads(line)
    return found


def environment_of(**variables: str) -> Dict[str, str]:
    import support

    return {**environment(**variables), "PYTHONPATH": environment()["PYTHONPATH"] + ":" + support.__path__[0] + "/.."}


def test_a_recording_is_one_profile_and_writes_nothing_of_its_own() -> None:
    found = answer(
        """
model = Model()
recording = Recording()
model.step_for(0.2)
outcome, data = recording.stop()
(piece,) = pieces(data)
names = b"train", b"hlo_op", b"profile_start_time"
print(json.dumps({**outcome.metadata, "incomplete": outcome.incomplete, "found": [name in piece for name in names]}))
"""
    )
    assert (found["pieces"], found["gaps_ns"], found["incomplete"], found["found"]) == (1, [], "", [True] * 3)
    assert sum(map(len, found["threads"].values())) >= 1


def test_the_programs_own_traces_are_whole_before_during_and_after() -> None:
    found = answer(
        """
model = Model()
def own():
    return own_trace(model, 5)["train"]
before = own()
recording = Recording()
model.step_for(0.1)
during = own()
taken = recording.session.taken()
outcome, data = recording.stop()
print(json.dumps({
    "own": [before, during, own()], "who": taken.profiler, "pieces": len(pieces(data)),
    "same": jax._src.lib._profiler.ProfilerSession.__qualname__,
}))
"""
    )
    assert found["own"] == [5, 5, 5]
    assert found["who"] == "the program's own jax.profiler"
    assert (found["pieces"], found["same"]) == (1, "ProfilerSession")


def test_a_server_that_the_program_starts_ends_the_recording_and_keeps_others_from_beginning() -> None:
    found = answer(
        """
import socket
model = Model()
recording = Recording()
model.step_for(0.05)
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
server = jax.profiler.start_server(port)
taken = recording.session.taken()
outcome, data = recording.stop()
refused = refusal()
del server
jax.profiler.stop_server()
print(json.dumps({"who": taken.profiler, "pieces": len(pieces(data)), "refused": refused, "then": refusal()}))
"""
    )
    assert (found["who"], found["pieces"], found["then"]) == ("the program's own jax.profiler's server", 1, "")
    assert found["refused"].startswith("JAX_PROFILER_UNAVAILABLE: the program has a profiler server")


def test_a_program_that_profiles_itself_refuses_ours() -> None:
    found = answer(
        """
model = Model()
with tempfile.TemporaryDirectory() as folder:
    jax.profiler.start_trace(folder)
    refused = refusal()
    model.step()
    jax.profiler.stop_trace()
    names = names_in(Path(folder))
print(json.dumps({"refused": refused, "train": names["train"]}))
"""
    )
    assert found["refused"].startswith("USER_PROFILER_ACTIVE: the program's own jax.profiler is recording")
    assert found["train"] == 1


def test_a_recording_that_would_take_too_much_memory_is_made_in_pieces_and_says_what_is_missing() -> None:
    found = answer(
        """
model = Model()
recording = Recording(4 << 20)
end = time.monotonic() + 60
while not recording.session._gaps and time.monotonic() < end:
    model.step_for(0.1)
outcome, data = recording.stop()
print(json.dumps({
    "pieces": len(pieces(data)), "gaps": len(outcome.metadata["gaps_ns"]), "incomplete": outcome.incomplete,
}))
"""
    )
    assert found["pieces"] == found["gaps"] + 1 > 1
    assert "are missing; request a shorter capture or a larger buffer limit" in found["incomplete"]


def test_a_forked_child_lives_and_dies_without_the_session() -> None:
    found = answer(
        """
import os
model = Model()
recording = Recording()
model.step_for(0.05)
child = os.fork()
if not child:
    with jax.profiler.TraceAnnotation("in the child"):
        pass
    gone = recording.session._session is None
    del recording
    import gc
    gc.collect()
    os._exit(0 if gone else 1)
status = os.waitpid(child, 0)[1]
model.step_for(0.05)
outcome, data = recording.stop()
print(json.dumps({"status": status, "pieces": len(pieces(data))}))
"""
    )
    assert found == {"status": 0, "pieces": 1}


def test_a_program_that_ends_during_a_recording_ends_well_and_its_records_are_there() -> None:
    found = answer(
        """
import atexit
from kineto_agent.sources.jax import xla_session
xla_session._EXIT_LIMIT_S = 30  # a busy machine takes longer than a program is kept
def tell():
    recording.session._arena.finish()
    print(json.dumps({"bytes": len(recording.copied())}))
atexit.register(tell)  # called after the session's own
model = Model()
recording = Recording()
model.step_for(0.1)
sys.exit(0)
"""
    )
    assert found["bytes"] > 1000


def test_a_thread_of_ours_that_is_inside_xla_when_the_interpreter_ends_does_not_end_the_program() -> None:
    done = run_python(
        [
            *("-W", "ignore", "-m", "support.xla.jax_session"),
            """
import ctypes
from kineto_agent.sources.jax import xla_session
xla_session._EXIT_LIMIT_S = 0
ctypes.CDLL(None).on_exit(ctypes.CDLL(None).sleep, None)  # for as many seconds as the exit status says
model = Model()
recording = Recording()
model.step_for(1.0)
sys.exit(3)
""",
        ],
        env=environment_of(),
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_the_guard_of_the_exit_leaves_threads_of_the_program_as_they_were() -> None:
    done = run_python(
        [
            "-c",
            """
import ctypes
standard = ctypes.CDLL("libstdc++.so.6")
ctypes.CDLL(None).prctl(15, b"kineto-x", 0, 0, 0)  # PR_SET_NAME: the main thread is never ours
from kineto_agent.sources.jax.xla_session import ExitGuard
ExitGuard.of_process().place()
standard._ZSt9terminatev()
""",
        ],
        env=environment_of(),
    )
    assert done.returncode == -signal.SIGABRT, done.stderr


def test_without_the_native_library_jax_is_recorded_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_library, "path", lambda: "/nowhere.so")
    monkeypatch.setattr(native_interface, "_loaded", {})
    assert xla_session._exit_guard() is None


def test_with_xlas_log_on_standard_error_no_session_begins() -> None:
    done = run_python(
        ["-m", "support.xla.jax_session", "model = Model(); print(refusal())"],
        env=environment_of(TF_CPP_MIN_LOG_LEVEL="0"),
    )
    assert "XLA would write to the program's standard error" in done.stdout
    assert "Profiler session" not in done.stderr
