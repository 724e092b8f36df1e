"""A process that lives under seccomp filters of its own, and what is needed to write them. Standard library only.

As a program it answers lines on its standard input:
    {"do": "install", "program": HEX}            installs the filter in this process
    {"do": "try", "program": HEX, "calls": [[nr, arg, …], …]}   in a forked child: installs, makes the calls
    {"do": "sleep"}                              says so, then waits in nanosleep for good
    {"do": "thread", "program": HEX}             starts a thread that lives under the filter, alone (empty: none)
"""

import ctypes
import json
import os
import select
import struct
import subprocess
import sys
import threading
from typing import Any, Dict, List, Sequence, Tuple

ALLOW, KILL_PROCESS, TRAP, LOG = 0x7FFF0000, 0x80000000, 0x00030000, 0x7FFC0000
ERRNO = 0x00050000  # + the error number
LOAD_NUMBER = (0x20, 0, 0, 0)
DEADLINE_S = 20.0
Instruction = Tuple[int, int, int, int]
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def returns(action: int) -> Instruction:
    """Instruction that returns the action."""
    return (0x06, 0, 0, action)


def assemble(instructions: Sequence[Instruction]) -> bytes:
    """An array of struct sock_filter."""
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)


def all_but(actions: Dict[int, int], default: int = ALLOW) -> bytes:
    """A filter that treats the calls with these numbers otherwise."""
    program: List[Instruction] = [LOAD_NUMBER]
    for number, action in actions.items():
        program += [(0x15, 0, 1, number), returns(action)]
    return assemble([*program, returns(default)])


class Host:
    """The process, from outside."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._heard = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, do: str, **fields: Any) -> Any:
        """Sends one question to the host. Returns its answer."""
        from support.waiting import scaled  # the host runs this file alone

        deadline_s = scaled(DEADLINE_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        while b"\n" not in self._heard:
            ready, _write, _error = select.select([self.process.stdout], [], [], deadline_s)
            assert ready, "no answer"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, "it ended"
            self._heard += data
        line, _newline, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.communicate()


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(program: bytes) -> None:
    """Installs the filter in the calling thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(buffer))
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(described), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses the filter")


def _try(program: bytes, calls: Sequence[Sequence[int]]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        results = []
        try:
            install(program)
            for number, *arguments in calls:
                ctypes.set_errno(0)
                result = libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(each) for each in arguments))
                results.append(0 if result == 0 else ctypes.get_errno())
        except OSError as exc:
            results = [-(exc.errno or 1)]
        os.write(writer, json.dumps(results).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 1 << 16)
    os.close(reader)
    _pid, status = os.waitpid(child, 0)
    return {"killed": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "results": json.loads(said or b"[]")}


def _thread(program: bytes) -> int:
    tids: List[int] = []
    ready = threading.Event()

    def live() -> None:
        if program:
            install(program)
        tids.append(threading.get_native_id())
        ready.set()
        threading.Event().wait()

    threading.Thread(target=live, daemon=True).start()
    ready.wait()
    return tids[0]


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        answer: Any = True
        if asked["do"] == "install":
            install(bytes.fromhex(asked["program"]))
        elif asked["do"] == "try":
            answer = _try(bytes.fromhex(asked["program"]), asked["calls"])
        elif asked["do"] == "thread":
            answer = _thread(bytes.fromhex(asked["program"]))
        os.write(1, json.dumps(answer).encode() + b"\n")
        if asked["do"] == "sleep":
            # time.sleep has a point in time as its end from 3.11 on: no stop sends that through restart_syscall
            while True:
                ctypes.CDLL(None).nanosleep((ctypes.c_long * 2)(1000, 0), None)


if __name__ == "__main__":
    main()
