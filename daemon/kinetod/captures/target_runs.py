"""Makes the runs of a new capture: each target is recorded by its agent, or by its own libkineto."""

from collections.abc import Sequence
from functools import partial

from kinetod.attach.attach_types import Approval
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.kineto_target.kineto_run import KinetoRun
from kinetod.captures.live_capture import Running
from kinetod.captures.request.capture_spec import CaptureRequest
from kinetod.captures.request.target_resolution import Resolved
from kinetod.captures.store_shares import StoreShares
from kinetod.captures.target.services import Services
from kinetod.captures.target.source_counts import stored_bytes
from kinetod.captures.target.target_run import TargetRun
from kinetod.captures.target_interface import TracedTarget
from kinetod.store.capture_store import Store, key_of


class TargetRuns:
    """Makes runs. recorder: None if no process polls."""

    def __init__(self, store: Store, services: Services, shares: StoreShares, recorder: KinetoRecorder | None) -> None:
        self._store = store
        self._services = services
        self._shares = shares
        self._recorder = recorder

    def new(self, running: Running, request: CaptureRequest, targets: Sequence[Resolved]) -> list[TracedTarget]:
        """The runs of the targets without a problem, whose processes are busy from now on."""
        runs = []
        for number, resolved in enumerate(targets):
            if resolved.problem is None:
                run = self._run(running, request, number, resolved)
                run.attach()
                runs.append(run)
        return runs

    def _run(self, running: Running, request: CaptureRequest, number: int, resolved: Resolved) -> TracedTarget:
        capture = running.capture
        target = capture.targets[number]

        def changed() -> None:
            running.live_bytes = sum(stored_bytes(each) for each in capture.targets)
            running.watchers.changed(number)

        directory = self._store.target_dir(capture.id, key_of(target))
        check_share = partial(self._shares.check_left, capture.owner_uid, admin=running.unlimited)
        if resolved.polling is not None:
            assert self._recorder is not None and resolved.approved is not None  # else it has a problem
            return KinetoRun(
                self._services,
                self._recorder,
                capture_id=capture.id,
                target=target,
                process=resolved.polling,
                start=request.start(capture.id),
                spec=capture.spec,
                formats=request.formats,
                directory=directory,
                approval=Approval(resolved.approved, resolved.administrator),
                on_change=changed,
                check_share=check_share,
            )
        assert resolved.agent is not None  # else it has a problem
        return TargetRun(
            self._services,
            capture_id=capture.id,
            target=target,
            agent=resolved.agent,
            start=request.start(capture.id),
            formats=request.formats,
            labels=dict(capture.spec.labels),
            directory=directory,
            on_change=changed,
            check_share=check_share,
            approved=resolved.approved,
        )
