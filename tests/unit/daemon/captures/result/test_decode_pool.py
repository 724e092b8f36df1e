"""The pool with little workers that crash, hang and babble."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.catalog import first_screen
from kinetod.base.fair_slots import fair_share_key
from kinetod.captures.result import decode_pool
from kinetod.captures.result.decode_pool import FATAL_ROUNDS, SPARE_KEPT_S, DecodeError, WorkerPool
from support.trace_files.h200 import make_spool
from support.waiting import soon

SECOND_NS = 10**9
ANSWER = """
import json, os, pathlib, sys, time
print("warming up", file=sys.stderr)
for line in sys.stdin:
    job = json.loads(line)
    folder = pathlib.Path(job["target_dir"])
    what = folder.name
    if what == "crash" or (what == "crash-once" and not (folder / "tried").exists()):
        folder.mkdir(exist_ok=True); (folder / "tried").touch()
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    if what.startswith("meet"):
        (folder.parent / (what + ".here")).touch()
        while len(list(folder.parent.glob("meet*.here"))) < 2:
            time.sleep(0.002)
    if what == "babble":
        print("no json", flush=True); continue
    if "traces" in job:
        found = {"verdict": " ".join(job["traces"]), "cause": "\x1b" + "c" * 2000} if what == "good" else "nonsense"
        print(json.dumps({"id": job["id"], "answer": found}), flush=True); continue
    ok = what != "bad"
    answer = {"conversion": {"pid": os.getpid()}} if ok else {"reason_code": "UNKNOWN_LAYOUT", "reason": "strange"}
    print(json.dumps({"id": job["id"], "ok": ok, **answer}), flush=True)
"""
COMMAND = (sys.executable, "-S", "-c", ANSWER)


def run(tmp_path: Path, *names: str, count: int = 1, deadline_ns: int = 20 * SECOND_NS, of: str = "") -> list[Any]:
    """of: the job that has this deadline; empty: all have it."""

    def deadline_of(name: str) -> int:
        return deadline_ns if of in (name, "") else 20 * SECOND_NS

    async def jobs() -> list[Any]:
        pool = WorkerPool(count, command=COMMAND)
        await pool.start()
        try:
            calls = [pool.convert(tmp_path / name, ["chrome"], deadline_ns=deadline_of(name)) for name in names]
            return list(await asyncio.gather(*calls, return_exceptions=True))
        finally:
            await pool.stop()

    return asyncio.run(jobs())


def test_a_worker_is_used_again(tmp_path: Path) -> None:
    first, second = run(tmp_path, "good", "good")
    assert first["pid"] == second["pid"]


def test_jobs_share_the_workers(tmp_path: Path) -> None:
    answers = run(tmp_path, *(f"good{number}" for number in range(20)), count=3)
    assert 1 <= len({answer["pid"] for answer in answers}) <= 3


def test_a_refusal_has_the_workers_code(tmp_path: Path) -> None:
    (error,) = run(tmp_path, "bad")
    assert isinstance(error, DecodeError)
    assert (error.code, error.reason) == ("UNKNOWN_LAYOUT", f"strange; the raw records are kept in {tmp_path}/bad/raw")


def test_a_job_that_crashes_its_worker_is_tried_twice(tmp_path: Path) -> None:
    crash, once, good = run(tmp_path, "crash", "crash-once", "good")
    assert isinstance(crash, DecodeError)
    assert crash.code == "DECODE_FAILED"
    assert crash.reason.startswith("the decoder crashed (exit status 7)")
    assert once["pid"] != good["pid"] or once["pid"] > 0
    assert "pid" in good


def test_a_job_beyond_its_deadline_is_killed_and_the_next_gets_a_new_worker(tmp_path: Path) -> None:
    hang, good = run(tmp_path, "hang", "good", deadline_ns=SECOND_NS // 2, of="hang")
    assert isinstance(hang, DecodeError)
    assert hang.code == "DECODE_TIMEOUT"
    assert "longer than 500 ms" in hang.reason
    assert "pid" in good


def test_an_answer_that_is_no_json_counts_as_a_crash(tmp_path: Path) -> None:
    (error,) = run(tmp_path, "babble")
    assert isinstance(error, DecodeError)
    assert error.code == "DECODE_FAILED"


def test_a_worker_that_cannot_start_is_a_crash(tmp_path: Path) -> None:
    async def job() -> object:
        pool = WorkerPool(1, command=(sys.executable, "-S", "-c", "raise SystemExit(3)"))
        await pool.start()
        try:
            with pytest.raises(DecodeError) as caught:
                await pool.convert(tmp_path, [], deadline_ns=10 * SECOND_NS)
        finally:
            await pool.stop()
        return caught.value.code

    assert asyncio.run(job()) == "DECODE_FAILED"


def test_dead_workers_are_replaced_without_a_job(tmp_path: Path) -> None:
    async def tended() -> tuple[bool, set[int], set[int]]:
        pool = WorkerPool(2, command=COMMAND)
        await pool.start()
        try:
            before = pool.pids()
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            while await pool.tend() and victim in pool.pids():  # until the loop has heard of its end
                await asyncio.sleep(0)
            return await pool.tend(), before, pool.pids()
        finally:
            await pool.stop()

    works, before, after = asyncio.run(tended())
    assert (works, len(after), len(before & after)) == (True, 2, 1)


def test_the_worker_of_the_spare_turn_is_kept_for_a_while_after_it_was_needed(tmp_path: Path) -> None:
    async def job_of(user: str, pool: WorkerPool) -> int:
        fair_share_key.set(user)
        answer = await pool.convert(tmp_path / f"meet-{user}", [], deadline_ns=20 * SECOND_NS)
        return int(answer["pid"])

    async def scenario() -> tuple[set[int], list[set[int]]]:
        now = [0.0]
        pool = WorkerPool(1, command=COMMAND, clock=lambda: now[0])
        await pool.start()
        try:
            used = set(await asyncio.gather(job_of("ann", pool), job_of("bob", pool)))
            kept = []
            for now[0] in (0.99 * SPARE_KEPT_S, SPARE_KEPT_S):
                assert await pool.tend()
                kept.append(pool.pids())
            return used, kept
        finally:
            await pool.stop()

    used, (before, after) = asyncio.run(scenario())
    assert (before, len(after), after < used) == (used, 1, True)


def test_a_job_that_comes_while_a_dead_worker_is_replaced_leaves_none_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> tuple[bool, int]:
        pool, go_on, start = WorkerPool(1, command=COMMAND), asyncio.Event(), decode_pool._Worker.start

        async def late(command: tuple[str, ...]) -> Any:
            monkeypatch.setattr(decode_pool._Worker, "start", start)
            await go_on.wait()
            return await start(command)

        monkeypatch.setattr(decode_pool._Worker, "start", late)
        try:
            tending = asyncio.create_task(pool.tend())
            await asyncio.sleep(0)  # it is at its start
            await pool.convert(tmp_path / "good", [], deadline_ns=20 * SECOND_NS)
            go_on.set()
            return await tending, len(pool.pids())
        finally:
            await pool.stop()

    assert asyncio.run(scenario()) == (True, 1)


def test_a_job_may_find_a_dead_worker_while_another_dead_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> tuple[bool, int]:
        pool, go_on, stop = WorkerPool(2, command=COMMAND), asyncio.Event(), decode_pool._Worker.stop

        async def late(worker: Any, *, kill: bool) -> str:
            monkeypatch.setattr(decode_pool._Worker, "stop", stop)
            await go_on.wait()
            return await stop(worker, kill=kill)

        await pool.start()
        try:
            for pid in pool.pids():
                os.kill(pid, signal.SIGKILL)
            await wait_for_end(pool)
            monkeypatch.setattr(decode_pool._Worker, "stop", late)
            tending = asyncio.create_task(pool.tend())
            await asyncio.sleep(0)  # it is at the end of the first
            await pool.convert(tmp_path / "good", [], deadline_ns=20 * SECOND_NS)
            go_on.set()
            return await tending, len(pool.pids())
        finally:
            await pool.stop()

    assert asyncio.run(scenario()) == (True, 2)


def test_workers_that_die_again_and_again_are_a_failure() -> None:
    async def rounds() -> list[bool]:
        pool = WorkerPool(1, command=(sys.executable, "-S", "-c", ""))
        await pool.start()
        answers: list[bool] = []
        try:
            while not answers or answers[-1]:
                await wait_for_end(pool)
                answers.append(await pool.tend())
            return answers
        finally:
            await pool.stop()

    assert asyncio.run(rounds()) == [True] * (FATAL_ROUNDS - 1) + [False]


async def wait_for_end(pool: WorkerPool) -> None:
    for worker in pool._idle:
        await worker.process.wait()


def test_workers_that_cannot_be_started_are_a_failure(tmp_path: Path) -> None:
    async def tended() -> bool:
        pool = WorkerPool(1, command=(str(tmp_path / "gone"),))
        return await pool.tend()

    assert not asyncio.run(tended())


def answers(tmp_path: Path, *names: str) -> list[Any]:
    """What the pool says of these captures; of the one named `none` nothing was decoded."""

    async def asked() -> list[Any]:
        pool = WorkerPool(1, command=COMMAND)
        await pool.start()
        try:
            targets = {name: [] if name == "none" else [Path("a"), Path("b")] for name in names}
            return list(await asyncio.gather(*(pool.answer(tmp_path / name, targets[name]) for name in names)))
        finally:
            await pool.stop()

    return asyncio.run(asked())


def test_an_answer_is_about_all_decoded_targets_and_its_text_is_safe(tmp_path: Path) -> None:
    (found,) = answers(tmp_path, "good")
    assert found.verdict == "a b"
    assert len(found.cause) <= decode_pool.MAX_ANSWER_CHARS and found.cause.isprintable()


def test_without_an_answer_the_next_capture_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "ANSWER_NS", SECOND_NS)
    found = answers(tmp_path, "none", "crash", "babble", "other", "hang", "good")
    assert [each is None for each in found] == [True, True, True, True, True, False]


def test_only_so_many_captures_wait_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "MAX_ANSWERS_WAITING", 2)
    assert [each is None for each in answers(tmp_path, "good", "good", "good")] == [False, False, True]


def test_the_answer_of_a_real_worker_is_that_of_the_report(tmp_path: Path) -> None:
    target = tmp_path / "targets/7-70"
    make_spool(target, "mlp-cupti26")

    async def asked() -> pb.CaptureAnswer | None:
        pool = WorkerPool(1)
        try:
            await pool.convert(target, ["chrome"], deadline_ns=60 * SECOND_NS)
            return await pool.answer(tmp_path, [target])
        finally:
            await pool.stop()

    found, expected = asyncio.run(asked()), first_screen.first_screen_of([target])
    assert found is not None and found.verdict
    assert (found.verdict, found.cause) == (expected.verdict, expected.cause)


def test_a_real_worker_gives_way_to_the_programs_that_are_traced(tmp_path: Path) -> None:
    async def scenario() -> int:
        pool = WorkerPool(1)
        await pool.start()
        try:
            with pytest.raises(DecodeError):
                await pool.convert(tmp_path / "nothing", ["chrome"], deadline_ns=60 * 10**9)
            (pid,) = pool.pids()
            return os.getpriority(os.PRIO_PROCESS, pid)
        finally:
            await pool.stop()

    assert asyncio.run(scenario()) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_a_folder_that_ended_the_daemon_while_it_was_decoded_is_given_up_at_the_third_start(tmp_path: Path) -> None:
    decode_pool.begin_try(tmp_path / "good")  # by a daemon that was killed with its workers,
    decode_pool.begin_try(tmp_path / "good")  # and by the next one
    (error,) = run(tmp_path, "good")
    assert isinstance(error, DecodeError)
    assert error.code == "DECODE_FAILED"
    assert error.reason == (
        "the decoder or the daemon ended during an earlier try; gave up after 2 tries; "
        f"the raw records are kept in {tmp_path}/good/raw"
    )


def test_a_daemon_that_is_stopped_while_it_decodes_does_not_count_as_a_try(tmp_path: Path) -> None:
    async def stopped() -> None:
        pool = WorkerPool(1, command=COMMAND)
        await pool.start()
        job = asyncio.create_task(pool.convert(tmp_path / "hang", [], deadline_ns=60 * SECOND_NS))
        await soon(lambda: not pool.pids(), "the worker has the job")
        job.cancel()
        await asyncio.wait([job])
        await pool.stop()

    asyncio.run(stopped())
    assert (tmp_path / "hang.tries").read_text() == "0"


def test_nothing_is_left_beside_a_folder_that_was_decoded_or_refused(tmp_path: Path) -> None:
    run(tmp_path, "good", "bad")
    assert list(tmp_path.glob("*.tries")) == []
