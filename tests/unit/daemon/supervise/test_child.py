"""Processes of the daemon's own: what they import, what they say last, how they end."""

import asyncio
import logging
import re
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from kinetod.supervise import child
from support.waiting import scaled

SOURCES = Path(child.__file__).parents[1]
LOG = logging.getLogger("kinetod.test")
UNTIL_CLOSED = "import sys; sys.stdin.read(); print('farewell', file=sys.stderr); sys.exit(3)"
FOR_EVER = "import os, signal; os.write(1, b'!'); signal.pause()"


def modules() -> list[str]:
    """All that the daemon starts."""
    texts = [path.read_text() for path in sorted(SOURCES.rglob("*.py"))]
    return [found for text in texts for found in re.findall(r'child\.python\("([\w.]+)"', text)]


def test_every_python_that_the_daemon_starts_comes_from_one_place() -> None:
    others = [path.name for path in SOURCES.rglob("*.py") if "sys.executable" in path.read_text()]
    assert others == []
    assert {
        "kinetod.captures.result.decode_worker",
        "kinetod.uploads.upload_worker",
        "kinetod.attach_helper.attach_worker",
    } <= set(modules())


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with packages of names that are ours and the library's; importing one of them leaves a trace."""
    for name in (
        "kinetod/__init__.py",
        "kinetod/supervise/__init__.py",
        "kinetod/supervise/child.py",
        "json.py",
        "msgspec.py",
        "logging.py",
        "encodings.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    return tmp_path


@pytest.mark.parametrize("module", modules())
def test_nothing_is_imported_from_the_folder_that_the_daemon_was_started_in(planted: Path, module: str) -> None:
    subprocess.run(child.python(module), cwd=planted, stdin=subprocess.DEVNULL, capture_output=True, timeout=scaled(60))
    assert not (planted / "imported").exists()


def test_without_that_care_it_would_be(planted: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "kinetod.captures.result.decode_worker"],
        cwd=planted,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(60),
    )
    assert (planted / "imported").exists()


async def started(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code, stdin=PIPE, stdout=PIPE, stderr=PIPE)


def test_a_process_with_time_ends_by_itself_and_its_last_words_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> str:
        process = await started(UNTIL_CLOSED)
        reader = asyncio.create_task(child.log_errors(process, LOG, "worker"))
        how = await child.end(process, patience_s=60, readers=[reader])
        assert caplog.messages == [f"worker {process.pid}: farewell"]
        return how

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()) == "exit status 3"


@pytest.mark.parametrize("patience_s", [0, 0.01])
def test_a_process_that_does_not_end_is_killed(patience_s: float) -> None:
    async def scenario() -> str:
        process = await started(FOR_EVER)
        assert process.stdout is not None
        await process.stdout.readexactly(1)
        return await child.end(process, patience_s=patience_s)

    assert asyncio.run(scenario()) == "exit status -9"


def test_how_a_process_had_ended_is_not_hidden_by_ending_it() -> None:
    async def scenario() -> str:
        process = await started("raise SystemExit(5)")
        await process.wait()
        return await child.end(process)

    assert asyncio.run(scenario()) == "exit status 5"


def test_a_process_whose_output_nobody_reads_is_not_waited_for_for_ever() -> None:
    async def scenario() -> str:
        process = await started("import os\nwhile True: os.write(1, bytes(65536))")
        assert process.stdout is not None
        await process.stdout.readexactly(1 << 20)
        return await child.end(process, patience_s=0.01)

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) in ("exit status -9", "it does not end")


def test_of_a_process_that_complains_without_end_the_beginning_is_told() -> None:
    read: list[int] = []

    class Pipe(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            data = await super().read(n)
            read.append(len(data))
            return data

    async def beginning() -> bytes:
        pipe = Pipe()
        pipe.feed_data(b"first " + bytes(1 << 20))
        pipe.feed_eof()
        return await child._beginning(pipe)

    text = asyncio.run(beginning())
    assert text.startswith(b"first ")
    assert len(text) < 1 << 18
    assert sum(read) == len(b"first ") + (1 << 20)  # nobody writes in vain
