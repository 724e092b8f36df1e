import os
import subprocess
from pathlib import Path

import pytest
from support.native import ROOT, build, has_sanitizer

CODEC = ROOT / "daemon" / "native"
DRIVER = Path(__file__).with_name("native") / "fuzz_nest.c"
SANITIZER = "address,undefined"


@pytest.mark.skipif(not has_sanitizer(SANITIZER), reason="this compiler has no sanitizers")
def test_random_events_make_sound_trees_without_touching_other_memory() -> None:
    flags = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all", f"-I{CODEC}"]
    driver = build("fuzz_nest", [CODEC / "nest.c", DRIVER], flags)
    done = subprocess.run(
        [str(driver), "1500"],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
