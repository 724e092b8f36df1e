"""What the collector costs, measured against the fake libcupti: `python tests/bench/collector.py`.

No GPU is needed: the figures are the collector's own (callbacks, walking, page faults), not CUPTI's.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.machine.native import COLLECTOR_HEADERS, FAKES, ROOT, build, collector_sources, fake_cupti

MEANINGS = {
    "prefault_32_mib_ms": "backing the first 8 buffers with memory, in prepare (ms)",
    "first_free_requested_ns": "buffer-requested callback, first buffer free (ns)",
    "first_free_completed_ns": "buffer-completed callback, with its futex wake (ns)",
    "after_255_busy_requested_ns": "buffer-requested callback, 255 buffers not free (ns)",
    "after_255_busy_completed_ns": "buffer-completed callback, the same arena (ns)",
    "walk_ns_per_record": "walking by learned sizes, names interned (ns a record)",
    "next_record_ns_per_record": "walking by cuptiActivityGetNextRecord (the fake's; ns a record)",
    "text_ns_per_record": "walking and reading a name by its text in each record (ns a record)",
    "push_ns_per_record": "a record of 184 bytes pushed by one thread (ns)",
}


def measure() -> dict[str, object]:
    """Build and run tests/bench/native/measure_collector.c."""
    source = ROOT / "tests" / "bench" / "native" / "measure_collector.c"
    flags = ["-O2", "-g", *COLLECTOR_HEADERS, f"-I{FAKES}"]
    program = build("measure_collector", [*collector_sources(), source], flags)
    done = subprocess.run([str(program), str(fake_cupti())], capture_output=True, text=True, check=True)
    measured: dict[str, object] = json.loads(done.stdout)
    return measured


def main() -> int:
    """Print the figures."""
    measured = measure()
    for key, meaning in MEANINGS.items():
        print(f"{measured.pop(key):10}  {meaning}")
    for name, figures in measured.items():
        print(f"{name}: {json.dumps(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
