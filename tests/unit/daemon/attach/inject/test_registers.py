import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Deadline
from kinetod.attach.inject.arch import Point
from kinetod.attach.inject.injection import CallRequest, Plan, hand_over
from kinetod.attach.inspect.target_image import TargetImage
from support.waiting import scaled, until

SOURCE = Path(__file__).parent / "native" / "registers_x86_64.S"
HAND_OVERS = 40
# Sets mxcsr and the x87 unit to their defaults (ldmxcsr, fninit), every ymm register (vzeroall) and every other
# register that a function may change to 0, and returns 7.
CLOBBER = bytes.fromhex("68801f00000fae142458dbe3c5fc7731c931d231f631ff4531c04531c94531d24531dbb807000000c3cc")


def suits() -> bool:
    if platform.machine() != "x86_64" or shutil.which("cc") is None:
        return False
    return " avx2 " in Path("/proc/cpuinfo").read_text()


pytestmark = pytest.mark.skipif(not suits(), reason="needs x86-64 with AVX2 and a C compiler")


class AnyPoint:
    """The program's main thread, wherever it is in the program itself, or in its system call."""

    def __init__(self, image: TargetImage) -> None:
        self._image = image

    def candidates(self) -> Iterator[int]:
        yield self._image.pid

    def accepts(self, tid: int, point: Point) -> bool:
        mapping = self._image.mapping_at(point.pc)
        return point.call is not None or (mapping is not None and mapping.path == self._image.exe)


@pytest.mark.parametrize("mode", [[], ["nap"]], ids=["spinning", "in a system call"])
def test_every_register_is_as_it_was(tmp_path: Path, mode: list[str]) -> None:
    program = tmp_path / "registers"
    subprocess.run(["cc", "-o", program, SOURCE], check=True)
    with subprocess.Popen([program, *mode]) as process:
        try:
            until(lambda: "libc" in Path(f"/proc/{process.pid}/maps").read_text(), "it is loaded")
            image = TargetImage(process.pid)

            def request(_region: int, placed: tuple[int, ...]) -> CallRequest:
                return CallRequest(placed[0], ())

            for _time in range(HAND_OVERS):
                outcome = hand_over(image, Plan(AnyPoint(image), request, (CLOBBER,)), Deadline(scaled(20)))
                assert outcome.result == 7
                image.refresh()
                assert process.poll() is None
            cycles = _cpu_ticks(process.pid)
            if not mode:
                until(lambda: _cpu_ticks(process.pid) > cycles + 3, "it has compared once more")
            else:
                end = time.monotonic() + 0.06
                until(lambda: time.monotonic() > end, "it has compared once more")
            assert process.poll() is None
        finally:
            process.kill()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11])
