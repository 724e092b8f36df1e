import os
import subprocess
from pathlib import Path

import pytest
from support.native import ROOT, build, has_sanitizer

CODEC = ROOT / "daemon" / "native"
DRIVER = Path(__file__).with_name("native") / "fuzz_paths.c"
SANITIZER = "address,undefined"


@pytest.mark.skipif(not has_sanitizer(SANITIZER), reason="this compiler has no sanitizers")
def test_the_longest_path_of_random_graphs_is_found_without_touching_other_memory() -> None:
    flags = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all", f"-I{CODEC}"]
    driver = build("fuzz_paths", [CODEC / "critical.c", DRIVER], flags)
    done = subprocess.run(
        [str(driver), "1500"],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
