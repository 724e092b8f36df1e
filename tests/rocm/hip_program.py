"""A program that uses an AMD GPU through HIP and keeps a log of its own: what a proof compares a trace with.

    python hip_program.py --hip LIBRARY [--fake] [--early | --torch] [--client LIBRARY]

LIBRARY is a libamdhip64, of ROCm or, with --fake, the fake one. Two kernels are loaded, compiled by hiprtc beside
LIBRARY. Both run a few times before anybody can record, unless --early: then HIP is not even initialised before the
first order. With --torch the program imports torch first and uses the HIP of its wheel.

It prints {"ready": true, "pid": …} and answers each line of its input by one line of JSON:

    launch N     N kernels in turn on two streams, with a copy for each thousand: names and counts, copies, and the
                 times (Unix ns) before the first and after the last
    profiled N   the same under torch.profiler, and how many kernels that has seen
    status       resident memory in KiB, descriptors, and the variables of rocprofiler in its environment
    log PATH N   with --fake: from now on HIP logs N entries there
    client N     the same as profiled, with the client of rocprofiler in the library of --client, loaded first

It ends with its input.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

KERNELS = {"_Z5firsti": "first(int)", "_Z6secondi": "second(int)"}
SOURCE = b"""
__global__ void first(int turns) { for (volatile int i = 0; i < turns; i++) {} }
__global__ void second(int turns) { for (volatile int i = 0; i < 2 * turns; i++) {} }
"""
TURNS = 200
BATCH = 1000
COPY_BYTES = 1 << 20
HOST_TO_DEVICE = 1
VARIABLES = ("ROCPROFILER_REGISTER_FORCE_LOAD", "ROCPROFILER_REGISTER_LIBRARY")
Answer = Dict[str, Any]


class Hip:
    """HIP's functions through ctypes, two kernels and two streams. Made at the first use."""

    def __init__(self, path: str, fake: bool) -> None:
        self.library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        self._call("hipInit", 0)
        image = b"\0".join(name.encode() for name in KERNELS) + b"\0\0" if fake else self._compiled(path)
        module = ctypes.c_void_p()
        self._call("hipModuleLoadData", ctypes.byref(module), image)
        self.functions = [self._function(module, name) for name in KERNELS]
        self.streams = [self._stream() for _ in range(2)]
        self.host = ctypes.create_string_buffer(COPY_BYTES)
        self.device = ctypes.c_void_p()
        self._call("hipMalloc", ctypes.byref(self.device), ctypes.c_size_t(COPY_BYTES))
        turns = ctypes.c_int(TURNS)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(turns), ctypes.c_void_p))
        self._turns = turns  # the arguments point to it

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        if result != 0:
            raise RuntimeError("%s failed with %d" % (name, result))

    def _function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._call("hipModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def _stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("hipStreamCreate", ctypes.byref(stream))
        return stream

    def _compiled(self, path: str) -> bytes:
        beside = sorted(Path(path).parent.glob("libhiprtc.so*"))
        compiler = ctypes.CDLL(str(beside[0]) if beside else "libhiprtc.so")
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        for result in (
            compiler.hiprtcCreateProgram(ctypes.byref(program), SOURCE, b"proof.hip", 0, None, None),
            compiler.hiprtcCompileProgram(program, 0, None),
            compiler.hiprtcGetCodeSize(program, ctypes.byref(size)),
        ):
            if result != 0:
                raise RuntimeError("hiprtc cannot compile the kernels: %d" % result)
        code = ctypes.create_string_buffer(size.value)
        if compiler.hiprtcGetCode(program, code) != 0:
            raise RuntimeError("hiprtc gives no code")
        return code.raw

    def launch(self, count: int) -> Answer:
        """Launch kernels in turn; returns what was done, and when."""
        launches, copies, begin = [0, 0], 0, time.time_ns()
        run, one, block = self.library.hipModuleLaunchKernel, 4, 64
        for i in range(count):
            which = i % 2
            stream = self.streams[which]
            if run(self.functions[which], one, 2, 1, block, 1, 1, 0, stream, self.arguments, None) != 0:
                raise RuntimeError("hipModuleLaunchKernel failed")
            launches[which] += 1
            if i % BATCH == BATCH - 1:
                size = ctypes.c_size_t(COPY_BYTES)
                self._call("hipMemcpyAsync", self.device, self.host, size, HOST_TO_DEVICE, stream)
                copies += 1
                self.wait()
        self.wait()
        kernels = dict(zip(KERNELS.values(), launches))
        return {"kernels": kernels, "copies": copies, "began": begin, "ended": time.time_ns()}

    def wait(self) -> None:
        """Wait for both streams."""
        for stream in self.streams:
            self._call("hipStreamSynchronize", stream)


def status() -> Answer:
    """This process: memory, descriptors, and variables as C sees them."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    left = [name for name in VARIABLES if getenv(name.encode()) is not None]
    return {
        "resident_kib": pages * os.sysconf("SC_PAGESIZE") // 1024,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "variables": left,
    }


def profiled(hip: Hip, count: int) -> Answer:
    """Launch under torch's own profiler."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        answer = hip.launch(count)
    names = [event.name for event in profiler.events()]
    seen = sum(name in KERNELS.values() or name in KERNELS for name in names)
    return {**answer, "seen": seen}


def with_client(hip: Hip, client: Any, count: int) -> Answer:
    """Launch while another client of rocprofiler records."""
    client.fake_kineto_end.restype = ctypes.c_uint64
    if client.fake_kineto_begin() != 0:
        raise RuntimeError("the other client cannot record")
    answer = hip.launch(count)
    return {**answer, "seen": client.fake_kineto_end()}


def hip_of_torch() -> str:
    """The libamdhip64 that torch has loaded."""
    import torch

    if not torch.version.hip or not torch.cuda.is_available():
        raise SystemExit("this torch is not built for ROCm, or sees no GPU")
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split(None, 5)[5] for line in lines if "/libamdhip64.so" in line)


def serve(hip: List[Hip], path: str, fake: bool, client: Any) -> None:
    """Answer each line."""
    for line in sys.stdin:
        order, *arguments = line.split()
        if order != "status" and not hip:
            hip.append(Hip(path, fake))
        if order == "launch":
            answer = hip[0].launch(int(arguments[0]))
        elif order == "profiled":
            answer = profiled(hip[0], int(arguments[0]))
        elif order == "client":
            answer = with_client(hip[0], client, int(arguments[0]))
        elif order == "log":
            answer = {"result": hip[0].library.fake_hip_log(arguments[0].encode(), ctypes.c_uint64(int(arguments[1])))}
        else:
            answer = status()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Run until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hip", default="")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--client", default="")
    options = parser.parse_args()
    path = hip_of_torch() if options.torch else options.hip
    client = ctypes.CDLL(options.client, ctypes.RTLD_GLOBAL) if options.client else None
    hip: List[Hip] = []
    if options.early:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)  # loaded, not initialised
    else:
        hip.append(Hip(path, options.fake))
        hip[0].launch(10)
    sys.stdout.write(json.dumps({"ready": True, "pid": os.getpid(), "hip": path}) + "\n")
    sys.stdout.flush()
    serve(hip, path, options.fake, client)


if __name__ == "__main__":
    main()
