"""Runs the C parts of the agent under sanitizers: `python -m support.machine.sanitize [SANITIZERS]…`."""

import os
import platform
import subprocess
import sys

from support.machine.native import (
    COLLECTOR_HEADERS,
    FAKE_CUPTI,
    FAKES,
    ROOT,
    build,
    collector_sources,
    fake_driver,
    has_sanitizer,
)
from support.rocm import fakes as rocm

SANITIZERS = ("address,undefined", "thread")
DRIVERS = ROOT / "tests" / "unit" / "agent" / "native"


def run(sanitizer: str) -> int:
    """Build the collector, the fakes and the drivers with one sanitizer and run them; gives the exit status."""
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    shared = [*flags, "-fPIC", "-shared"]
    cupti = build("libcupti.so.13", FAKE_CUPTI, shared)
    graphs = build("libtorch_cpu.so", [FAKES / "fake_torch.c", FAKES / "fake_graph_driver.c"], shared)
    vendor = [*shared, *COLLECTOR_HEADERS]
    fakes = {
        **({"drive_drain": [fake_driver(*flags), cupti]} if platform.machine() == "x86_64" else {}),  # the longest
        "drive_collector": [cupti],
        "drive_cupti_gate": [cupti],
        "drive_kit": [
            build("liblends.so", [FAKES / "fake_vendor.c"], vendor),
            build("libpushes.so", [FAKES / "fake_vendor.c"], [*vendor, "-DFAKE_PUSHES"]),
        ],
        "drive_ops": [build("libtorch_cpu.so", [FAKES / "fake_torch.c"], shared)],
        "drive_graphs": [graphs],
        "drive_stacks": [],
    }
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=1"}
    waiting = None
    for name, libraries in fakes.items():
        sources = [*collector_sources(), DRIVERS / f"{name}.c"]
        driver = build(name, sources, [*flags, *COLLECTOR_HEADERS, f"-I{FAKES}", f"-I{FAKES / 'driver'}"])
        process = subprocess.Popen([driver, *libraries], env=environ)
        if name == "drive_drain":  # it waits more than it works, so the others go on beside it
            waiting = process
        elif process.wait() != 0:
            sys.stderr.write(f"{name} failed\n")
            return process.returncode
    for version in rocm.VERSIONS:
        done = rocm.drive(flags, version, launches=4000, cycles=5)
        if done.returncode != 0:
            sys.stderr.write(f"{done.stderr}drive_rocprofiler failed with version {version}\n")
            return done.returncode
    if waiting is not None and waiting.wait() != 0:
        sys.stderr.write("drive_drain failed\n")
        return waiting.returncode
    return 0


def main() -> int:
    """Run the sanitizers that are named on the command line, or all of them."""
    for sanitizer in sys.argv[1:] or SANITIZERS:
        if not has_sanitizer(sanitizer):
            sys.stderr.write(f"skipped: this compiler has no -fsanitize={sanitizer}\n")
            continue
        status = run(sanitizer)
        if status != 0:
            sys.stderr.write(f"-fsanitize={sanitizer}: exit status {status}\n")
            return 1
    sys.stdout.write("ok\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
