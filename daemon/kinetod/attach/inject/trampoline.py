"""The code that a redirected thread runs in the target, its location, and its data on the thread's stack.

Theory of operation
    Code     trampoline_*.S is constant: everything that depends on the process or the attach lies on the redirected
             thread's stack. So an existing copy serves every later attach, and one that a thread still runs is never
             overwritten. It is put into a code cave: the zero bytes between the end of a library's code and the end of
             its last page. Nothing of the library lies there; the kernel makes a private copy of that one page. No
             mapping is both writable and executable at any time.
    Stack    below the red zone, ending lowest: the registers to restore | payload | parameters. A thread that is
             redirected later, by anyone, has its own stack. Signal handlers do not reach what lies above sp.
    Region   mapped by the trampoline at an address chosen by us: one page with the mailbox and the payload, which
             stays, and pages for the vector registers, which do not. Once the mailbox holds our nonce, the work is done
             and the result is in it. Unlike a stop, reading it disturbs nobody.
    Return   x86-64: registers from the stack, then `ret 128`, which restores rip and rsp at once and needs neither a
             register nor a per-process literal. rt_sigreturn would lose the remaining time of an interrupted poll or
             nanosleep. aarch64 has no such instruction and goes back by rt_sigreturn.
    Signals  are blocked by the tracer at the redirection and by the trampoline's first system call. At its end the
             trampoline checks for signals that arrived in between: if there are any, the interrupted system call
             returns -EINTR, as it would have, and is not restarted (else Ctrl-C could be lost for a long time).
    Not for  threads with a user shadow stack: `ret` would be refused.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.arch import NT_PRFPREG, RED_ZONE, X86_64, Machine, Point, Resumption
from kinetod.attach.inject.ptrace import StoppedThread
from kinetod.attach.inspect.target_image import Mapping, TargetImage

PAGE = 4096
MAILBOX = struct.Struct("<3Q")  # nonce, status, result
DONE, UNINITIALISED = 1, 2
RESULT_OFFSET, SPARE_OFFSET, PAYLOAD_OFFSET = 16, 24, 64
MAX_PAYLOAD_BYTES = PAGE - PAYLOAD_OFFSET
# All but 32 and 33, which the C library uses to make a thread change its user or end: a thread started with these
# blocked would never answer, and setuid() anywhere in the process would wait for it forever.
BLOCKED_SIGNALS = 2**64 - 1 & ~(0b11 << 31)
CALL_STACK_BYTES = 24 << 10  # for the called function; binding a symbol lazily saves 11 KiB of AMX and AVX registers

_PARAMETERS = struct.Struct("<18Q")
_ERROR_OFFSET, _ECHO_OFFSET = 88, 136
_XSAVE_AREA_BYTES = 4 * PAGE  # 2.7 KiB with AVX-512, 11 KiB with AMX
# All user components that exist: x87, SSE, AVX, MPX, AVX-512, PKRU, AMX, APX.
_XSAVE_COMPONENTS = 0xE02FF
_CAVE_ALIGNMENT = 16
_U64 = 2**64

# rt_sigframe of aarch64: siginfo, then ucontext with sigcontext.
_A64_FRAME_BYTES = 4688
_A64_SIGMASK, _A64_REGISTERS, _A64_RESERVED = 128 + 40, 312, 128 + 464
_A64_FPSIMD_MAGIC, _A64_FPSIMD_BYTES = 0x46508001, 528
_A64_VECTORS = struct.Struct("<512sII")  # user_fpsimd_state: v0 - v31, fpsr, fpcr


@dataclass(frozen=True, slots=True)
class Work:
    """Work for the trampoline. Addresses in the region are known in advance, since we choose its location."""

    region: int
    nonce: int
    function: int
    arguments: tuple[int, ...]  # up to 4
    payload: bytes  # copied to region + PAYLOAD_OFFSET
    check: int = 0  # called first; if it returns 0 the function is not called
    see_signals: bool = True  # one more rt_sigpending


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes for the redirected thread's stack."""

    parameters: int  # the address of `data`
    saved: int
    data: bytes

    @property
    def lowest(self) -> int:
        """Returns the lowest stack address that may be touched."""
        return self.parameters - CALL_STACK_BYTES


@dataclass(frozen=True, slots=True)
class Placed:
    """Code in a cave of the target."""

    address: int
    code: bytes
    missing: bool  # not written yet


def region_bytes(machine: Machine) -> int:
    """Returns the size of the region while the trampoline runs; one page stays."""
    return PAGE + (_XSAVE_AREA_BYTES if isinstance(machine, X86_64) else PAGE)


def build_frame(
    machine: Machine, thread: StoppedThread, point: Point, resumption: Resumption, work: Work, old_mask: int
) -> Frame:
    """Returns the stack data that the trampoline needs on that thread."""
    top = point.sp - RED_ZONE
    if isinstance(machine, X86_64):
        saved_data = struct.pack("<17Q", *(resumption.registers[index] for index in machine.saved_registers))
        saved = top - len(saved_data)  # ends exactly there: `ret 128`
    else:
        saved_data = _signal_frame(resumption, old_mask, thread.registers(NT_PRFPREG, _A64_VECTORS.size + 8))
        saved = top - len(saved_data) & -16
    parameters = saved - _PARAMETERS.size - len(work.payload) & -16
    head = _PARAMETERS.pack(
        work.region,
        region_bytes(machine),
        len(work.payload),
        work.check,
        work.function,
        *(work.arguments + (0, 0, 0, 0))[:4],
        old_mask,
        BLOCKED_SIGNALS | old_mask,
        0,  # error
        int(work.see_signals and resumption.pc_interrupted != 0),
        0,  # pending signals
        resumption.pc_interrupted,
        work.nonce,
        _XSAVE_COMPONENTS,
        0,  # nonce, repeated beside an error
    )
    padding = saved - parameters - len(head) - len(work.payload)
    return Frame(parameters, saved, head + work.payload + bytes(padding) + saved_data)


def read_result(image: TargetImage, work: Work) -> tuple[int, int] | None:
    """Returns status and result, once the trampoline has done its work."""
    try:
        nonce, status, result = MAILBOX.unpack(image.memory.read(work.region, MAILBOX.size))
    except OSError:
        return None
    return (status, result) if nonce == work.nonce else None


def read_error(image: TargetImage, work: Work, frame: Frame) -> int:
    """Returns the errno with which the region could not be mapped; 0: none is known."""
    try:
        if image.memory.u64(frame.parameters + _ECHO_OFFSET) != work.nonce:
            return 0
        error = _U64 - image.memory.u64(frame.parameters + _ERROR_OFFSET)
    except OSError:
        return 0
    return error if 0 < error < PAGE else 0


def find_place(image: TargetImage, code: bytes, taken: Sequence[Placed] = ()) -> Placed:
    """Returns where the code already lies, or a free place for it. Raises AttachError when there is none.

    taken: places of other codes, which may not have been written yet.
    """
    free: int | None = None
    for start, content in _caves(image):
        found = content.find(code)
        if found >= 0 and found % _CAVE_ALIGNMENT == -start % _CAVE_ALIGNMENT:
            return Placed(start + found, code, missing=False)
        ends = (place.address + len(place.code) - start for place in taken)
        used = max(len(content.rstrip(b"\0")), *(end for end in ends if 0 < end <= len(content)), 0)
        address = start + used + (-(start + used) % _CAVE_ALIGNMENT)
        if free is None and address + len(code) <= start + len(content):
            free = address
        if free is not None:  # a copy in a later cave does not justify the search
            return Placed(free, code, missing=True)
    raise AttachError(
        AttachCode.UNSUPPORTED,
        f"process {image.pid} has no library with {len(code)} unused bytes after its code; it is statically linked",
    )


def _caves(image: TargetImage) -> Iterator[tuple[int, bytes]]:
    """Yields the unused bytes behind each module's code, first of modules that are never unloaded."""
    python = image.python.path if image.python is not None else ""
    lasting = [*sorted(image.loader_modules), python, image.exe]
    others = [path for path in image.modules if path.startswith("/") and path not in lasting]
    for path in (*lasting, *others):
        elf = image.elf(path)
        for segment in elf.segments if elf is not None else ():
            if not segment.executable or segment.memory_size != segment.file_size:
                continue
            end = segment.address + segment.file_size
            mapping = image.mapping_at(end - 1)
            if mapping is None or not _is_private_code(mapping) or end == mapping.end:
                continue
            try:
                yield end, image.memory.read(end, mapping.end - end)
            except OSError:
                continue


def _is_private_code(mapping: Mapping) -> bool:
    return mapping.permissions == "r-xp" and PurePosixPath(mapping.path).is_absolute()


def _signal_frame(resumption: Resumption, old_mask: int, vectors: bytes) -> bytes:
    """Returns the frame that rt_sigreturn of aarch64 expects."""
    frame = bytearray(_A64_FRAME_BYTES)
    struct.pack_into("<Q", frame, _A64_SIGMASK, old_mask)
    struct.pack_into("<34Q", frame, _A64_REGISTERS, *resumption.registers)
    registers, fpsr, fpcr = _A64_VECTORS.unpack_from(vectors)
    struct.pack_into("<IIII512s", frame, _A64_RESERVED, _A64_FPSIMD_MAGIC, _A64_FPSIMD_BYTES, fpsr, fpcr, registers)
    return bytes(frame)


# -- assembled: tests compare these with the .S files beside this one --

TRAMPOLINE = {
    "x86_64": bytes.fromhex(
        "fcb80e000000bf02000000488d735031d241ba080000000f05b809000000488b3b488b7308ba0300000041ba2200100049c7"
        "c0ffffffff4531c90f05483b030f859b0000004989c48b83800000008b9384000000490faea42400100000488db390000000"
        "498d7c2440488b4b10f3a4488b43184885c0740bffd0b90200000085c0741f488b7b28488b7330488b5338488b4b4031c0ff"
        "53204989442410b90100000049894c24088b83800000008b9384000000490faeac2400100000b80b000000498dbc24001000"
        "00488b73084881ee001000000f05488b437849890424eb0f48894358488b43784889838800000048837b60007430b87f0000"
        "00488d7b68be080000000f05488b434848f7d048234368741348c74570fcffffff488b4370488985800000004889ecb80e00"
        "0000bf02000000488d734831d241ba080000000f05415f415e415d415c415b415a415941585d5b5a595e5f589dc28000cc"
    ),
    "aarch64": bytes.fromhex(
        "e81080d2400080d261420191020080d2030180d2010000d4c81b80d2600640a9620080d2430480d20302a0f2040080920500"
        "80d2010000d4610240f91f0001ebc1030054f50300aa620a40f960420291a1020191a20000b40314403823140038420400d1"
        "fcffff17560080d2690e40f9690000b420013fd6e0000034608642a9628e43a9691240f920013fd6a00a00f9360080d2b606"
        "00f9e81a80d2a0064091610640f9210440d1010000d4603e40f9a0fe9fc804000014602e00f9603e40f9604600f9603240f9"
        "a00100b4081180d260a20191010180d2010000d4602640f9613640f9200020eaa000005460008092809e00f9603a40f9801e"
        "01f99f020091681180d2010000d4200020d4"
    ),
}
