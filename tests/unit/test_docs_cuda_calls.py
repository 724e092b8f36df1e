"""docs/harm.md lists every function of CUDA and CUPTI that the agent calls in a program, or is called through."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Other users' ways into CUPTI, which have gates and are never called by us.
GATES = ROOT / "agent/native/cupti/cupti_gate.c"


def test_every_function_of_cuda_is_in_the_table() -> None:
    sources = [path for path in (ROOT / "agent/native").rglob("*.[ch]") if path != GATES]
    called = {name for path in sources for name in re.findall(r'"(cu(?:da|pti)?[A-Z]\w+)"', path.read_text())}
    table = (ROOT / "docs/harm.md").read_text().split("### Calls to CUDA")[1].split("\n\nWith a driver")[0]
    listed = set(re.findall(r"`(cu\w+)`", table))
    listed |= {name + "_ptsz" for name in listed}
    assert {name for name in called if name not in listed} == set()
    assert len(called) > 50
