"""The aarch64 trampoline and its frame, run by qemu-user (or the processor itself)."""

import platform
import shutil
import struct
import subprocess
from pathlib import Path
from typing import cast

import pytest
from kinetod.attach.inject import trampoline
from kinetod.attach.inject.arch import Aarch64, InterruptedCall, Point
from kinetod.attach.inject.ptrace import StoppedThread
from support.waiting import scaled

NATIVE = platform.machine() == "aarch64"
COMPILER = "cc" if NATIVE else "aarch64-linux-gnu-gcc"
RUNNER = [] if NATIVE else ["qemu-aarch64"]
SOURCE = Path(__file__).parent / "native" / "return_aarch64.S"
TEXT, STACK_POINTER, REGION, NONCE = 0x400000, 0x2000F000, 0x30000000, 0x1234567

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in [COMPILER, *RUNNER]), reason=f"needs {' and '.join([COMPILER, *RUNNER])}"
)


class VectorRegisters:
    """Of a stopped thread."""

    def registers(self, _regset: int, size: int) -> bytes:
        values = [half for number in range(32) for half in (200 + number, 300 + number)]
        return struct.pack("<64Q2I", *values, 0, 3 << 22)[:size]


def frame() -> trampoline.Frame:
    registers = (*range(100, 131), STACK_POINTER, TEXT + 0x400, 0x40000000)  # x0 - x30, sp, pc, pstate (Z)
    point = Point(TEXT + 0x400, STACK_POINTER, InterruptedCall(73, ()), registers)
    machine = Aarch64()
    work = trampoline.Work(REGION, NONCE, TEXT + 0x200, (11, 12, 13, 14), b"payload")
    thread = cast("StoppedThread", VectorRegisters())
    return trampoline.build_frame(machine, thread, point, machine.resumption(point), work, old_mask=0)


def test_it_calls_the_function_and_restores_every_register(tmp_path: Path) -> None:
    built = frame()
    assert built.parameters % 16 == built.saved % 16 == 0
    assert built.parameters + len(built.data) <= STACK_POINTER
    (tmp_path / "trampoline.bin").write_bytes(trampoline.TRAMPOLINE["aarch64"])
    (tmp_path / "frame.bin").write_bytes(built.data)
    addresses = {
        "FRAME_ADDRESS": built.parameters,
        "SAVED_ADDRESS": built.saved,
        "STACK_POINTER": STACK_POINTER,
        "REGION": REGION,
        "NONCE": NONCE,
    }
    symbols = [f"-Wa,--defsym,{name}={value}" for name, value in addresses.items()]
    options = ["-nostdlib", "-static", "-Wl,--build-id=none", f"-Wl,-Ttext={TEXT:#x}", f"-Wa,-I{tmp_path}", *symbols]
    subprocess.run([COMPILER, *options, "-o", tmp_path / "program", SOURCE], check=True)
    status = subprocess.run([*RUNNER, tmp_path / "program"], check=False, timeout=scaled(30)).returncode
    assert status == 0
