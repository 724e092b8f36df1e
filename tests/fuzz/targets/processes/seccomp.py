"""seccomp filters of a process: a program that the kernel would have taken has a result, any other is refused."""

from collections.abc import Iterator

from kinetod.attach.inspect.process_inspection import AARCH64, X86_64
from kinetod.attach.policy.seccomp_check import INSTRUCTION, Filter, SeccompError, evaluate, forbidden

ALLOW, ERRNO = 0x7FFF0000, 0x00050001


def play(data: bytes) -> None:
    try:
        program = Filter(data)
        assert 0 <= program.run(bytes(64)) < 1 << 32
        for machine in (X86_64, AARCH64):
            evaluate([program], 1, (1, 2), machine)
            forbidden([program], machine)
    except SeccompError:
        return


def seeds() -> Iterator[bytes]:
    """One that lets all through, one that looks at machine, number and argument, one that calculates."""
    yield INSTRUCTION.pack(0x06, 0, 0, ALLOW)
    looks = ((0x20, 0, 0, 4), (0x15, 0, 3, 0xC000003E), (0x20, 0, 0, 0), (0x35, 1, 0, 41), (0x06, 0, 0, ALLOW),
             (0x06, 0, 0, ERRNO))  # fmt: skip
    yield b"".join(INSTRUCTION.pack(*each) for each in looks)
    sums = ((0x00, 0, 0, 7), (0x07, 0, 0, 0), (0x0C, 0, 0, 0), (0x34, 0, 0, 3), (0x02, 0, 0, 5), (0x60, 0, 0, 5),
            (0x74, 0, 0, 1), (0x05, 0, 0, 0), (0x16, 0, 0, 0))  # fmt: skip
    yield b"".join(INSTRUCTION.pack(*each) for each in sums)
