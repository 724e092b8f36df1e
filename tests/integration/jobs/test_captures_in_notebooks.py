"""`kinetoctl.api` in a real Jupyter kernel, whose main thread has a running event loop, against two hosts' daemons."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from campaign.parts.fleet import Fleet, running_fleet
from support.waiting import scaled

pytestmark = pytest.mark.slow
HOSTS, LONG_S = 2, 120.0
BEGUN = "it has begun"
LATE = r"did not answer within|in the past by this host's clock"
CELL = """
import signal
from kinetoctl import api
signal.signal(signal.SIGINT, {handler})
places = [api.Place(name, address) for name, address in {places}]
options = api.CaptureOptions(at=places, duration_s={duration_s}, attach=False)
with api.capture(api.Selection(ranks=(api.ANY_RANK,)), options) as capture:
    print({begun!r})
for process in capture.result().processes:
    print(process.verdict, process.reason)
"""


class Kernel:
    """A kernel that runs cells."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, heard: Callable[[str], None] = lambda _text: None) -> str:
        """What a cell prints; with the error if there is one. heard: called with each text."""
        texts: list[str] = []

        def hook(message: Any) -> None:
            content = message["content"]
            text = "\n".join(content.get("traceback", ())) or content.get("text", "")
            texts.append(text)
            heard(text)

        self._client.execute_interactive(code, timeout=scaled(60), output_hook=hook)
        return "".join(texts)

    def interrupt(self) -> None:
        """What the button of that name does."""
        self._manager.interrupt_kernel()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    manager = pytest.importorskip("jupyter_client.manager")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        started, client = manager.start_new_kernel(startup_timeout=scaled(60))
        try:
            yield Kernel(started, client)
        finally:
            client.stop_channels()
            started.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(HOSTS, agents=1) as started:
        yield started


def cell(fleet: Fleet, duration_s: float, handler: str = "signal.default_int_handler") -> str:
    places = [(host.name, host.address) for host in fleet.hosts]
    return CELL.format(places=places, duration_s=duration_s, begun=BEGUN, handler=handler)


def verdicts(shown: str) -> set[str]:
    """What a cell printed behind BEGUN, of the hosts that took part; what ended otherwise fails.

    On a busy machine a host may be left out: its clock did not answer in time, or its start came too late.
    Nothing else may be why.
    """
    told, _, rest = shown.partition("\n")
    assert told == BEGUN and "Traceback" not in rest, shown
    found = [line.partition(" ") for line in rest.splitlines()]
    left_out = [reason for verdict, _, reason in found if verdict == "UNKNOWN"]
    assert len(found) == HOSTS and all(re.search(LATE, reason) for reason in left_out), shown
    return {verdict for verdict, _, _ in found} - {"UNKNOWN"}


@pytest.mark.parametrize("handler", ["signal.default_int_handler", "lambda *_: None", "signal.SIG_IGN"])
def test_a_cell_captures_whoever_handles_interrupts(kernel: Kernel, fleet: Fleet, handler: str) -> None:
    found = verdicts(kernel.run(cell(fleet, 0.2, handler)))
    assert found and found <= {"DONE", "PARTIAL"}  # on a busy machine one may begin late


def test_a_cell_that_awaits_captures_without_await(kernel: Kernel, fleet: Fleet) -> None:
    awaits = "%autoawait asyncio\nimport asyncio\nawait asyncio.sleep(0)\n"
    assert verdicts(kernel.run(awaits + cell(fleet, 0.2)))


def test_an_interrupt_ends_the_capture_and_the_cell_goes_on(kernel: Kernel, fleet: Fleet) -> None:
    def heard(text: str) -> None:
        if BEGUN in text:
            kernel.interrupt()

    found = verdicts(kernel.run(cell(fleet, LONG_S), heard))
    assert found and found <= {"PARTIAL", "FAILED"}  # FAILED if it had not begun to record
    assert verdicts(kernel.run(cell(fleet, 0.2)))
