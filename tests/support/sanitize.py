"""Runs the collector against the fake libcupti under sanitizers: `python -m support.sanitize [SANITIZERS]…`."""

import os
import subprocess
import sys

from support.native import COLLECTOR, FAKE_CUPTI, FAKES, ROOT, build, has_sanitizer

SANITIZERS = ("address,undefined", "thread")
DRIVER = ROOT / "tests" / "unit" / "agent" / "native" / "drive_collector.c"


def run(sanitizer: str) -> int:
    """Build the collector, the fake and the driver with one sanitizer and run them; gives the exit status."""
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    fake = build("libcupti.so.13", FAKE_CUPTI, [*flags, "-fPIC", "-shared"])
    sources = [*sorted(COLLECTOR.glob("*.c")), DRIVER]
    driver = build("drive_collector", sources, [*flags, f"-I{COLLECTOR}", f"-I{FAKES}"])
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run([str(driver), str(fake)], env=environ, check=False).returncode


def main() -> int:
    """All that are asked for, or all there are."""
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
