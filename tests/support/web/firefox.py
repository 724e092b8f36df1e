"""Debian's Firefox, driven by its own protocol (Marionette): JSON over a socket, without a driver."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from support.waiting import scaled, until

PROGRAM = "firefox-esr"
_START_S = 60
_PREFERENCES = {
    "marionette.port": 0,  # any free one, which it writes into the profile
    "remote.prefs.recommended": True,  # no updates, no first page, nothing from elsewhere
}


class FirefoxError(Exception):
    """What the browser refuses."""


class Firefox:
    """One window."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=scaled(_START_S))
        self._file = self._socket.makefile("rb")
        self._count = 0
        self._read()
        self.ask("WebDriver:NewSession")

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self._socket.close()

    def ask(self, command: str, **values: Any) -> Any:
        """The answer to one command. Raises FirefoxError."""
        self._count += 1
        sent = json.dumps([0, self._count, command, values]).encode()
        self._socket.sendall(b"%d:%b" % (len(sent), sent))
        _, _, error, value = self._read()
        if error is not None:
            raise FirefoxError(f"{command}: {error.get('message')}")
        return value

    def _read(self) -> Any:
        digits = b""
        while (byte := self._file.read(1)) != b":":
            digits += byte
        return json.loads(self._file.read(int(digits)))

    def open(self, address: str) -> None:
        """Loads a page."""
        self.ask("WebDriver:Navigate", url=address)

    def run(self, script: str) -> Any:
        """What a script of the page returns."""
        return self.ask("WebDriver:ExecuteScript", script=script, args=[])["value"]

    def wait(self, condition: str) -> None:
        """Waits until an expression of the page is true."""
        until(lambda: self.run(f"return Boolean({condition})"), condition)

    def press(self, key: str) -> None:
        """Presses a key, where the focus is."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.ask("WebDriver:PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def frame(self, selector: str) -> None:
        """What follows is for this frame."""
        found = self.ask("WebDriver:FindElement", using="css selector", value=selector)["value"]
        self.ask("WebDriver:SwitchToFrame", element=next(iter(found.values())))

    def prefer(self, *, dark: bool) -> None:
        """Chooses light or dark for pages."""
        name = "layout.css.prefers-color-scheme.content-override"
        self.ask("Marionette:SetContext", value="chrome")
        self.run(f"Services.prefs.setIntPref('{name}', {0 if dark else 1})")
        self.ask("Marionette:SetContext", value="content")

    def problems(self) -> list[str]:
        """What the console has said since the last call of the pages at 127.0.0.1."""
        self.ask("Marionette:SetContext", value="chrome")
        said = self.run("return Services.console.getMessageArray().map(String)")
        self.run("Services.console.reset()")
        self.ask("Marionette:SetContext", value="content")
        return [text for text in said if "http://127.0.0.1" in text]


@contextmanager
def running_firefox() -> Iterator[Firefox]:
    """A browser with a profile of its own. Skips the test where there is none."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"needs Debian's package {PROGRAM}")
    with TemporaryDirectory(prefix="firefox-", ignore_cleanup_errors=True) as folder:
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in _PREFERENCES.items()]
        (Path(folder) / "user.js").write_text("\n".join(lines))
        command = [program, "--headless", "--marionette", "--remote-allow-system-access", "--no-remote"]
        with subprocess.Popen(
            [*command, "--profile", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                port = Path(folder) / "MarionetteActivePort"
                until(lambda: port.is_file() and port.read_text().strip(), "the port of Firefox")
                with closing(Firefox(int(port.read_text()))) as firefox:
                    yield firefox
            finally:
                process.terminate()
