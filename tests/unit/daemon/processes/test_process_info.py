import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kinetod.processes import process_info
from kinetod.processes.proc_folder import ProcessFolder
from kinetod.processes.process_info import foreign_pids, open_gpus, read_facts
from support.service.calls_as import plain_python
from support.service.daemon import as_user

SLEEP = "import sys; print(flush=True); sys.stdin.read()"


def test_this_process_is_read() -> None:
    facts = read_facts(os.getpid())
    assert facts is not None
    assert facts.key.pid == os.getpid()
    assert facts.uid == os.geteuid()
    assert facts.is_python
    assert facts.command


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "9"}, (3, 8, "", "")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"}, (1, 2, "77", "")),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}, (None, None, "77", "2")),
        ({"SLURM_JOB_ID": "77", "SLURM_STEPID": "4294967291"}, (None, None, "77", "batch")),
        ({"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n1"}, (None, None, "77", "batch")),
        ({"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "2"}, (None, None, "77", "2")),
        ({"RANK": "-1", "WORLD_SIZE": "many", "TORCHELASTIC_RUN_ID": "none"}, (None, None, "", "")),
        ({"RANK": "99999999999", "TORCHELASTIC_RUN_ID": "night"}, (None, None, "night", "")),
    ],
)
def test_the_launcher_is_read_from_the_environment(
    environ: dict[str, str], expected: tuple[int | None, int | None, str, str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", SLEEP], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()  # the program runs: its environment is in place
    facts = read_facts(process.pid)
    process.stdin.close()
    process.stdout.close()
    process.wait()
    assert facts is not None
    assert (facts.rank, facts.world_size, facts.job_id, facts.job_step) == expected


def test_this_process_and_its_children_are_not_foreign() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], stdin=subprocess.PIPE) as child:
        pids = foreign_pids()
        assert child.stdin is not None
        child.stdin.close()
    assert os.getppid() in pids
    assert not pids & {os.getpid(), child.pid}


def test_a_zombie_and_nobody_are_no_processes() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_facts(process.pid) is None
    process.wait()
    assert read_facts(process.pid) is None


def test_gpus_are_the_devices_that_are_open(tmp_path: Path) -> None:
    folder = tmp_path / "7" / "fd"
    folder.mkdir(parents=True)
    links = ("/dev/nvidia3", "/dev/nvidia0", "/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null")
    for number, path in enumerate(links):
        (folder / str(number)).symlink_to(path)
    with ProcessFolder(7, tmp_path) as process:
        assert open_gpus(process) == (0, 3)
    (tmp_path / "8").mkdir()
    with ProcessFolder(8, tmp_path) as process:
        assert open_gpus(process) == ()


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (["/usr/bin/python3", "/usr/local/bin/kinetoctl", "trace", "--command", "train"], True),
        (["python", "-m", "kinetoctl", "ps"], True),
        (["python", "-P", "-m", "kinetod.attach_helper.attach_worker"], True),
        (["python", "-u", "-W", "ignore", "-m", "kinetoctl", "ps"], True),
        (["python", "-X", "dev", "-O", "/opt/bin/kinetoctl", "ps"], True),
        (["python", "-c", "kinetoctl"], False),
        (["python", "-X", "kinetoctl", "train.py"], False),
        (["python", "-P", "train.py"], False),
        (["python", "-m", "kinetod"], True),
        (["/usr/local/bin/kinetod"], True),
        (["python", "-m", "kinetoctl.demo_target"], False),
        (["python", "train.py", "kinetoctl"], False),
        (["python", "-m"], False),
        (["python"], False),
    ],
)
def test_our_own_programs_are_told_apart(command: list[str], ours: bool) -> None:
    assert process_info._is_ours(command) is ours


def test_a_process_with_rights_of_its_own_is_not_plain() -> None:
    undumpable = "import ctypes; ctypes.CDLL(None).prctl(4, 0); " + SLEEP
    for program, prefix, plain in (
        (SLEEP, [], True),
        (undumpable, [], os.getuid() == 0),  # root's folder is root's in any case
        (SLEEP, as_user(12345), False),  # it has a capability
        (undumpable, plain_python(12345)[:-1], False),
    ):
        if prefix and os.getuid() != 0:
            continue
        python = plain_python(0)[-1] if program is undumpable else sys.executable
        child = subprocess.Popen([*prefix, python, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        facts = read_facts(child.pid)
        child.communicate()
        assert facts is not None
        assert facts.plain == plain, (program, prefix)


def test_capabilities_of_a_user_namespace_of_its_own_leave_a_process_to_its_user() -> None:
    facts = process_info.read_facts(os.getpid())
    assert facts is not None
    elsewhere = process_info.PrivateFacts(own_user_namespace=True)
    capable = replace(facts, plain=False, capable=True)
    assert capable.with_private(elsewhere).plain
    assert not capable.with_private(process_info.PrivateFacts()).plain
    assert not replace(facts, plain=False, capable=False).with_private(elsewhere).plain  # a set-uid program


def test_what_another_user_may_not_read_is_hidden() -> None:
    own = process_info.read_facts(os.getpid())
    assert own is not None and not own.hidden


FAKE_PROC = """
mount -t tmpfs none /proc
mkdir /proc/self /proc/$$
for folder in self $$; do
    printf 'Name:\\ttrain\\nUid:\\t0\\t0\\t0\\t0\\n' > /proc/$folder/status
    printf '0::/kubepods/pod8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b/c\\n' > /proc/$folder/cgroup
done
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_process_that_has_mounted_over_proc_fakes_nothing() -> None:
    code = f"import os; os.setgid(64123); os.setuid(64123); {SLEEP}"
    command = ["unshare", "--mount", "sh", "-ec", FAKE_PROC, "sh", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        facts, own = read_facts(process.pid), read_facts(os.getpid())
        process.kill()
    assert facts is not None and own is not None
    assert (facts.uid, facts.pod, facts.command[0]) == (64123, own.pod, sys.executable)
