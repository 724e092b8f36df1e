import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kinetod.processes import process_info
from kinetod.processes.identity import ProcessFolder, ProcessKey
from kinetod.processes.process_info import (
    MAX_ATTRIBUTES,
    MAX_BYTES,
    Family,
    Job,
    foreign_pids,
    framework,
    job_in,
    jobs_of,
    open_gpus,
    owned_by,
    read_facts,
    resource,
    step_in,
    trace_parent,
    with_descendants,
)
from support.service.calls_as import plain_python
from support.service.daemon import as_user
from support.waiting import until

SLEEP = "import sys; print(flush=True); sys.stdin.read()"
VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LINE = "7f0000000000-7f0000001000 r-xp 00000000 08:01 77 {}\n"


def found(proc: Path, *files: str, program: str = "") -> str:
    (proc / "7").mkdir(exist_ok=True)
    (proc / "7/maps").write_text("".join(map(LINE.format, files)))
    with ProcessFolder(7, proc) as folder:
        return framework(folder, program)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("/v/torch/lib/libtorch_cpu.so",), "torch"),
        (("/v/tensorflow/libtensorflow_framework.so.2", "/v/torch/lib/libtorch.so (deleted)"), "torch"),
        (("/v/jaxlib/xla_extension.so",), "jax"),
        (("/v/tensorflow/libtensorflow_framework.so.2",), "tensorflow"),
        (("/v/cupy/_core/core.cpython-312-x86_64-linux-gnu.so",), "cupy"),
        (("/v/lib/libtorchvision.so", "/v/numpy/_core/_multiarray_umath.so", "/usr/lib/libc.so.6"), ""),
        ((), ""),
    ],
)
def test_a_framework_is_known_by_its_libraries(tmp_path: Path, files: tuple[str, ...], expected: str) -> None:
    assert found(tmp_path, *files) == expected


def test_what_a_program_has_loaded_is_looked_for_until_it_is_there_and_then_remembered(tmp_path: Path) -> None:
    assert found(tmp_path, "/usr/lib/libc.so.6", program="first-run") == ""
    assert found(tmp_path, "/v/torch/lib/libtorch_cpu.so", program="first-run") == "torch"
    assert found(tmp_path, program="first-run") == "torch"
    assert found(tmp_path, program="another-run") == ""


def test_a_process_that_may_not_be_looked_at_has_none(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with ProcessFolder(7, tmp_path) as folder:
        assert framework(folder, "") == ""


def test_a_valid_trace_context_is_taken_and_no_other() -> None:
    assert trace_parent({"TRACEPARENT": VALID}) == VALID
    assert trace_parent({"TRACEPARENT": "00-1"}) == ""
    assert trace_parent({"TRACEPARENT": f"01{VALID[2:]}-{'x' * 99}"}) == ""  # too long
    assert trace_parent({}) == ""


def test_attributes_are_decoded_and_the_service_s_own_variable_counts_more() -> None:
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=a, team=b%2Cc%20d ,odd name=x,nothing,empty=",
        "OTEL_SERVICE_NAME": "trainer",
    }
    assert resource(environ) == {"service.name": "trainer", "team": "b,c d"}


def test_without_that_variable_the_attribute_names_the_service() -> None:
    assert resource({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a"}) == {"service.name": "a"}


def test_a_process_that_says_much_is_cut_short_and_its_service_stays() -> None:
    many = ",".join(f"k{number}=v" for number in range(1000))
    found = resource({"OTEL_RESOURCE_ATTRIBUTES": many, "OTEL_SERVICE_NAME": "trainer"})
    assert (len(found), found["service.name"]) == (MAX_ATTRIBUTES, "trainer")
    long = ",".join(f"k{number}={'é' * 100}" for number in range(9))
    found = resource({"OTEL_RESOURCE_ATTRIBUTES": long})
    assert 0 < sum(len(name) + len(value.encode()) for name, value in found.items()) <= MAX_BYTES


def test_controls_and_bytes_that_are_no_text_are_replaced() -> None:
    assert resource({"OTEL_RESOURCE_ATTRIBUTES": "a=x%0Ay,b=%FF"}) == {"a": "x y", "b": "\ufffd"}


def test_this_process_is_read() -> None:
    facts = read_facts(os.getpid())
    assert facts is not None
    assert facts.key.pid == os.getpid()
    assert facts.uid == os.geteuid()
    assert facts.is_python
    assert facts.command


def test_a_command_line_is_told_of_the_program_whose_rights_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sh", "-c", "read line; exec sleep 1000"], stdin=subprocess.PIPE) as process:
        folder, read_rights = Path(f"/proc/{process.pid}"), process_info._read_with_rights
        until(lambda: (folder / "comm").read_text() == "sh\n", "the shell runs")

        def read_later(*arguments: Any, **more: Any) -> Any:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            until(lambda: (folder / "comm").read_text() == "sleep\n", "it has become sleep")
            return read_rights(*arguments, **more)

        monkeypatch.setattr(process_info, "_read_with_rights", read_later)
        facts = read_facts(process.pid)
        process.kill()
    assert facts is not None
    assert facts.command == ("(changing)",)


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


def put(proc: Path, pid: int, parent: int, ticks: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) S {parent} {' '.join(['0'] * 17)} {ticks} 0 0\n")


def test_ancestors_go_up_to_the_first_process(tmp_path: Path) -> None:
    for pid, parent in ((1, 0), (20, 1), (30, 20), (40, 30)):
        put(tmp_path, pid, parent, pid)
    family = Family(tmp_path)
    assert family.ancestors(40) == (30, 20, 1)
    assert family.ancestors(1) == ()
    assert family.ancestors(99) == ()


def test_a_parent_that_started_later_is_another_process(tmp_path: Path) -> None:
    for pid, parent, ticks in ((1, 0, 1), (20, 1, 900), (30, 20, 300)):
        put(tmp_path, pid, parent, ticks)
    assert Family(tmp_path).ancestors(30) == ()
    assert with_descendants({20}, tmp_path) == {20}
    assert with_descendants({1}, tmp_path) == {1, 20}


def test_what_was_read_while_pids_changed_hands_ends(tmp_path: Path) -> None:
    put(tmp_path, 20, 30, 5)
    put(tmp_path, 30, 20, 5)
    assert Family(tmp_path).ancestors(20) == (30,)


def test_very_long_lines_are_followed_for_some_generations() -> None:
    family = Family()
    for pid in range(2, 5000):
        family.add(ProcessKey(pid, pid), pid - 1)
    assert family.ancestors(4999) == tuple(range(4998, 4898, -1))


def test_what_is_known_is_not_read(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.add(ProcessKey(40, 9), 30)
    family.add(ProcessKey(30, 8), 20)
    assert family.ancestors(40) == (30,)


def test_descendants_are_found_in_other_sessions_too() -> None:
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], start_new_session=True)"
    program = "import os; print(os.getpid(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grandchild.format(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        grandchild_pid = int(child.stdout.readline())
        found = with_descendants({child.pid})
        child.stdin.close()
    assert found == {child.pid, grandchild_pid}
    assert os.getpid() not in found


STEP = "/system.slice/slurmstepd.scope/job_77/step_0/user/task_0"


@pytest.mark.parametrize(
    ("cgroups", "job"),
    [
        (f"0::{STEP}\n", Job("77", None)),
        ("0::/system.slice/node1_slurmstepd.scope/job_77/step_extern\n", Job("77", None)),
        ("9:name=systemd:/\n4:memory:/slurm/uid_1000/job_77/step_0\n0::/\n", Job("77", 1000)),
        ("4:memory:/slurm_node-1/uid_1000/job_77\n", Job("77", 1000)),
        ("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_77/step_0\n", None),
        ("0::/user.slice/slurm/uid_1000/job_77\n", None),
        ("0::/../../system.slice/slurmstepd.scope/job_77/step_0\n", None),
        ("0::/system.slice/slurmstepd.scope/job_77x/step_0\n", None),
        (f"0::{STEP}/job_78\n", Job("77", None)),
        ("", None),
    ],
)
def test_a_job_is_a_place_that_only_slurm_can_make(cgroups: str, job: Job | None) -> None:
    assert job_in(cgroups) == job


@pytest.mark.parametrize(
    ("cgroups", "step"),
    [
        (f"0::{STEP}\n", "0"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0\n", "batch"),
        ("4:memory:/slurm/uid_1000/job_77/step_3+1/task_2\n0::/\n", "3+1"),
        ("9:cpuset:/slurm/uid_1000/job_77\n4:memory:/slurm/uid_1000/job_77/step_extern\n", "extern"),
        ("0::/system.slice/slurmstepd.scope/job_77\n", ""),
        ("0::/user.slice/system.slice/slurmstepd.scope/job_77/step_0\n", ""),
        ("", ""),
    ],
)
def test_the_step_is_the_folder_below_the_job(cgroups: str, step: str) -> None:
    assert step_in(cgroups) == step


def test_a_job_belongs_to_the_user_of_its_oldest_process_that_is_not_roots() -> None:
    members = [(Job("77", None), 0, 1), (Job("77", None), 1000, 2), (Job("77", None), 2000, 3)]
    assert owned_by(1000, members) == {"77"}
    assert owned_by(2000, members) == frozenset()
    assert owned_by(0, members) == frozenset()


def test_the_uid_in_the_path_counts_more_than_processes() -> None:
    members = [(Job("77", 1000), 2000, 1), (Job("78", 2000), 1000, 1)]
    assert owned_by(1000, members) == {"77"}


def test_the_jobs_of_a_host_are_read_from_its_processes(tmp_path: Path) -> None:
    for pid, uid, start in ((10, 0, 100), (11, 1000, 200), (12, 2000, 300)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"0::{STEP}\n")
        (folder / "stat").write_text(f"{pid} (a (b) c) S " + " ".join(["0"] * 18) + f" {start} 0\n")
        (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (tmp_path / "13").mkdir()
    (tmp_path / "self").mkdir()
    assert jobs_of(1000, tmp_path) == {"77"}
    assert jobs_of(2000, tmp_path) == frozenset()
    assert jobs_of(os.getuid() + 12345) == frozenset()
