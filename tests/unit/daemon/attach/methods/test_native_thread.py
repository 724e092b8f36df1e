import platform
import subprocess
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Deadline
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.native_thread import NativeThread, start_thread
from support.targets.engine_target import engine_target, needs_ptrace, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import until

pytestmark = needs_ptrace
METHOD = NativeThread()
SECONDS = 10.0
# Stores 1 at the address that it is given: mov dword [rdi], 1; xor eax, eax; ret; int3 / mov w1, 1; str; mov x0, 0; ret
STORE_ONE = {
    "x86_64": bytes.fromhex("c70701000000 31c0 c3 cc"),
    "aarch64": bytes.fromhex("21008052 010000b9 000080d2 c0035fd6"),
}


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_a_joined_main_thread_does_not_matter(tmp_path: Path, executable: str) -> None:
    with engine_target(tmp_path, "joined bystander worker malloc", executable) as target:
        for times in range(1, 6):
            stop = METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            assert stop.tid != 0
            target.until_marked(times)
        until(lambda: len(list(Path(f"/proc/{target.pid}/task").iterdir())) == 3, "the new threads have ended")
        report = target.finish()
    assert report["mask"] == 0
    assert report["threads"] == 1


def test_a_single_busy_thread_starts_one_from_the_evaluation_loop(tmp_path: Path) -> None:
    with engine_target(tmp_path, "malloc") as target:
        for times in range(1, 11):
            METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            target.until_marked(times)
        target.finish()


def test_machine_code_runs_in_a_program_without_python() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            syscall = Path(f"/proc/{process.pid}/syscall")
            until(lambda: syscall.read_text().split()[0] in ("115", "230"), "it stands in clock_nanosleep")
            image = TargetImage(process.pid)
            stop = start_thread(image, STORE_ONE[platform.machine()], bytes(8), Deadline(SECONDS))
            assert stop.tid == process.pid
            page = next(mapping for mapping in TargetImage(process.pid).maps if mapping.start >> 32 == 0x6B69)
            until(lambda: image.memory.u32(page.start + 64) == 1, "the code has run")
            assert process.poll() is None
        finally:
            process.kill()
