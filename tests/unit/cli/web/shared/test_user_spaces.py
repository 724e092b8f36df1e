"""What users have of the server, apart from each other and within limits."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import NotFound, Refused
from kinetoctl.web.analyses.analysis_queue import AnalysisFailed, AnalysisQueue, WorkerLimits
from kinetoctl.web.http.web_messages import WebError
from kinetoctl.web.pages.page_context import HostsFound, OfHost
from kinetoctl.web.shared import user_spaces
from kinetoctl.web.shared.doors import PageUser
from kinetoctl.web.shared.user_spaces import BURST, IDLE_S, MAX_USERS, FetchedTraces, UserAnalyses, UserSpaces
from support.service.captures import capture, done_target, trace_file

ADA, BEA = PageUser(user="ada"), PageUser(user="bea")
SETTINGS = CommonOptions(address="unix:/nowhere/kinetod.sock", output="table", color=False, quiet=True, timeout_s=5.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Answers each job with what it was asked."""

    value: Any = None

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, job: dict[str, Any]) -> Any:
        return self.value or job


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def queue(worker: Worker) -> Iterator[AnalysisQueue]:
    with AnalysisQueue(WorkerLimits(), workers=[worker]) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spaces(queue: AnalysisQueue, tmp_path: Path, clock: Clock) -> Iterator[UserSpaces]:
    made = UserSpaces(SETTINGS, queue, tmp_path, ui_origin="", most_bytes=1000, clock=clock)
    yield made
    made.close()
    assert [each.name[:7] for each in tmp_path.iterdir()] == ["common-"]


def test_each_user_has_a_folder_a_client_and_a_secret(spaces: UserSpaces) -> None:
    with spaces.entered(ADA) as ada, spaces.entered(BEA) as bea:
        assert ada.context.scratch != bea.context.scratch
        assert ada.context.library is not bea.context.library
        assert ada.session.form_secret != bea.session.form_secret
    with spaces.entered(ADA) as again:
        assert again is ada


def test_the_same_job_of_another_user_is_another_result(spaces: UserSpaces) -> None:
    job = {"job": "views", "paths": ["/same"]}
    folders = []
    for user in (ADA, BEA):
        with spaces.entered(user) as space:
            folders.append(space.context.queue.result("same", job, wait_s=30)["folder"])
            assert folders[-1] == str(space.context.scratch)
    assert len(set(folders)) == 2


def test_a_job_without_files_is_confined_to_a_folder_of_all_users(spaces: UserSpaces, tmp_path: Path) -> None:
    folders = []
    for user in (ADA, BEA):
        with spaces.entered(user) as space:
            folders.append(space.context.queue.result("", {"job": "catalogue"}, wait_s=30)["folder"])
    assert folders == [str(each) for each in tmp_path.glob("common-*")] * 2


def test_a_file_that_is_not_the_users_is_not_sent(queue: AnalysisQueue, worker: Worker, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "trace").write_text("x")
    (own / "link").symlink_to(other / "trace")
    analyses = UserAnalyses(queue, own, tmp_path)
    worker.value = {"path": str(own / "trace")}
    assert analyses.fresh("", {"job": "timeline", "paths": []}) == worker.value
    paths = (other / "trace", own / "link", own / "../other/trace", own, own / "none")
    for value in (*({"path": str(path)} for path in paths), {"path": 7}, {"no": "path"}, str(own / "trace")):
        worker.value = value
        with pytest.raises(AnalysisFailed, match="does not belong to its user"):
            analyses.fresh("", {"job": "timeline", "paths": []})


def test_a_user_who_asks_too_often_waits_alone(spaces: UserSpaces, clock: Clock) -> None:
    for _ in range(int(BURST)):
        with spaces.entered(ADA):
            pass
    with pytest.raises(WebError, match="too many requests"), spaces.entered(ADA):
        pass
    with spaces.entered(BEA):
        pass
    clock.now = 1.0
    with spaces.entered(ADA):
        pass


def test_of_one_user_so_many_requests_are_here_at_once(spaces: UserSpaces) -> None:
    with spaces.entered(ADA) as space:
        space.present = 16
        with pytest.raises(WebError, match="too many requests"), spaces.entered(ADA):
            pass
        space.present = 1


def test_who_waits_for_a_turn_for_too_long_is_told_to_come_again(
    spaces: UserSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_spaces, "WAIT_S", 0.001)
    with ExitStack() as here:
        for _ in range(user_spaces.MAX_RUNNING):
            here.enter_context(spaces.entered(ADA))
        with pytest.raises(WebError, match="your other pages are still being computed"), spaces.entered(ADA):
            pass
        with spaces.entered(BEA):
            pass


def test_who_was_seen_least_recently_makes_room(spaces: UserSpaces) -> None:
    users = [PageUser(user=f"user{number}") for number in range(MAX_USERS)]
    for user in (*users, users[0], ADA):
        with spaces.entered(user):
            pass
    assert list(spaces._spaces) == [*users[2:], users[0], ADA]


def test_who_was_not_seen_for_long_makes_room_and_nobody_who_is_here(spaces: UserSpaces, clock: Clock) -> None:
    with spaces.entered(ADA) as ada:
        for number in range(MAX_USERS):
            with spaces.entered(PageUser(user=f"user{number}")):
                pass
        with spaces.entered(ADA) as again:
            assert again is ada
        assert len(spaces._spaces) == MAX_USERS
    clock.now = IDLE_S + 1
    with spaces.entered(BEA):
        assert list(spaces._spaces) == [BEA]


class Daemons:
    """Stands for the daemons of these hosts: each answers with a capture until it is told not to."""

    def __init__(self) -> None:
        self.hosts = [""]
        self.content = b"x" * 700
        self.snapshot_bytes = 200

    def parts(self, capture_id: str) -> HostsFound[Any]:
        if not self.hosts:
            raise NotFound(f"there is no capture {capture_id}")
        found = capture(done_target(content=self.content))
        found.targets[0].files.append(trace_file(b"x" * self.snapshot_bytes, "memory-snapshot"))
        found.id = capture_id
        return HostsFound([OfHost(Place(host, host), found) for host in self.hosts])

    def client(self, place: Place) -> Any:
        return nullcontext(place.host)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FetchedTraces, Daemons]]:
    def fetch(client: Any, _capture: Any, _settings: Any, folder: Path) -> list[Path]:
        (folder / "trace").write_text(client)
        return [folder / "trace"]

    for name in ("fetch_trace", "fetch_snapshots"):
        monkeypatch.setattr(f"kinetoctl.web.shared.user_spaces.{name}", fetch)
    daemon = Daemons()
    traces = FetchedTraces(SETTINGS, daemon, tmp_path, 1000)  # type: ignore[arg-type]
    yield traces, daemon
    traces.close()


FIRST, SECOND = "20260101-000000-a", "20260101-000000-b"


def test_what_the_daemon_does_not_show_any_more_is_removed(
    fetched: tuple[FetchedTraces, Daemons], tmp_path: Path
) -> None:
    traces, daemon = fetched
    (path,) = traces.find(FIRST, 30).paths
    assert Path(path).is_relative_to(tmp_path)
    daemon.hosts = []
    with pytest.raises(NotFound):
        traces.find(FIRST, 30)
    assert not Path(path).exists()


def test_only_the_traces_of_the_hosts_that_answer_now_are_shown(
    fetched: tuple[FetchedTraces, Daemons], tmp_path: Path
) -> None:
    traces, daemons = fetched
    daemons.content = b"x" * 70
    for hosts in (["a", "b", "c"], ["a", "c"], ["a", "b", "c"], ["b"]):
        daemons.hosts = hosts
        found = traces.find(FIRST, 30)
        assert [Path(path).read_text() for path in found.paths] == hosts
        assert len([*tmp_path.rglob("trace")]) == len(hosts)
        assert traces.find(FIRST, 30) == found


def test_the_space_of_a_capture_is_that_of_all_its_hosts(fetched: tuple[FetchedTraces, Daemons]) -> None:
    traces, daemons = fetched
    daemons.hosts = ["a", "b"]
    with pytest.raises(Refused, match="--user-space"):
        traces.find(FIRST, 30)


def test_one_user_takes_so_much_space(fetched: tuple[FetchedTraces, Daemons]) -> None:
    traces, _ = fetched
    (first,) = traces.find(FIRST, 30).paths
    (second,) = traces.find(SECOND, 30).paths
    assert (Path(first).exists(), Path(second).exists()) == (False, True)


def test_a_capture_that_is_larger_than_all_space_is_refused(fetched: tuple[FetchedTraces, Daemons]) -> None:
    traces, _ = fetched
    traces._most_bytes = 699
    with pytest.raises(Refused, match="--user-space"):
        traces.find(FIRST, 30)


def test_snapshots_are_fetched_when_they_are_asked_for_beside_the_traces(
    fetched: tuple[FetchedTraces, Daemons], tmp_path: Path
) -> None:
    traces, daemon = fetched
    (trace,) = traces.find(FIRST, 30).paths
    assert len(list(tmp_path.iterdir())) == 1
    (snapshot,) = traces.snapshots(FIRST, 30).paths
    assert traces.snapshots(FIRST, 30).paths == (snapshot,)
    assert Path(trace).exists()
    assert Path(snapshot).is_relative_to(tmp_path)
    daemon.hosts = []
    with pytest.raises(NotFound):
        traces.snapshots(FIRST, 30)
    assert not Path(trace).exists()
    assert not Path(snapshot).exists()


def test_snapshots_take_of_the_users_space(fetched: tuple[FetchedTraces, Daemons]) -> None:
    traces, daemon = fetched
    daemon.snapshot_bytes = 400
    (trace,) = traces.find(FIRST, 30).paths
    (snapshot,) = traces.snapshots(FIRST, 30).paths
    assert (Path(trace).exists(), Path(snapshot).exists()) == (False, True)
    daemon.snapshot_bytes = 1001
    with pytest.raises(Refused, match="--user-space"):
        traces.snapshots(SECOND, 30)
