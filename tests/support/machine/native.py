"""Builds the C parts that tests need, once for each state of their sources, into the pytest cache folder."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.machine import device_code

ROOT = Path(__file__).resolve().parents[3]
COLLECTOR = ROOT / "agent" / "native"
COLLECTOR_HEADERS = ("-iquote", str(COLLECTOR))
FAKES = ROOT / "tests" / "fakes"
DRIVERS = ROOT / "tests" / "unit" / "agent" / "native"  # drive_*.c
FAKE_CUPTI = [FAKES / name for name in ("fake_cupti.c", "fake_calls.c", "fake_kineto.c")]
CACHE = ROOT / ".pytest_cache" / "native"

# What a program built with a sanitizer gets.
SANITIZED = {"TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=1"}

WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread")


def compiler() -> str:
    """The C compiler that the tests use."""
    return os.environ.get("CC") or "cc"


def build(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile `sources` into a file called `name`; the same input is compiled once. Fails on any warning."""
    return _made(name, [*flags, *(str(_compiled(source, flags)) for source in sources)], [], "-ldl")


def _compiled(source: Path, flags: Sequence[str]) -> Path:
    """One source as an object file, which is the same in everything that is built with these flags of the compiler.

    The collector sees no header of the tests.
    """
    unseen = ("-Wl,", "-l", "-shared", *(["-I"] if COLLECTOR in source.parents else []))
    own = [flag for flag in flags if not flag.startswith(unseen) and (flag.startswith("-") or ".so" not in flag)]
    folders = {source.parent} | {Path(flag.removeprefix("-I")) for flag in own}
    headers = sorted({header for folder in folders if folder.is_dir() for header in folder.rglob("*.h")})
    return _made(f"{source.stem}.o", [*dict.fromkeys(own), "-c", str(source)], [source, *headers])


def _made(name: str, arguments: Sequence[str], inputs: Sequence[Path], *libraries: str) -> Path:
    """What the compiler makes of these arguments, which name all else that it depends on."""
    command = [compiler(), *WARNINGS, *arguments]
    state = hashlib.sha256("\0".join([*command, *libraries]).encode())
    for path in inputs:
        state.update(path.read_bytes())
    target = CACHE / state.hexdigest()[:20] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(scratch), *libraries], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    scratch.replace(target)
    return target


def fake_cupti(name: str = "libcupti.so.13") -> Path:
    """The fake libcupti (tests/fakes/fake_cupti.c), under the name that a real one has."""
    # Aligned: where a gate may be placed depends on where a call lies in its cache line.
    flags = ["-O2", "-g", "-fPIC", "-shared", "-falign-functions=64", "-Wl,--hash-style=both", f"-Wl,-soname,{name}"]
    return build(name, FAKE_CUPTI, flags)


def fake_vendor(*, pushes: bool, name: str = "libfake_vendor.so") -> Path:
    """The made-up vendor (tests/fakes/fake_vendor.c) as a plug-in of the collector kit. pushes: else it lends."""
    flags = ["-O2", "-g", "-fPIC", "-shared", *COLLECTOR_HEADERS, *(["-DFAKE_PUSHES"] if pushes else [])]
    return build(name, [FAKES / "fake_vendor.c"], flags)


def fake_cuda() -> Path:
    """The fake libcuda (tests/fakes/fake_cuda.c)."""
    return build("libcuda.so.1", [FAKES / "fake_cuda.c"], ["-O2", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"])


def fake_driver(*flags: str, old: bool = False) -> Path:
    """The fake libcuda that is built as the real one (tests/fakes/driver/fake_driver.c). old: as before CUDA 12.5."""
    since = [] if old else ["-DFAKE_CTX_RECORD"]
    shared = ["-O2", "-g", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", *since, *flags]
    return build("libcuda.so.1", [FAKES / "driver" / "fake_driver.c"], shared)


def fake_pjrt_plugin() -> Path:
    """The fake PJRT plug-in (tests/fakes/fake_pjrt.c)."""
    flags = ["-O2", "-fPIC", "-shared", "-Wno-pedantic"]
    return build("pjrt_plugin_fake.so", [FAKES / "fake_pjrt.c"], flags)


def fake_graph_driver() -> Path:
    """The driver of captured graphs (tests/fakes/fake_graph_driver.c)."""
    flags = ["-O2", "-fPIC", "-shared", "-Wl,-soname,libgraphs.so"]
    return build("libgraphs.so", [FAKES / "fake_graph_driver.c"], flags)


def fake_kineto_library(*flags: str) -> Path:
    """A library that calls the fake libcupti as Kineto does, linked with these flags."""
    linked = ["-Wl,--no-as-needed", str(fake_cupti()), f"-Wl,-rpath,{fake_cupti().parent}", *flags]
    return build("libtorch_cpu.so", [FAKES / "fake_kineto_library.c"], ["-O2", "-fPIC", "-shared", *linked])


def fake_cuda_program(*, device_graphs: bool = False) -> Path:
    """The fake "inference server" (tests/fakes/fake_cuda_program.c), linked with the fake libraries.

    device_graphs: with device code that launches CUDA graphs.
    """
    libraries = [fake_cupti(), fake_cuda()]
    places = [f"-Wl,-rpath,{library.parent}" for library in libraries]
    flags = ["-O2", "-g", "-Wl,--no-as-needed", *map(str, libraries), *places]
    sources = [FAKES / "fake_cuda_program.c", *([_launching_device_code()] if device_graphs else [])]
    return build("fake_cuda_program", sources, flags)


def _launching_device_code() -> Path:
    """A source with the section that nvcc makes of it."""
    content = ", ".join(map(str, device_code.fatbin(device_code.LAUNCHING)))
    attributes = '__attribute__((section(".nv_fatbin"), used, aligned(8)))'
    return _source("device_code/launching.c", f"{attributes} static const unsigned char code[] = {{{content}}};\n")


def _source(name: str, text: str) -> Path:
    """A made-up source, which is whole whenever another worker reads it."""
    path = CACHE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.stem}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
    return path


def collector_sources() -> list[Path]:
    """All C files of the collector."""
    return sorted(COLLECTOR.rglob("*.c"))


def collector() -> Path:
    """The collector as tests compile it: like the product's, but warnings are errors."""
    flags = ["-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wpedantic", "-Wl,-z,defs"]
    return build("libkineto_collector.so", collector_sources(), [*flags, *COLLECTOR_HEADERS])


def has_sanitizer(name: str) -> bool:
    """Whether this machine's compiler can build and run programs with -fsanitize=`name`."""
    if shutil.which(compiler()) is None:
        return False
    source = _source("sanitizer_probe.c", "int main(void) { return 0; }\n")
    try:
        program = build(f"probe_{name.replace(',', '_')}", [source], [f"-fsanitize={name}"])
    except AssertionError:
        return False
    return subprocess.run([str(program)], check=False, capture_output=True).returncode == 0


class FakeCuda:
    """The fake libcupti in this process: program faults, make CUDA calls, read what it recorded."""

    def __init__(self, name: str = "libcupti.so.13") -> None:
        self.path = fake_cupti(name)
        self._library = ctypes.CDLL(str(self.path))
        for name in ("fake_written", "fake_dropped", "fake_finalized", "fake_misused", "fake_kineto_end"):
            getattr(self._library, name).restype = ctypes.c_uint64

    def set(self, key: str, value: int) -> None:
        """Program a fault (the keys are in fake_cupti.h)."""
        if self._library.fake_set(key.encode(), ctypes.c_long(value)) != 0:
            raise KeyError(key)

    def launch(self, name: str = "kernel", count: int = 1, duration_ns: int = 1000, stream: int = 0) -> None:
        """Launches `count` kernels."""
        self._library.fake_launch_many(name.encode(), count, ctypes.c_uint64(duration_ns), stream)

    def storm(self, *, threads: int, launches: int) -> None:
        """Launches so many kernels on each of the threads, while kernels and calls are recorded."""
        assert self._library.fake_storm(threads, launches) == threads

    def driver_launch(self, name: str = "kernel", duration_ns: int = 1000, stream: int = 0) -> None:
        """Calls cuLaunchKernel once."""
        self._library.fake_driver_launch(name.encode(), ctypes.c_uint64(duration_ns), stream)

    def graph_launch(self, names: Sequence[str], duration_ns: int = 1000, stream: int = 0) -> None:
        """Calls cudaGraphLaunch once, for a graph of kernels."""
        encoded = (ctypes.c_char_p * len(names))(*[name.encode() for name in names])
        self._library.fake_graph_launch(encoded, len(names), ctypes.c_uint64(duration_ns), stream)

    def memcpy(self, size: int = 4096, *, to_device: bool = True, duration_ns: int = 1000, stream: int = 0) -> None:
        """Calls cudaMemcpyAsync once."""
        self._library.fake_memcpy(ctypes.c_uint64(size), int(to_device), ctypes.c_uint64(duration_ns), stream)

    def memset(self, size: int = 4096, duration_ns: int = 1000, stream: int = 0) -> None:
        """Calls cudaMemsetAsync once."""
        self._library.fake_memset(ctypes.c_uint64(size), ctypes.c_uint64(duration_ns), stream)

    def sync(self, stream: int = 0) -> None:
        """Calls cudaStreamSynchronize once, which waits for the stream's simulated work."""
        self._library.fake_sync(stream)

    def forget_users(self) -> None:
        """Whoever has given buffers gets them back, and is gone."""
        self._library.cuptiActivityFlushAll(1)
        self._library.fake_unregister()

    def register_as_another_tool(self) -> int:
        """Some library registers its buffer callbacks, as one that records does; gives the address of the first."""
        libc = ctypes.CDLL(None)
        self._library.cuptiActivityRegisterCallbacks(libc.abs, libc.labs)
        return ctypes.cast(libc.abs, ctypes.c_void_p).value or 0

    def kineto_begin(self) -> None:
        """The program's own torch.profiler begins to profile the GPU."""
        self._library.fake_kineto_begin()

    def kineto_end(self) -> int:
        """Ends Kineto's session. Returns how many kernels it got."""
        return int(self._library.fake_kineto_end())

    def written(self, kind: int) -> int:
        """Records of one CUPTI activity kind written since the library was loaded."""
        return int(self._library.fake_written(kind))

    @property
    def dropped(self) -> int:
        """Records dropped since the library was loaded."""
        return int(self._library.fake_dropped())

    @property
    def finalized(self) -> int:
        """Number of successful cuptiFinalize calls."""
        return int(self._library.fake_finalized())

    @property
    def misused(self) -> int:
        """Calls that break the real library or the program's own profile: fake_cupti.h says which."""
        return int(self._library.fake_misused())

    @property
    def subscribed(self) -> bool:
        """Whether somebody has CUPTI's only subscriber."""
        return bool(self._library.fake_subscribed())

    @property
    def attached(self) -> bool:
        """Whether CUPTI has hooks in the process."""
        return bool(self._library.fake_attached())
