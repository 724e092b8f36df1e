"""docs/how-to-add.md followed: an RPC."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

PROTO = "protos/kineto_protos/v1/profiler.proto"
USE = """
from kinetoctl.client.daemon_client import Client
from support.service.daemon import running_daemon

with running_daemon() as daemon, Client(daemon.address) as client:
    print(client.load())
"""


def test_an_rpc_takes_a_method_a_handler_a_rule_of_access_and_a_call(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert(
        PROTO, "rpc GetHost(GetHostRequest) returns (Host);\n", "  rpc GetLoad(GetLoadRequest) returns (Load);\n"
    )
    tree.insert(
        PROTO, "message GetHostRequest {}\n", "message GetLoadRequest {}\nmessage Load {\n  double one_minute = 1;\n}\n"
    )
    tree.make("protos")
    tree.insert(
        "daemon/kinetod/rpc/profiler_service.py",
        "        return pb.Clock()\n",
        """
    @unary
    async def GetLoad(self, _request: pb.GetLoadRequest, _caller: Caller) -> pb.Load:
        \"\"\"The load of this host.\"\"\"
        return pb.Load(one_minute=os.getloadavg()[0])
""",
    )
    tree.insert("daemon/kinetod/rpc/profiler_service.py", "import functools\n", "import os\n")
    tree.insert(
        "cli/kinetoctl/client/daemon_client.py",
        "        return host\n",
        """
    def load(self) -> float:
        \"\"\"The load of the daemon's host.\"\"\"
        load: pb.Load = self._call(self._stub.GetLoad, pb.GetLoadRequest())
        return load.one_minute
""",
    )
    with pytest.raises(AssertionError, match="PERMISSION_DENIED"):
        tree.python("-c", USE)  # who may call it has not been said
    tree.insert(
        "daemon/kinetod/permissions/role_policy.py",
        '    "GetHost": Action.SEE_HOST,\n',
        '    "GetLoad": Action.SEE_HOST,\n',
    )
    assert float(tree.python("-c", USE)) >= 0
    tree.insert(
        "docs/access.md",
        "| `GetHost` | any | any | any | any | any |\n",
        "| `GetLoad` | any | any | any | any | any |\n",
    )
    assert all(leads_to("An RPC", path) for path in tree.edited)
