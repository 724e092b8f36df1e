"""docs/how-to-add.md followed: a metric."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

METRICS, SERVICE = "daemon/kinetod/base/metrics.py", "daemon/kinetod/rpc/profiler_service.py"
USE = """
import re
from urllib.request import urlopen
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.daemon_client import Client
from support.service.daemon import running_daemon

with running_daemon(environ={"KINETOD_METRICS_LISTEN": "127.0.0.1:0"}) as daemon, Client(daemon.address) as client:
    client.processes(pb.Selector(), include_without_agent=True)
    with urlopen(re.search(r"metrics on (http://\\S+/metrics)", daemon.log())[1]) as page:
        print(page.read().decode())
"""


def test_a_metric_takes_a_declaration_and_a_call_and_is_then_served_and_documented(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert(
        METRICS,
        'DECODER_CRASHES = _counter("kineto_decode_worker_crashes", "Decode workers that crashed.")\n',
        'LISTS = _counter("kineto_process_lists", "Lists of processes that were sent.")\n',
    )
    tree.insert(SERVICE, "from kinetod.agents.agent_hub import AgentHub\n", "from kinetod.base import metrics\n")
    tree.insert(SERVICE, "everything = request.include_without_agent\n", "            metrics.LISTS.inc()\n")
    assert "kineto_process_lists_total 1.0\n" in tree.python("-c", USE)
    tree.python("docs/generate_metrics.py")
    assert "| `kineto_process_lists_total` | counter |  | Lists of processes that were sent. |" in tree.text(
        "docs/metrics.md"
    )
    assert leads_to("A metric", METRICS)
    assert tree.edited == {METRICS, SERVICE}
