"""The Debian package under a real systemd: installed, used, restarted, upgraded, removed.

    python tests/campaign/systemd.py [--package FILE] [--output FILE]

Builds the package unless one is given, boots a throw-away copy of this machine (an overlay and systemd-nspawn), and
prints one line for each check. The exit status is 1 if a check fails, 3 if nothing can be booted here. The campaign
takes about two minutes, and building the package as long again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos", "deploy/supply")]

from campaign.parts.booted import CannotBoot, Machine, machine  # noqa: E402
from pinned.pins import RUNTIME, normal, read  # noqa: E402
from pinned.sbom import digest_of  # noqa: E402
from support.waiting import until  # noqa: E402

UNITS = ("kinetod.service", "kinetod-attach.socket")
LOOP = "import time\ndef spin():\n    while True: time.sleep(0.001)\nspin()"
MAPS = f"import mmap\nfile = open(%r, 'rb')\nkept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n{LOOP}"
USERS = range(1234, 1238)
TRACES = "/srv/traces"
REQUEST = """
import socket, struct, sys
text = sys.argv[1].encode()
with socket.create_connection(("127.0.0.1", 1778)) as sock:
    sock.sendall(struct.pack("=i", len(text)) + text)
    with sock.makefile("rb") as answer:
        print(answer.read(struct.unpack("=i", answer.read(4))[0]).decode())
"""
WRITERS_CAPABILITIES = sum(1 << number for number in (6, 7))
HELPERS_CAPABILITIES = sum(1 << number for number in (2, 6, 7, 19, 21, 23))
IN_A_CONTAINER = ("--property=SystemCallFilter=@system-service", "--property=SystemCallErrorNumber=EPERM")
PACKAGED_AGENT = "/opt/kinetod/lib/python3.11/site-packages"


class Campaign:
    """The checks, in this order."""

    def __init__(self, inside: Machine, package: Path) -> None:
        self.inside = inside
        self.package = package
        self.failed = 0
        self.rows: list[tuple[str, str]] = []

    def check(self, name: str, work: Callable[[], object]) -> None:
        """Prints one line of the report."""
        try:
            said = work()
            result = f"ok  {said if isinstance(said, str) else ''}".rstrip()
        except Exception as exc:  # the others shall still run
            self.failed += 1
            result = f"FAILED  {exc}"
            traceback.print_exc()
        self.rows.append((name, result))
        print(f"{name:66} {result}", flush=True)

    def run(self) -> None:
        """Runs all checks."""
        self.check("the bill of materials lists all that is in the package", lambda: f"{listed(self.package)} packages")
        self.check("install: dpkg -i starts both units", self.install)
        self.check("the front end has no capability, a filter, and its own user", self.front_end)
        self.check("an unprepared process of another user is traced", lambda: self.trace("train", 1234))
        self.check("the helper has its capabilities and no filter of its own", self.helper)
        self.check("... one with a seccomp filter", lambda: self.trace("boxed", 1235, *IN_A_CONTAINER))
        self.check("... one that has an agent of its own", self.own_agent)
        self.check("rank and job of other users' processes are listed", self.listed)
        self.check("a process of root is left alone, with the reason", self.roots)
        self.check("doctor sees through the helper", self.doctor)
        self.check("decoders are confined under the unit's own filter", self.sandbox)
        self.check("other profilers in other users' processes are seen through it", self.profilers)
        self.check("each use is in the journal", self.journal)
        self.check("dyno --log-file without the writer: the answer says what enables it", self.no_writer)
        self.check("... with it, read-only: the answer says which line is missing", self.writer_without_a_folder)
        self.check("... with that line: the trace is the user's, and doctor is content", self.writer)
        self.check("the writer has two capabilities, a filter, and its own user", self.writer_rights)
        self.check("reload", self.reload)
        self.check("restart: captures are still there, agents come back", self.restart)
        self.check("kill -9: systemd starts it again", self.killed)
        self.check("the helper is killed: the next trace works", self.helper_killed)
        self.check("upgrade: configuration and captures are kept", self.upgrade)
        self.check("exposure of the installed units", self.exposure)
        self.check("remove: units go, captures stay", self.remove)
        self.check("purge: nothing stays", self.purge)

    def install(self) -> None:
        for uid in USERS:
            self.inside.run("useradd", "--no-create-home", "--uid", str(uid), f"user{uid}")
        self.inside.run("dpkg", "--install", str(self.package))
        self.active()

    def active(self) -> None:
        for unit in UNITS:
            assert self.inside.show(unit, "ActiveState") == "active", self.inside.said("systemctl", "status", unit)

    def main_pid(self, unit: str) -> int:
        return int(self.inside.show(unit, "MainPID"))

    def status(self, unit: str) -> dict[str, str]:
        text = self.inside.run("cat", f"/proc/{self.main_pid(unit)}/status").stdout
        return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}

    def front_end(self) -> str:
        status = self.status("kinetod.service")
        kineto = self.inside.said("id", "-u", "kineto")
        assert set(status["Uid"].split()) == {kineto}, status["Uid"]
        assert all(int(status[name], 16) == 0 for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh"))
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        return f"uid {kineto}"

    def helper(self) -> None:
        status = self.status("kinetod-attach.service")
        assert all(int(status[name], 16) == HELPERS_CAPABILITIES for name in ("CapEff", "CapPrm", "CapBnd")), status
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "0"), status

    def target(self, name: str, uid: int, *properties: str) -> int:
        """Starts a target process of that user."""
        given = ("--property=Type=exec", "--setenv=RANK=3", "--setenv=SLURM_JOB_ID=77", *properties)
        self.inside.run(
            "systemd-run", f"--unit={name}", f"--uid={uid}", "--collect", *given, "/usr/bin/python3", "-c", LOOP
        )
        return self.main_pid(name)

    def kinetoctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.inside.run("kinetoctl", *arguments, check=False)

    def traced(self, pid: int) -> str:
        done = self.kinetoctl(
            "trace", "--pid", str(pid), "--duration", "500ms", "--output-dir", "/var/tmp/traces", "-o", "json"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = json.loads(done.stdout)["targets"]
        assert found["verdict"] == "VERDICT_DONE", found
        return str(found.get("attach_method") or found.get("verdict"))

    def trace(self, name: str, uid: int, *properties: str) -> str:
        return self.traced(self.target(name, uid, *properties))

    def own_agent(self) -> None:
        environ = ("--setenv=KINETO_AGENT=1", f"--setenv=PYTHONPATH={PACKAGED_AGENT}")
        program = f"import sys; sys.path[:0] = ['{PACKAGED_AGENT}']; import kineto_agent; kineto_agent.start()\n{LOOP}"
        self.inside.run(
            "systemd-run", "--unit=agent", "--uid=1236", "--collect", *environ, "/usr/bin/python3", "-c", program
        )
        pid = self.main_pid("agent")
        until(lambda: self.listing().get(pid, {}).get("agent_state") == "AGENT_STATE_READY", "the agent has connected")
        self.traced(pid)

    def listing(self) -> dict[int, dict[str, object]]:
        done = self.kinetoctl("ps", "--all", "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        processes = found["processes"] if isinstance(found, dict) else found
        return {process["pid"]: process for process in processes}

    def listed(self) -> None:
        process = self.listing()[self.main_pid("train")]
        assert (process["rank"], process["job_id"], process["uid"]) == (3, "77", 1234), process

    def roots(self) -> None:
        self.inside.run("systemd-run", "--unit=roots", "--collect", "/usr/bin/python3", "-c", LOOP)
        done = self.kinetoctl("trace", "--pid", str(self.main_pid("roots")), "--duration", "100ms")
        assert done.returncode == 6, (done.returncode, done.stderr)
        assert "left alone" in done.stderr, done.stderr

    def sandbox(self) -> str:
        checks = json.loads(self.kinetoctl("doctor", "-o", "json").stdout)["checks"]
        (found,) = (each for each in checks if each["name"] == "sandbox")
        assert found["status"].endswith("OK"), found
        return str(found["detail"])

    def doctor(self) -> None:
        done = self.kinetoctl("doctor", str(self.main_pid("boxed")), "-o", "json")
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert checks["permission"]["status"] == "CHECK_STATUS_OK", checks

    def profilers(self) -> None:
        library = "/var/tmp/libToolsInjection64.so"
        self.inside.run("cp", "/bin/true", library)
        self.inside.run(
            "systemd-run", "--unit=nsight", "--uid=1235", "--collect", "/usr/bin/python3", "-c", MAPS % library
        )
        pid = self.main_pid("nsight")

        def details() -> list[str]:
            checks = json.loads(self.kinetoctl("doctor", "-o", "json").stdout)["checks"]
            return [check["detail"] for check in checks if check["name"] == "profilers"]

        until(lambda: any("Nsight Systems (" in each and f"pid {pid}" in each for each in details()), "it is seen")

    def journal(self) -> None:
        text = self.inside.said("journalctl", "--unit=kinetod-attach", "--output=cat", "--priority=info")
        for word in (
            "attach by process",
            "look by process",
            "search by process",
            "diagnose by process",
            "refused ATTACH_NOT_PERMITTED",
        ):
            assert word in text, text

    def asked(self) -> dict[str, Any]:
        """The answer to a request of user 1234, as dyno makes it, for a trace of that user's process."""
        pid = self.main_pid("train")
        config = f"ACTIVITIES_LOG_FILE={TRACES}/t.json\nACTIVITIES_DURATION_MSECS=200"
        request = {"fn": "setKinetOnDemandRequest", "config": config, "pids": [pid], "job_id": 0, "process_limit": 3}
        user = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")

        def started() -> dict[str, Any]:  # once the capture before has ended
            done = self.inside.run(*user, "/usr/bin/python3", "-c", REQUEST, json.dumps(request))
            told: dict[str, Any] = json.loads(done.stdout)
            return told["kinetod"] if told["processesMatched"] == [pid] else {}

        found: dict[str, Any] = until(started, "the process is traced")
        return found

    def no_writer(self) -> None:
        assert self.inside.show("kinetod-writer.socket", "UnitFileState") == "disabled"
        self.inside.run("mkdir", "--mode=1777", TRACES)
        text = f'[dynolog]\nrpc = "loopback"\nlog_roots = ["{TRACES}"]\n'
        self.inside.run("sh", "-c", f"printf '%s' '{text}' > /etc/kinetod/config.toml")
        self.inside.run("systemctl", "restart", "kinetod")
        said = self.asked()["log_file"]
        assert "enable it with `systemctl enable --now kinetod-writer.socket`" in said, said

    def writer_without_a_folder(self) -> None:
        self.inside.run("sh", "-c", f"printf 'roots = [\"{TRACES}\"]\n' > /etc/kinetod/writer.toml")
        self.inside.run("systemctl", "enable", "--now", "kinetod-writer.socket")
        said = self.asked()["log_file"]
        assert f"add the line ReadWritePaths={TRACES} below [Service]" in said, said

    def writer(self) -> None:
        folder = "/etc/systemd/system/kinetod-writer.service.d"
        self.inside.run("sh", "-c", f"mkdir {folder}; printf '[Service]\nReadWritePaths={TRACES}\n' > {folder}/a.conf")
        self.inside.run("systemctl", "daemon-reload")
        self.inside.run("systemctl", "restart", "kinetod-writer.service")
        answer = self.asked()
        assert "log_file" not in answer, answer
        path = f"{TRACES}/t_{self.main_pid('train')}.json"
        until(lambda: self.inside.said("stat", "--format=%u %a", path) == "1234 644", "the trace is there")
        checks = json.loads(self.kinetoctl("doctor", "-o", "json").stdout)["checks"]
        (found,) = (each for each in checks if each["name"] == "dynolog_files")
        assert found["status"].endswith("OK"), found
        assert "1 of 1 written" in self.inside.said("journalctl", "--unit=kinetod-writer", "--output=cat")

    def writer_rights(self) -> None:
        status = self.status("kinetod-writer.service")
        assert set(status["Uid"].split()) == {self.inside.said("id", "-u", "kineto-writer")}, status["Uid"]
        assert all(int(status[name], 16) == WRITERS_CAPABILITIES for name in ("CapEff", "CapPrm", "CapBnd")), status
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), status

    def reload(self) -> None:
        before = self.main_pid("kinetod.service")
        self.inside.run("systemctl", "reload", "kinetod")
        assert self.main_pid("kinetod.service") == before
        self.active()

    def captures(self) -> int:
        done = self.kinetoctl("captures", "list", "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return len(found["captures"] if isinstance(found, dict) else found)

    def restart(self) -> str:
        count = self.captures()
        assert count >= 3
        self.inside.run("systemctl", "restart", "kinetod")
        self.active()
        assert self.captures() == count
        pid = self.main_pid("agent")
        until(lambda: self.listing().get(pid, {}).get("agent_state") == "AGENT_STATE_READY", "the agent is back")
        self.traced(self.main_pid("train"))
        return f"{count} captures"

    def killed(self) -> None:
        before = self.main_pid("kinetod.service")
        self.inside.run("kill", "-9", str(before))
        until(
            lambda: (
                self.main_pid("kinetod.service") not in (0, before)
                and self.inside.show("kinetod.service", "ActiveState") == "active"
            ),
            "kinetod runs again",
        )
        self.traced(self.main_pid("train"))

    def helper_killed(self) -> None:
        self.inside.run("kill", "-9", str(self.main_pid("kinetod-attach.service")))
        pid = self.target("another", 1237)
        self.traced(pid)

    def upgrade(self) -> None:
        config = "/etc/kinetod/config.toml"
        self.inside.run("sh", "-c", f"printf '[captures]\\nmax_captures = 7\\n' > {config}")
        count, before = self.captures(), self.main_pid("kinetod.service")
        self.inside.run("dpkg", "--install", str(self.package))
        self.active()
        assert "max_captures = 7" in self.inside.said("cat", config)
        assert self.main_pid("kinetod.service") != before
        assert self.captures() == count
        self.traced(self.main_pid("train"))

    def exposure(self) -> str:
        found = []
        for unit in ("kinetod.service", "kinetod-attach.service", "kinetod-writer.service"):
            text = self.inside.said("systemd-analyze", "security", "--no-pager", unit)
            found.append(text.rpartition(": ")[2].split()[0])
        assert float(found[0]) <= 3.0
        return " and ".join(found)

    def remove(self) -> None:
        self.inside.run("dpkg", "--remove", "kinetod")
        for unit in (*UNITS, "kinetod-attach.service", "kinetod-writer.service", "kinetod-writer.socket"):
            assert self.inside.show(unit, "LoadState") == "not-found", unit
        assert self.inside.said("ls", "/var/lib/kineto/captures")
        assert "max_captures" in self.inside.said("cat", "/etc/kinetod/config.toml")
        for name in ("train", "boxed", "agent"):
            assert self.inside.show(name, "ActiveState") == "active", f"{name} was harmed"

    def purge(self) -> None:
        self.inside.run("dpkg", "--purge", "kinetod")
        left = self.inside.said("sh", "-c", "ls -d /var/lib/kineto /etc/kinetod /opt/kinetod /run/kineto* 2>/dev/null")
        assert left == "", left
        assert self.inside.run("id", "kineto", check=False).returncode != 0


def listed(package: Path) -> int:
    """Compares the package's bill of materials with the lock and its files; returns how many packages it lists."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "--extract", str(package), folder], check=True)
        prefix = Path(folder) / "opt/kinetod"
        bill = json.loads((prefix / "share/sbom/kinetod.cdx.json").read_text())
        pins = read(RUNTIME)
        for each in bill["components"]:
            pin = pins[normal(each["name"])]
            assert each["version"] == pin.version
            assert each["hashes"][0]["content"] in pin.digests
            assert each["licenses"]
        own = {part["name"]: part["hashes"][0]["content"] for part in bill["metadata"]["component"]["components"]}
        assert own == {path.name: digest_of(path) for path in prefix.glob("lib/*/site-packages/kineto_*/_native/*.so")}
        found = {path.name.partition("-")[0] for path in prefix.glob("lib/*/site-packages/*.dist-info")}
        assert {normal(name) for name in found} == {normal(each["name"]) for each in bill["components"]} | {"kinetod"}
        return len(found)


def built() -> Path:
    """Builds the package from this source."""
    done = subprocess.run([str(ROOT / "deploy/packages/build.sh"), "deb"], check=True, capture_output=True, text=True)
    return Path(done.stdout.split()[-1])


def main() -> int:
    """Runs the campaign (see the top of this file)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path)
    parser.add_argument("--output", type=Path, help="also write the report there")
    options = parser.parse_args()
    package = (options.package or built()).resolve()
    try:
        with machine() as inside:
            campaign = Campaign(inside, package)
            campaign.run()
            if campaign.failed:
                print(
                    inside.said(
                        "journalctl",
                        "--no-pager",
                        "--unit=kinetod",
                        "--unit=kinetod-attach",
                        "--unit=kinetod-writer",
                        "--lines=80",
                    )
                )
    except CannotBoot as exc:
        print(f"no systemd can be booted here: {exc}", file=sys.stderr)
        return 3
    if options.output:
        options.output.write_text("".join(f"{name:66} {result}\n" for name, result in campaign.rows))
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
