"""/proc of a hostile process: its files as they come, and what it can choose put where the kernel puts it.

The first part is a name that the process chose: of itself, of a file that it maps, of a control group that was
delegated to it. Where the other parts are empty, the files are what the kernel writes with that name: it keeps \\n
out of them, and nothing else. Nothing about ids, jobs, pods and the number of mappings may depend on it then.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kinetod.agents import proxy_agent
from kinetod.attach.attach_types import AttachError
from kinetod.attach.inspect import process_inspection, target_image
from kinetod.processes import budgets, cgroups, containers, credentials, identity, process_info
from kinetod.processes.accelerator_signs import OutsideSigns

from fuzz.parts import joined, parted

PID = os.getpid()
SIGNS = (OutsideSigns("a", ("lib*.so",), ("HOME",)), OutsideSigns("b", open_files=("/dev/*",)))
FILES = ("status", "stat", "maps", "cgroup", "environ", "cmdline", "auxv", "limits")
STATUS = (Path("/proc/self/status")).read_bytes().partition(b"\n")[2]
UIDS = tuple(map(int, re.findall(rb"^Uid:\t(.*)$", STATUS, re.MULTILINE)[0].split()))
STAT = Path("/proc/self/stat").read_bytes().rpartition(b")")[2]
MAPS = (
    b"400000-500000 r-xp 00000000 08:01 7                          /usr/bin/python3.11\n",
    b"7f0000000000-7f0000001000 r-xp 00000000 08:01 8                  /tmp/",
    b"7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0                  [stack]\n",
)
CGROUP = b"4:memory:/user.slice\n1:name=systemd:/user.slice\n0::/user.slice/user-1000.slice/"
_proc = Path(tempfile.mkdtemp(prefix="fuzz-proc-"))
_folder = _proc / str(PID)


def _fill() -> None:
    (_folder / "task" / str(PID)).mkdir(parents=True)
    (_folder / "ns").mkdir()
    (_folder / "fd").mkdir()
    (_folder / "exe").symlink_to("/usr/bin/python3.11")
    (_folder / "ns/user").symlink_to("user:[4026531837]")
    (_proc / "self").symlink_to(str(PID))
    shutil.copy("/proc/self/mountinfo", _folder / "mountinfo")
    for name in ("stat", "meminfo", "loadavg"):
        shutil.copy(f"/proc/{name}", _proc / name)


_fill()


def play(data: bytes) -> None:
    name, *parts = parted(data, 1 + len(FILES))
    defaults = _as_the_kernel_writes(name)
    for file, content in zip(FILES, parts, strict=True):
        (_folder / file).write_bytes(content or defaults.get(file, b""))
    (_folder / "task" / str(PID) / "status").write_bytes(parts[0] or defaults["status"])
    _read_all()
    if not parts[0]:
        assert credentials.read(PID, proc=_proc).uids == UIDS
        assert _identity() in (None, UIDS[1])
        assert process_inspection.read_process(PID, _proc).uids == UIDS
        assert proxy_agent.inner_number(_folder / "status", PID) == proxy_agent.inner_number(
            Path("/proc/self/status"), PID
        )
        assert budgets._threads_of(str(UIDS[0]), _proc) > 0
    if not parts[2]:
        assert len(target_image.read_maps(PID, _proc)) == len(MAPS)
        assert len(process_inspection.mapped_paths(_folder)) == 2
    if not parts[3]:
        assert process_info.job_of(PID, _proc) is None and not process_info.jobs_of(UIDS[1], _proc)
        assert containers.pod_in(containers.read_cgroups(PID, _proc)) == ""
        known = process_info.read_facts(PID, _proc)
        assert known is None or (known.job, known.pod) == ("", "")


def _as_the_kernel_writes(name: bytes) -> dict[str, bytes]:
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\0", b"")
    path = name.replace(b"\n", b"\\012").replace(b"\0", b"")
    group = name.replace(b"\n", b"_").replace(b"\0", b"")
    return {
        "status": b"Name:\t" + escaped[:60] + b"\n" + STATUS,
        "stat": b"%d (" % PID + escaped[:60] + b")" + STAT,
        "maps": MAPS[0] + MAPS[1] + path + b"\n" + MAPS[2],
        "cgroup": CGROUP + group + b"\n",
        "cmdline": b"python\0train.py\0",
    }


def _identity() -> int | None:
    try:
        key = identity.ProcessKey(PID, identity.start_time_ns(PID, _proc))
        found = identity.identity_of(key, _proc)
    except (OSError, identity.Unidentified):
        return None
    found.close()
    return found.uid


def _read_all() -> None:
    process_info.read_facts(PID, _proc)
    process_info.read_private(PID, _proc, SIGNS)
    process_inspection.read_mapped(PID, _proc)
    process_inspection.environment(PID, _proc)
    containers.container_of(PID, _proc)
    containers.names_of(PID, "host", _proc)
    cgroups.frozen_by(PID, _proc)
    budgets.soft_limits(_folder / "limits")
    proxy_agent.inner_number(_folder / "status", PID)
    budgets._threads_of("0", _proc)
    process_info.jobs_of(UIDS[1], _proc)
    _identity()
    for read in (credentials.read, target_image.read_maps, process_inspection.read_process):
        with contextlib.suppress(ProcessLookupError, AttachError):
            read(PID, proc=_proc)


def seeds() -> Iterator[bytes]:
    """The files of a process as the kernel writes them, and some names."""
    status = (
        b"Name:\tpython3\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t7\nPid:\t7\nPPid:\t1\nTracerPid:\t0\n"
        b"Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nNSpid:\t7\t1\nKthread:\t0\nThreads:\t3\n"
        b"CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n"
        b"x86_Thread_features:\tshstk\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n"
    )
    stat = b"7 (python3) S 1 7 7 0 -1 4194304 " + b" ".join(b"%d" % number for number in range(43)) + b"\n"
    limits = (
        b"Limit                     Soft Limit           Hard Limit           Units     \n"
        b"Max stack size            8388608              unlimited            bytes     \n"
        b"Max processes             127000               127000               processes \n"
        b"Max open files            1024                 1048576              files     \n"
        b"Max address space         unlimited            unlimited            bytes     \n"
    )
    environ = b"RANK=3\0WORLD_SIZE=8\0SLURM_JOB_ID=42\0SLURM_PROCID=1\0POD_NAME=llama-0\0"
    auxv = bytes(range(64)) + bytes(16)
    yield joined(b"", status, stat, b"".join(MAPS), CGROUP + b"x\n", environ, b"python3\0train.py\0", auxv, limits)
    pod = b"x/kubepods/pod8f2c1d3e-1111-2222-3333-123456789012"
    for name in (b"python3", b"a) R 1", pod, b"\xff\xc3\xa9 (deleted)"):
        yield joined(name)
    job = b"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n"
    yield joined(b"", b"", b"", b"", job, environ, b"python3\0-m\0kinetod\0")
