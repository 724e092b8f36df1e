import subprocess
from pathlib import Path

import pytest
from support.agent.python_child import environment, run_python
from support.machine.native import FAKES, build

TESTS = Path(__file__).parents[4]


def run(plan: str, expected: int = 0) -> "subprocess.CompletedProcess[str]":
    """Carries out the plan in a process of its own, which must say nothing."""
    found = run_python(["-m", "support.agent.calls_session", plan], env=environment(PYTHONWARNINGS="ignore"), cwd=TESTS)
    assert found.returncode == expected, found.stdout + found.stderr
    if expected == 0:
        assert found.stderr == ""
    return found


def test_calls_nest_and_have_names_times_and_threads() -> None:
    run(
        """
def outer():
    return inner() + len([1, 2])
def inner():
    return sum(range(3))
recording = Recording()
before = time.time_ns()
outer()
after = time.time_ns()
outcome, data, names = recording.stop()
assert not outcome.warnings and not outcome.incomplete, outcome
found = [(short(call.name), call) for call in calls(data, names)]
at = next(i for i, (name, _) in enumerate(found) if name == "outer")
expected = ["outer", "inner", "C<built-in function sum>", "C<built-in function len>"]
assert [name for name, _ in found[at:at + 4]] == expected, found
depth = found[at][1].depth
assert [call.depth - depth for _, call in found[at:at + 4]] == [0, 1, 2, 1]
assert found[at][1].name == "F<plan>\\n2\\nouter"
assert {call.thread for _, call in found[at:at + 4]} == {threading.get_native_id()}
spans = [(call.start_ns, call.end_ns) for _, call in found[at:at + 4]]
assert before <= spans[0][0] <= spans[1][0] <= spans[2][0] <= spans[2][1] <= spans[1][1] <= spans[3][0]
assert spans[3][1] <= spans[0][1] <= after
"""
    )


def test_methods_have_the_names_of_their_classes_where_python_knows_them() -> None:
    run(
        """
class Client:
    def send(self):
        pass
recording = Recording()
Client().send()
_outcome, data, names = recording.stop()
expected = "Client.send" if hasattr(Client.send.__code__, "co_qualname") else "send"
assert expected in [short(call.name) for call in calls(data, names)]
"""
    )


def test_what_was_on_the_stack_at_the_start_is_there_and_ends_when_it_ends() -> None:
    run(
        """
kept = []
def outer():
    inner()
def inner():
    kept.append(Recording())
outer()
outcome, data, names = kept[0].stop()
found = {short(call.name): call for call in calls(data, names)}
assert found["inner"].depth == found["outer"].depth + 1
assert 0 < found["outer"].start_ns <= found["inner"].end_ns <= found["outer"].end_ns
"""
    )


def test_threads_that_begin_during_a_recording_are_recorded() -> None:
    run(
        """
def work():
    end = time.monotonic() + 30
    while "step" not in seen and time.monotonic() < end:
        step()
        seen.update(short(name) for name in recording._reader.strings().values())
def step():
    pass
seen = set()
recording = Recording()
thread = threading.Thread(target=work)
thread.start()
thread.join()
outcome, data, names = recording.stop()
assert {call.thread for call in calls(data, names) if short(call.name) == "step"} == {thread.native_id}
"""
    )


def test_exceptions_and_generators_keep_the_nesting() -> None:
    run(
        """
def numbers():
    for i in range(3):
        yield i
def fails():
    int("no")
def caller():
    total = 0
    for i in numbers():
        try:
            fails()
        except ValueError:
            total += i
    return total
recording = Recording()
caller()
_outcome, data, names = recording.stop()
found = [call for call in calls(data, names) if short(call.name) in ("numbers", "fails", "caller")]
assert [short(call.name) for call in found].count("numbers") == 4  # three values and the end
assert [short(call.name) for call in found].count("fails") == 3
assert len({call.depth for call in found}) == 2 and all(call.end_ns for call in found)
"""
    )


def test_the_programs_own_profile_function_stays_and_sees_what_it_would_see() -> None:
    run(
        """
seen = []
def own(frame, event, argument):
    seen.append((event, frame.f_code.co_name))
def work():
    pass
recording = Recording()
assert sys.getprofile() is None  # ours cannot be seen
sys.setprofile(own)
work()
time.sleep(0.2)  # the agent looks every 50 ms, and what is tested is that it changes nothing
work()
assert sys.getprofile() is own
sys.setprofile(None)
outcome, data, names = recording.stop()
assert seen.count(("call", "work")) == 2
assert not [call for call in calls(data, names) if short(call.name) == "work"]
sys.setprofile(own)
recording = Recording()
work()
outcome, data, names = recording.stop()
assert sys.getprofile() is own
sys.setprofile(None)
assert seen.count(("call", "work")) == 3
text = "1 threads were not recorded: the program has its own profile function on them, or an audit hook"
assert outcome.warnings == [text]
"""
    )


def test_a_c_function_whose_definition_lies_where_a_freed_one_lay_has_its_own_name() -> None:
    run(
        """
import ctypes
class Definition(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("run", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]
new = ctypes.pythonapi.PyCFunction_NewEx
new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
class Function(ctypes.Structure):
    _fields_ = [("references", ctypes.c_ssize_t), ("type", ctypes.c_void_p), ("definition", ctypes.POINTER(Definition))]
text = ctypes.create_string_buffer(b"first")
found = Function.from_address(id(len)).definition.contents
definition = Definition(ctypes.cast(text, ctypes.c_char_p), found.run, found.flags, None)
function = new(ctypes.addressof(definition), None, None)
recording = Recording()
function([])
text.value = b"other"
function([])
_outcome, data, names = recording.stop()
found = [call.name for call in calls(data, names)]
assert [name for name in found if "first" in name or "other" in name] == [
    "C<built-in function first>", "C<built-in function other>"
], found
"""
    )


def test_threads_for_which_there_is_no_room_are_told_as_such() -> None:
    run(
        """
ready, go = threading.Semaphore(0), threading.Semaphore(0)
def work():
    ready.release()
    go.acquire()
recording = Recording()
for _ in range(2100):
    thread = threading.Thread(target=work)
    thread.start()
    ready.acquire()
    recording._agent.do(recording.session._native.look)
    go.release()
    thread.join()
outcome, data, names = recording.stop()
number, text = outcome.warnings[0].split(" ", 1)
assert 50 < int(number) < 60, number  # some threads are those of this test
assert text == (
    "threads were not recorded: exact calls are limited to 2,048 threads, including those that have ended; "
    "ask for a shorter recording"
)
assert outcome.warnings[1:] == []
"""
    )


def test_an_audit_hook_that_forbids_it_is_obeyed_in_silence() -> None:
    run(
        """
from kineto_agent.sources.interface import SourceError
def forbid(event, arguments):
    if event == "sys.setprofile":
        raise RuntimeError("no profilers here")
sys.addaudithook(forbid)
try:
    Recording()
except SourceError as error:
    assert error.reason_code == "PYTHON_CALLS_UNAVAILABLE"
else:
    raise AssertionError
"""
    )


def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    run(
        """
from kineto_agent.protocol import arena
def rss_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
def work():
    pass
recording = Recording(limit_bytes=32 << 20)
before = rss_bytes()
kept, sizes = recording._daemon.taken, []
recording._daemon.taken = type("", (), {"append": lambda self, buffer: sizes.append(len(buffer.data))})()
for _ in range(200):
    for _ in range(10_000):
        work()
    states = recording._reader.states()
    while states.count(arena.FREE) < len(states) * 3 // 4:  # as fast as a thread that copies can follow
        time.sleep(0.001)
        states = recording._reader.states()
assert sum(sizes) > 40 << 20
assert rss_bytes() - before < 40 << 20
recording._daemon.taken = kept
outcome, _data, _names = recording.stop()
assert outcome.counts.records > 4_000_000 and not outcome.counts.dropped and not outcome.incomplete, outcome
"""
    )


def test_without_a_daemon_that_copies_the_recording_ends_early_and_says_so() -> None:
    run(
        """
def work():
    pass
recording = Recording(limit_bytes=1 << 20, copies=False)
for _ in range(100_000):
    work()
outcome, data, names = recording.stop()
assert "larger buffer limit" in outcome.incomplete and outcome.counts.dropped == 1, outcome
assert all(call.end_ns for call in calls(data, names)[:-5] if short(call.name) == "work")
"""
    )


def test_functions_that_are_freed_do_not_lend_their_names_to_others() -> None:
    run(
        """
recording = Recording()
for i in range(500):
    space = {}
    exec("def f%d(): pass" % i, space)
    space["f%d" % i]()
_outcome, data, names = recording.stop()
found = [short(call.name) for call in calls(data, names)]
assert [name for name in found if name[0] == "f" and name[1:].isdigit()] == ["f%d" % i for i in range(500)]
"""
    )


def test_calls_of_a_second_recording_belong_to_their_threads_in_whatever_order_these_call() -> None:
    run(
        """
def first():
    pass
def second():
    pass
class Caller(threading.Thread):
    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.turns, self.done = function, threading.Semaphore(0), threading.Semaphore(0)
        self.start()
    def run(self):
        while True:
            self.turns.acquire()
            self.function()
            self.done.release()
    def call(self):
        self.turns.release()
        self.done.acquire()
callers = [Caller(first), Caller(second)]
for order in (callers, callers[::-1], callers):
    recording = Recording(copies=False)
    for caller in order:
        caller.call()
    for caller in order:
        caller.call()
    _outcome, data, names = recording.stop()
    threads = {(short(call.name), call.thread) for call in calls(data, names)}
    assert {(name, tid) for name, tid in threads if name in ("first", "second")} == {
        ("first", callers[0].native_id), ("second", callers[1].native_id)}, threads
"""
    )


def test_a_thread_of_a_library_that_calls_python_again_and_again_has_whole_stacks_each_time() -> None:
    library = build("libcaller.so", [FAKES / "native_caller.c"], ["-shared", "-fPIC"])
    run(
        f"""
import ctypes
def first():
    step()
def second():
    step()
def third():
    step()
def step():
    end = time.monotonic() + 30
    before = counts()
    while counts() < before + 100 and time.monotonic() < end:  # this call of Python is recorded now
        sorted([])
counts = lambda: recording.session._native.counts().records if recording else 0
tids = set()
def call(number):
    tids.add(threading.get_native_id())
    (first, second, third)[number]()
library = ctypes.CDLL({str(library)!r})
recording = Recording(copies=False)
library.call_from_one_thread(ctypes.CFUNCTYPE(None, ctypes.c_int)(call), 3)
_outcome, data, names = recording.stop()
tid, = tids
found = [short(call.name) for call in calls(data, names) if call.thread == tid]
assert [name for name in found if name in ("call", "first", "second", "third", "step")] == [
    "call", "first", "step", "call", "second", "step", "call", "third", "step"], found[:50]
"""
    )


def test_a_forked_child_is_not_recorded_and_may_record_by_itself() -> None:
    run(
        """
def work():
    pass
recording = Recording()
pid = os.fork()
if pid == 0:
    try:
        work()
        assert recording.session._native.counts().records == 0
        again = Recording()
        work()
        _outcome, data, names = again.stop()
        code = 0 if "work" in {short(call.name) for call in calls(data, names)} else 2
    except BaseException:
        code = 1
    os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
work()
_outcome, data, names = recording.stop()
assert [short(call.name) for call in calls(data, names)].count("work") == 1
"""
    )


@pytest.mark.parametrize(
    ("end", "expected"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise KeyError('of the program')", 1), ("os._exit(4)", 4)],
)
def test_a_process_may_end_while_a_recording_is_on(end: str, expected: int) -> None:
    run("recording = Recording()\nfor _ in range(1000): len([])\n" + end, expected)


@pytest.mark.slow
def test_many_recordings_beside_busy_threads_leave_nothing() -> None:
    found = run(
        """
def work():
    while not over:
        step(3)
def step(n):
    return step(n - 1) if n else sorted([2, 1])
over = []
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(8):
    recording = Recording(limit_bytes=8 << 20)
    time.sleep(0.01)  # for some calls to be recorded; how many does not matter
    recording.stop()
over.append(True)
for thread in threads:
    thread.join()
print(len(os.listdir("/proc/self/fd")))
"""
    )
    assert int(found.stdout) < 12 + 8  # the reader of each recording keeps one here


MODULES = """
import types
class Module:
    def __call__(self, *arguments):
        return self.forward(*arguments)
class Outer(Module):
    def forward(self, x):
        for _ in range(3):
            small(x)
            len([x])
        return inner(x)
class Inner(Module):
    def forward(self, x):
        if x is None:
            raise ValueError(x)
        return small(x)
def small(x):
    return x
outer, inner = Outer(), Inner()
sys.modules["torch.nn.modules.module"] = types.SimpleNamespace(Module=Module)
"""


def test_without_types_calls_of_modules_alone_are_recorded_and_nest() -> None:
    run(
        MODULES
        + """
kept = []
class Starting(Module):
    def forward(self):
        kept.append(Recording(types=()))
Starting()()
outer(1)
try:
    outer(None)
except ValueError:
    pass
_outcome, data, names = kept[0].stop()
found = [(call.name.split("\\n")[0], call.depth, bool(call.end_ns)) for call in calls(data, names)]
pair = [("MOuter", 0, True), ("MInner", 1, True)]
assert found == [("MStarting", 0, True), *pair, *pair], found
"""
    )


def test_calls_of_modules_take_no_memory_for_what_else_is_called() -> None:
    run(
        MODULES
        + """
def anonymous():
    with open("/proc/self/status") as status:
        return int(status.read().split("RssAnon:")[1].split()[0]) >> 10
before = anonymous()
recording = Recording(types=())
for _ in range(1_000_000):
    small(1)
outer(1)
during = anonymous()
outcome, data, names = recording.stop()
assert during - before < 16 and anonymous() - before < 16, (before, during, anonymous())
assert (outcome.counts.records, outcome.counts.dropped) == (4, 0), outcome
"""
    )
