"""Creates the runs of a new capture: each target is recorded by its agent, or by its own libkineto."""

from collections.abc import Sequence
from functools import partial

from kineto_trace.base.quantities import format_size

from kinetod.attach.attach_types import Approval
from kinetod.captures.counters.capture_counters import CaptureCounters, CounterSource, file_bytes
from kinetod.captures.counters.counter_request import SamplingRequest
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.kineto_target.kineto_run import KinetoRun
from kinetod.captures.live_capture import Running, TracedTarget
from kinetod.captures.request.capture_spec import CaptureRequest
from kinetod.captures.request.target_resolution import Resolved
from kinetod.captures.store_shares import StoreShares
from kinetod.captures.target.record_spool import DiskFull, stored_bytes
from kinetod.captures.target.services import Services
from kinetod.captures.target.target_run import TargetRun
from kinetod.permissions.role_policy import Caller
from kinetod.store.capture_store import Store, key_of


class TargetRuns:
    """Creates runs. recorder: None if no process polls."""

    def __init__(self, store: Store, services: Services, shares: StoreShares, recorder: KinetoRecorder | None) -> None:
        self._store = store
        self._services = services
        self._shares = shares
        self._recorder = recorder

    def new(
        self, running: Running, request: CaptureRequest, targets: Sequence[Resolved], caller: Caller
    ) -> list[TracedTarget]:
        """Creates the runs of the targets without a problem, whose processes are busy from now on."""
        if request.counters is not None and self._services.counters is not None:
            running.counters = self._sampled(running, request.counters, self._services.counters, caller)
        runs = []
        for number, resolved in enumerate(targets):
            if resolved.problem is None:
                run = self._run(running, request, number, resolved)
                run.attach()
                runs.append(run)
        return runs

    def _sampled(
        self, running: Running, request: SamplingRequest, source: CounterSource, caller: Caller
    ) -> CaptureCounters:
        config, owner_uid = self._services.config, running.capture.owner_uid

        def check() -> None:
            try:
                self._shares.check_left(owner_uid, admin=running.unlimited)
            except DiskFull as exc:
                raise OSError(str(exc)) from exc
            if self._services.free_bytes() <= config.min_free_bytes:
                raise OSError(f"less than {format_size(config.min_free_bytes)} is free (kinetod --min-free-bytes)")

        return CaptureCounters(
            source,
            request,
            capture=running.capture,
            caller=caller,
            max_bytes=file_bytes(config.max_trace_bytes),
            check=check,
            on_change=running.watchers.renewed,
        )

    def _run(self, running: Running, request: CaptureRequest, number: int, resolved: Resolved) -> TracedTarget:
        capture = running.capture
        target = capture.targets[number]

        def changed() -> None:
            running.live_bytes = sum(stored_bytes(each) for each in capture.targets)
            running.watchers.changed(number)

        directory = self._store.target_dir(capture.id, key_of(target))
        check_share = partial(self._shares.check_left, capture.owner_uid, admin=running.unlimited)
        counters = running.counters.add(target.pid, directory) if running.counters is not None else None
        if resolved.polling is not None:
            assert self._recorder is not None and resolved.approved is not None  # otherwise it has a problem
            return KinetoRun(
                self._services,
                self._recorder,
                capture_id=capture.id,
                target=target,
                process=resolved.polling,
                start=request.recording._replace(capture_id=capture.id),
                spec=capture.spec,
                formats=request.formats,
                directory=directory,
                approval=Approval(resolved.approved, resolved.administrator),
                on_change=changed,
                check_share=check_share,
                counters=counters,
            )
        assert resolved.agent is not None  # otherwise it has a problem
        return TargetRun(
            self._services,
            capture_id=capture.id,
            target=target,
            agent=resolved.agent,
            start=request.recording._replace(capture_id=capture.id),
            formats=request.formats,
            labels=dict(capture.spec.labels),
            directory=directory,
            on_change=changed,
            check_share=check_share,
            approved=resolved.approved,
            counters=counters,
        )
