import json
import os
import subprocess
from pathlib import Path

import pytest
from support.h200 import recording
from support.native import ROOT, build, has_sanitizer

CODEC = ROOT / "daemon" / "native"
DRIVER = Path(__file__).with_name("native") / "fuzz_chrome.c"
SANITIZER = "address,undefined"


@pytest.mark.skipif(not has_sanitizer(SANITIZER), reason="this compiler has no sanitizers")
def test_damaged_traces_never_read_or_write_out_of_bounds(tmp_path: Path) -> None:
    flags = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all", f"-I{CODEC}"]
    driver = build("fuzz_chrome", [*sorted(CODEC.glob("chrome*.c")), DRIVER], flags)
    kineto = recording("mlp-cupti130001").kineto
    document = {**kineto, "traceEvents": kineto["traceEvents"][::40]}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, indent=1))
    done = subprocess.run(
        [str(driver), str(path), "1500"],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
