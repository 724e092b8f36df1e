"""Targets in other namespaces, with another root file system and another Python, of other users, with few rights.

There is no musl here: Debian has no Python for it, and CPython's own releases are sources only.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from campaign.parts.attach_harness import Attempt
from support.losses import without_losses
from support.machine import newer_pythons
from support.machine.containers import ALL, SYSTEM_PYTHON, Contained, Kind, need
from support.machine.native import fake_cuda, fake_cupti
from support.service.cli import run_process
from support.service.daemon import Daemon
from support.targets.attachers import HelperAttacher
from support.waiting import scaled, until

pytestmark = pytest.mark.slow

SAY = "import sys\ndef say(what):\n  sys.stdout.write('%s\\n' % what); sys.stdout.flush()\n"
# Ends when a line comes; says then whether a loop's result is what it must be.
BUSY = """
import select
def work():
  total = 0
  for number in range(1000): total += number
  return total
say('ready')
right = True
while not select.select([0], [], [], 0)[0]: right = right and work() == 499500
say(right)
"""
ASLEEP = "import select\nsay('ready')\nselect.select([0], [], [])\nsay(True)\n"
RIGHT = (b"True\n", b"")

KINDS = {
    "pid": Kind(namespaces=("pid",)),
    "mount": Kind(namespaces=("mount",)),
    "net": Kind(namespaces=("net",)),
    "user": Kind(namespaces=("user",)),
    "all": Kind(namespaces=ALL),
    "rootless": Kind(namespaces=(*ALL, "user"), starter=100000),
    "other_user": Kind(starter=1000),
    "no_new_privs": Kind(user=1000, no_new_privs=True),
    "container_user": Kind(namespaces=ALL, user=1000, no_new_privs=True),
}
ROOTS = {
    "container": Kind(namespaces=ALL, root=newer_pythons.ROOT),
    "container_user": Kind(namespaces=ALL, root=newer_pythons.ROOT, user=1000, no_new_privs=True),
    "rootless": Kind(namespaces=(*ALL, "user"), root=newer_pythons.ROOT, starter=100000),
}


def succeeds(attacher: HelperAttacher, target: Contained) -> Attempt:
    attempt = attacher.attach(target.pid)
    assert attempt.outcome == "success", attempt.reason
    return attempt


def python(version: str) -> str:
    found = newer_pythons.find(version)
    if found is None:
        pytest.skip(f"no CPython {version}: {newer_pythons.MAKE}")
    return str(found)


def in_root(version: str) -> str:
    if newer_pythons.find_root(version) is None:
        pytest.skip(f"no root file system with CPython {version}: {newer_pythons.MAKE}")
    return f"/usr/bin/python{version}"


@pytest.mark.parametrize("program", [BUSY, ASLEEP], ids=["busy", "asleep"])
@pytest.mark.parametrize("kind", KINDS)
def test_namespaces_and_users_are_no_obstacle(attacher: HelperAttacher, kind: str, program: str) -> None:
    with Contained(need(KINDS[kind]), [str(SYSTEM_PYTHON), "-c", SAY + program]) as target:
        for _ in range(3):
            succeeds(attacher, target)
        assert target.end() == RIGHT


@pytest.mark.parametrize("version", newer_pythons.VERSIONS)
@pytest.mark.parametrize("kind", ROOTS)
def test_another_root_with_another_python_is_no_obstacle(attacher: HelperAttacher, kind: str, version: str) -> None:
    executable = in_root(version)
    with Contained(need(ROOTS[kind]), [executable, "-c", SAY + BUSY]) as target:
        methods = {succeeds(attacher, target).method for _ in range(3)}
        folder = Path(f"/proc/{target.pid}/root/tmp")
        assert methods <= {"pending-call", "native-thread"}
        assert list(folder.iterdir()) == []
        assert target.end() == RIGHT


def test_another_root_without_proc_is_refused(attacher: HelperAttacher) -> None:
    kind = need(Kind(namespaces=ALL, root=newer_pythons.ROOT, proc=False))
    with Contained(kind, [in_root("3.14"), "-c", SAY + BUSY]) as target:
        attempt = attacher.attach(target.pid)
        assert attempt.outcome != "success" and "has no /proc" in attempt.reason
        assert target.end() == RIGHT


def test_a_sleeping_main_thread_in_a_container_is_gone_round(attacher: HelperAttacher) -> None:
    executable = in_root("3.14")
    with Contained(need(ROOTS["container_user"]), [executable, "-c", SAY + ASLEEP]) as target:
        stat = Path(f"/proc/{target.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "it sleeps")
        assert succeeds(attacher, target).method == "native-thread"
        assert target.end() == RIGHT


def test_an_ordinary_user_attaches_into_their_own_container() -> None:
    # The helper itself runs as that user, with the system's Python: ours may lie where only its owner can go.
    kind = need(Kind(namespaces=(*ALL, "user"), starter=1000))
    paths = os.pathsep.join(path for path in sys.path if path and not path.startswith(sys.base_prefix))
    script = (
        "import sys\nfrom support.targets.attachers import HelperAttacher\n"
        "attacher = HelperAttacher()\nattempt = attacher.attach(int(sys.argv[1]))\nattacher.close()\n"
        "print(attempt.outcome, attempt.reason)\n"
    )
    with Contained(kind, [str(SYSTEM_PYTHON), "-c", SAY + BUSY]) as target:
        user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", str(SYSTEM_PYTHON)]
        done = subprocess.run(
            [*user, "-c", script, str(target.pid)],
            env={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )
        assert (done.stdout, done.returncode) == ("success \n", 0), done.stderr
        assert target.end() == RIGHT


def test_an_agent_in_a_container_is_known_by_our_pid(attacher: HelperAttacher) -> None:
    with Contained(need(Kind(namespaces=ALL)), [str(SYSTEM_PYTHON), "-c", SAY + BUSY]) as target:
        status = Path(f"/proc/{target.pid}/status").read_text()
        found = re.search(r"^NSpid:\s+(\d+)\s+(\d+)$", status, re.MULTILINE)
        assert found and (int(found[1]), int(found[2])) == (target.pid, 1)
        succeeds(attacher, target)  # the channel's peer is that very process


def test_two_containers_with_the_same_pid_inside_are_told_apart(attacher: HelperAttacher) -> None:
    program = [str(SYSTEM_PYTHON), "-c", SAY + BUSY]
    with Contained(need(Kind(namespaces=ALL)), program) as first, Contained(Kind(namespaces=ALL), program) as second:
        inner = [Path(f"/proc/{each.pid}/status").read_text() for each in (first, second)]
        assert [re.findall(r"^NSpid:\s+\d+\s+(\d+)$", text, re.MULTILINE) for text in inner] == [["1"], ["1"]]
        succeeds(attacher, first)  # the channel's peer is that very process
        succeeds(attacher, second)
    with Contained(Kind(namespaces=ALL), program) as third:  # pid 1 of a fresh namespace again
        assert third.pid not in (first.pid, second.pid)
        succeeds(attacher, third)


# What a program does to its own limits before it goes on.
NO_DESCRIPTORS = """
import resource, os
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
held = []
try:
  while True: held.append(os.dup(0))
except OSError: pass
"""


@pytest.mark.parametrize("program", [BUSY, ASLEEP], ids=["busy", "asleep"])
@pytest.mark.parametrize("version", ["3.11", *newer_pythons.VERSIONS])
def test_a_target_without_free_descriptors_is_told_at_once(
    attacher: HelperAttacher, version: str, program: str
) -> None:
    executable = str(SYSTEM_PYTHON) if version == "3.11" else python(version)
    imports = "import select\n"  # later it could not
    with Contained(Kind(), [executable, "-c", SAY + imports + NO_DESCRIPTORS + program]) as target:
        attempt = attacher.attach(target.pid)
        assert (attempt.outcome, "descriptor" in attempt.reason) == ("refused", True), attempt.reason
        assert target.end() == RIGHT


def test_a_target_without_room_for_a_thread_is_told(attacher: HelperAttacher) -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n" + ASLEEP
    with Contained(need(Kind(user=61234)), [str(SYSTEM_PYTHON), "-c", SAY + program]) as target:
        attempt = attacher.attach(target.pid)
        assert (attempt.outcome, "0 threads left within" in attempt.reason) == ("refused", True), attempt.reason
        assert target.end() == RIGHT


def test_a_full_queue_of_pending_calls_is_gone_round(attacher: HelperAttacher) -> None:
    program = (
        "import ctypes, os, platform, threading, time\n"
        "read = '63 ' if platform.machine() == 'aarch64' else '0 '\n"
        "nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)\n"
        "add = ctypes.pythonapi.Py_AddPendingCall\n"
        "def fill():\n"  # in another thread, while the main one does not look
        "  while not open('/proc/self/task/%d/syscall' % os.getpid()).read().startswith(read): time.sleep(0.001)\n"
        "  while add(nothing, None) == 0: pass\n"
        "  say('ready')\n"
        "threading.Thread(target=fill).start()\n"
        "ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)\n"
        "say(True)\n"
    )
    with Contained(Kind(), [str(SYSTEM_PYTHON), "-c", SAY + program]) as target:
        assert succeeds(attacher, target).method == "native-thread"
        assert target.end() == RIGHT


def test_a_stopped_target_is_refused_and_attached_to_when_it_goes_on(attacher: HelperAttacher) -> None:
    with Contained(Kind(), [str(SYSTEM_PYTHON), "-c", SAY + BUSY]) as target:
        os.kill(target.pid, signal.SIGSTOP)
        until(lambda: "\nState:\tT" in Path(f"/proc/{target.pid}/status").read_text(), "it is stopped")
        attempt = attacher.attach(target.pid)
        assert (attempt.outcome, "stopped" in attempt.reason) == ("refused", True), attempt.reason
        os.kill(target.pid, signal.SIGCONT)
        succeeds(attacher, target)
        assert target.end() == RIGHT


def trace(daemon: Daemon, pid: int, folder: Path, *arguments: str) -> "tuple[Any, Counter[str]]":
    """The only target of `kinetoctl trace`, and how many events of each category its file has."""
    result = run_process(["trace", "--pid", str(pid), "-o", "json", *arguments], daemon.client_environ(), folder)
    assert result.stdout, result.stderr
    (target,) = result.json()["targets"]
    found: Counter[str] = Counter()
    for path in folder.glob("*.json.gz"):
        with gzip.open(path, "rt") as stream:
            found.update(str(event.get("cat")) for event in json.load(stream)["traceEvents"] if event["ph"] == "X")
    return target, found


CUDA = """
import ctypes, os, select
os.environ['KINETO_CUPTI_LIBRARY'] = '/run/0/libcupti.so.13'  # stands for the GPU's device file
cupti, cuda = ctypes.CDLL('/run/0/libcupti.so.13'), ctypes.CDLL('/run/1/libcuda.so.1')
said = False
while not select.select([0], [], [], 0.001)[0]:
  cupti.fake_launch_many(b'infer', 3, ctypes.c_uint64(1000), 0)
  if not said: say('ready')
  said = True
say(True)
"""


@pytest.mark.parametrize("kind", ["container", "container_user", "rootless"])
def test_kernels_are_traced_in_another_root_and_network(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    executable, base = in_root("3.14"), ROOTS[kind]
    made = need(
        Kind(
            namespaces=base.namespaces,
            root=base.root,
            starter=base.starter,
            user=base.user,
            no_new_privs=base.no_new_privs,
            share=(fake_cupti().parent, fake_cuda().parent),
        )
    )
    with Contained(made, [executable, "-c", SAY + CUDA]) as target:
        told, found = trace(daemon, target.pid, tmp_path, "--duration", "2s")  # a starved program launches less
        assert (told["verdict"], without_losses(told["warnings"])) == ("VERDICT_DONE", [])
        assert found["kernel"] > 20
        assert target.end() == RIGHT
