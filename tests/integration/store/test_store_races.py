"""Another user who swaps paths of the store while captures are written, read and removed."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent
from support.service.calls_as import plain_python
from support.service.daemon import Daemon, DaemonFailed, running_daemon, watch_to_end
from support.waiting import scaled, until

OTHER = 61001
CAPTURES = 3
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="plays another user: needs root")]

# Looks for everything that it may rename, replace or remove below the store, until it is told to end. Prints how
# often it looked and what it achieved.
SWAPPER = r"""
import os, select, sys
state, victim = sys.argv[1:]
tries = swapped = 0
def attempt(action, *paths):
    global swapped
    try:
        action(*paths)
    except OSError:
        return
    swapped += 1
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    tries += 1
    found = [state, state + "/captures", state + "/trash", state + "/index.sqlite", state + "/lock"]
    for folder in list(found):
        try:
            found += [folder + "/" + name for name in os.listdir(folder)]
        except OSError:
            pass
    for path in found:
        attempt(os.rename, path, path + ".away")
        attempt(os.symlink, victim, path + "/link")
        attempt(os.unlink, path)
        attempt(os.mkfifo, path + ".fifo")
        attempt(open, path, "r+b")
    attempt(os.symlink, victim, state + "/captures/20200101-000000-000-000000")
print(tries, swapped, flush=True)
"""


@pytest.fixture
def victim() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="victim-") as folder:
        Path(folder).chmod(0o777)
        (Path(folder) / "kept").write_bytes(b"as it was")
        yield Path(folder)


def traced(daemon: Daemon, agent: RemoteAgent) -> pb.Capture:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[agent.pid]), duration_ns=10**9, no_attach=True)
    created = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(20))
    agent.do("capture")
    return watch_to_end(daemon.stub(), created.id)


def test_another_user_can_change_nothing_while_captures_are_written_and_removed(victim: Path) -> None:
    # one byte for all captures: retention removes each as soon as it has ended
    with running_daemon(environ={"KINETOD_STORE_MAX_BYTES": "1"}) as daemon, RemoteAgent(daemon.agent_socket) as agent:
        daemon.root.chmod(0o755)
        command = [*plain_python(OTHER), "-c", SWAPPER, str(daemon.state_dir), str(victim)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as swapper:
            assert swapper.stdin is not None and swapper.stdout is not None
            assert swapper.stdout.readline() == "ready\n"
            agent.do("hello")
            verdicts = [traced(daemon, agent).targets[0].verdict for _ in range(CAPTURES)]
            until(lambda: not list((daemon.state_dir / "captures").iterdir()), "retention has removed them all")
            swapper.stdin.write("\n")
            swapper.stdin.flush()
            tries, swapped = map(int, swapper.stdout.readline().split())
        assert verdicts == [pb.VERDICT_DONE] * CAPTURES
        assert (tries > 0, swapped) == (True, 0)
        assert [path.name for path in victim.iterdir()] == ["kept"]


def test_a_daemon_does_not_start_on_a_state_folder_of_another_user(victim: Path) -> None:
    os.chown(victim, OTHER, OTHER)
    with (
        pytest.raises(DaemonFailed, match=f"the store is not safe: .* belongs to uid {OTHER}"),
        running_daemon(state_dir=victim),
    ):
        pass
    assert [path.name for path in victim.iterdir()] == ["kept"]


def test_a_stored_file_that_became_a_link_or_a_fifo_is_damage_and_nothing_of_it_is_sent(victim: Path) -> None:
    with running_daemon() as daemon, RemoteAgent(daemon.agent_socket) as agent:
        agent.do("hello")
        capture = traced(daemon, agent)
        (stored,) = (daemon.state_dir / "captures" / capture.id).rglob("trace.json.gz")
        for is_link in (True, False):
            stored.unlink()
            stored.symlink_to(victim / "kept") if is_link else os.mkfifo(stored)
            (check,) = daemon.stub().VerifyCapture(pb.VerifyCaptureRequest(id=capture.id), timeout=scaled(20))
            assert check.problem.startswith("cannot be read (")
            with pytest.raises(Exception, match="DATA_LOSS"):
                list(daemon.stub().FetchTrace(pb.FetchTraceRequest(capture_id=capture.id), timeout=scaled(20)))
