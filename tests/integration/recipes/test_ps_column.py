"""docs/how-to-add.md followed: a column of `kinetoctl ps`."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

FACTS = "daemon/kinetod/processes/process_info.py"
USE = """
import os, subprocess, sys
from support.service.daemon import running_daemon

with running_daemon() as daemon:
    words = [sys.executable, "-m", "kinetoctl", "ps", "--pid", str(os.getpid()), "-o", "{}"]
    print(subprocess.run(words, env=daemon.client_environ(), check=True, capture_output=True, text=True).stdout)
"""


def test_a_column_of_ps_takes_a_field_what_fills_it_and_its_heading(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert(
        "protos/kineto_protos/v1/profiler.proto",
        "  StandingCall standing = 32;    // absent: none is known\n",
        "  int32 threads = 34;\n",
    )
    tree.make("protos")
    tree.insert(FACTS, "    parent_pid: int = 0\n", "    threads: int = 0\n")
    tree.insert(FACTS, "        parent_pid=int(fields[_STAT_PARENT]),\n", "        threads=int(fields[17]),\n")
    tree.insert(
        "daemon/kinetod/selection/process_registry.py",
        "        parent_pid=facts.parent_pid,\n",
        "        threads=facts.threads,\n",
    )
    tree.insert(
        "cli/kinetoctl/output/listing.py",
        "PROCESS_COLUMNS = (\n",
        '    ListColumn(title="THREADS", cell=lambda each: str(each.threads)),\n',
    )
    heading, row = tree.python("-c", USE.replace("{}", "table")).split("\n")[:2]
    assert heading.split()[0] == "THREADS" and int(row.split()[0]) >= 1
    assert '"threads": ' in tree.python("-c", USE.replace("{}", "json"))
    assert all(leads_to("A column of `kinetoctl ps`", path) for path in tree.edited)
    assert len(tree.edited) <= 4
