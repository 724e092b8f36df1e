"""Checks kinetod's systemd units, if systemd is running."""

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kinetod.attach.attach_types import Finding, Status
from kinetod.base.safe_text import clean
from kinetod.host_checks.check_protocol import CheckQuestion

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
SERVICE, SOCKET, HELPER = "kinetod.service", "kinetod-attach.socket", "kinetod-attach.service"
WRITER_SOCKET, WRITER = "kinetod-writer.socket", "kinetod-writer.service"  # not enabled by default
UNITS = (SERVICE, SOCKET, HELPER, WRITER_SOCKET, WRITER)
PROPERTIES = ("Id", "LoadState", "ActiveState", "Result", "NRestarts", "MainPID", "UnitFileState")
COMMAND = ("systemctl", "show", f"--property={','.join(PROPERTIES)}", *UNITS)
DEADLINE_S = 3.0


def check(question: CheckQuestion) -> Iterable[Finding]:
    """The findings about the units. Blocking."""
    if not BOOTED.is_dir():
        return [Finding("units", Status.OK, "systemd does not run here")]
    return ask(question)


def ask(question: CheckQuestion, command: Sequence[str] = COMMAND) -> Iterator[Finding]:
    """Asks systemctl. Blocking."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as exc:
        yield Finding("units", Status.UNKNOWN, f"{command[0]} gave no answer: {exc}")
        return
    states = parse(done.stdout.decode("utf-8", "replace"))
    if SERVICE not in states:
        said = clean(done.stderr.decode("utf-8", "replace").strip(), 200)
        yield Finding("units", Status.UNKNOWN, f"{command[0]} gave no usable answer: {said or 'nothing'}")
        return
    yield from findings(states, question)


def parse(text: str) -> dict[str, dict[str, str]]:
    """The properties of each unit, by its name."""
    units = {}
    for block in text.split("\n\n"):
        unit = {name: value for name, _, value in (line.partition("=") for line in block.splitlines())}
        if name := unit.get("Id"):
            units[name] = unit
    return units


def findings(states: Mapping[str, Mapping[str, str]], question: CheckQuestion) -> Iterator[Finding]:
    """One finding for each installed unit."""
    if states[SERVICE].get("LoadState") == "not-found":
        detail = f"{SERVICE} is not installed; this daemon was started by hand"
        yield Finding("units", Status.OK, detail)
        return
    for name in UNITS:
        if name in states:
            yield _unit(name, states[name], question)


def _unit(name: str, state: Mapping[str, str], question: CheckQuestion) -> Finding:
    active, look = state.get("ActiveState", "?"), f"`systemctl status {name}`, `journalctl -u {name}`"
    if state.get("LoadState") == "not-found":
        return Finding(name, Status.PROBLEM, "not installed, unlike the others", "`kinetoctl host install`")
    if state.get("LoadState") not in ("loaded", None):
        return Finding(name, Status.PROBLEM, f"systemd cannot read it: {state['LoadState']}", look)
    if active == "failed":
        return Finding(name, Status.PROBLEM, f"has failed: {state.get('Result') or 'without a reason'}", look)
    if name == WRITER_SOCKET and active == "inactive":
        return Finding(name, Status.OK, "not enabled; only dynolog.log_roots needs it")
    if name in (HELPER, WRITER):  # runs only while in use
        return Finding(name, Status.OK, active)
    if active not in ("active", "activating", "reloading"):
        advice = f"`systemctl enable --now {name}`"
        return Finding(name, Status.PROBLEM if name == SOCKET else Status.NOTE, active, advice)
    if name == SERVICE and state.get("MainPID") not in (str(question.daemon_pid), None):
        detail = f"{active} as pid {state['MainPID']}, which is not the daemon that answers (pid {question.daemon_pid})"
        return Finding(name, Status.NOTE, detail, "does KINETO_ADDRESS point to a daemon other than the host's?")
    if state.get("UnitFileState") == "disabled":
        return Finding(name, Status.NOTE, f"{active}, but does not start with the host", f"`systemctl enable {name}`")
    restarts = state.get("NRestarts", "0")
    if name == SERVICE and restarts not in ("0", ""):
        return Finding(name, Status.NOTE, f"{active}, restarted {restarts} times since it was started", look)
    return Finding(name, Status.OK, active)
