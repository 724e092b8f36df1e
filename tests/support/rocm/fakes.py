"""The fake ROCm (tests/fakes/rocm): its libraries as files of one folder, as an installation has them.

    python -m support.rocm.fakes [--launches N] [--cycles N] [SANITIZER]…

drives the collector against it in all versions, by default a million launches and 200 recordings each.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.machine.native import CACHE, COLLECTOR_HEADERS, FAKES, ROOT, SANITIZED, build, collector_sources

ROCM = FAKES / "rocm"
SDK_SOURCES = [
    ROCM / name
    for name in (
        "fake_rocprofiler.c",
        "fake_rocprofiler_buffers.c",
        "fake_rocprofiler_names.c",
        "fake_rocprofiler_trace.c",
    )
]
DRIVER = ROOT / "tests" / "unit" / "agent" / "native" / "drive_rocprofiler.c"
SHARED = ("-g", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROCM}")
PLAIN = ("-O2",)
# Versions of rocprofiler-sdk, each of which behaves differently or has other records than the one before, or is another
# minor version.
VERSIONS = (10000, 10100, 10200, 10300, 10302, 10305, 10306, 10401)


def fake_rocprofiler(*flags: str, bare: bool = False) -> Path:
    """The fake rocprofiler-sdk. bare: with the name that it has in torch's wheels."""
    name = "librocprofiler-sdk.so" if bare else "librocprofiler-sdk.so.1"
    return build(name, SDK_SOURCES, [*SHARED, *(flags or PLAIN), f"-Wl,-soname,{name}"])


def fake_hip(*flags: str) -> Path:
    """The fake libamdhip64."""
    soname = "-Wl,-soname,libamdhip64.so.7"
    return build("libamdhip64.so.7", [ROCM / "fake_hip.c"], [*SHARED, *(flags or PLAIN), soname])


def fake_kineto() -> Path:
    """A library with the client of rocprofiler-sdk that torch for ROCm has."""
    return build("libfake_torch_cpu.so", [ROCM / "fake_kineto.c"], [*SHARED, *PLAIN])


def installed(folder: Path, *flags: str, bare: bool = False) -> Path:
    """Both libraries as an installation has them: in one folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for library in (fake_rocprofiler(*flags, bare=bare), fake_hip(*flags)):
        scratch = folder / f"{library.name}.{os.getpid()}"
        scratch.symlink_to(library)
        scratch.replace(folder / library.name)
    return folder


def drive(flags: Sequence[str], version: int, *, launches: int, cycles: int) -> subprocess.CompletedProcess[str]:
    """Run drive_rocprofiler against one version of the fake, all compiled with these flags."""
    folder = installed(CACHE / "rocm" / "".join(flags).replace("/", "_"), *flags)
    driver = build(DRIVER.stem, [*collector_sources(), DRIVER], [*flags, "-g", *COLLECTOR_HEADERS, f"-I{ROCM}"])
    environ = {**os.environ, **SANITIZED, "KINETO_FAKE_ROCPROFILER": f"version={version}"}
    command = [str(driver), str(folder), str(launches), str(cycles)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def main() -> int:
    """Drive all versions; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", help="'': none")
    options = parser.parse_args()
    for sanitizer in options.sanitizers or [""]:
        flags = [f"-fsanitize={sanitizer}", "-O1", "-fno-sanitize-recover=all"] if sanitizer else list(PLAIN)
        for version in VERSIONS:
            done = drive(flags, version, launches=options.launches, cycles=options.cycles)
            sys.stdout.write(f"{sanitizer or 'plain'}, version {version}: exit status {done.returncode}\n{done.stdout}")
            sys.stdout.flush()
            if done.returncode != 0:
                sys.stderr.write(done.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
