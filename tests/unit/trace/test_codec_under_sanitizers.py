import os
import subprocess
from pathlib import Path

import pytest
from support.h200 import recording
from support.native import ROOT, build, has_sanitizer

CODEC = ROOT / "daemon" / "native"
DRIVER = Path(__file__).with_name("native") / "fuzz_codec.c"
SANITIZER = "address,undefined"


@pytest.mark.skipif(not has_sanitizer(SANITIZER), reason="this compiler has no sanitizers")
def test_damaged_records_never_read_or_write_out_of_bounds(tmp_path: Path) -> None:
    flags = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all", f"-I{CODEC}"]
    driver = build("fuzz_codec", [*sorted(CODEC.glob("*.c")), DRIVER], flags)
    records = tmp_path / "records.bin"
    records.write_bytes(recording("streams-cupti130001").buffers[0])
    done = subprocess.run(
        [str(driver), str(records), "3000"],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
