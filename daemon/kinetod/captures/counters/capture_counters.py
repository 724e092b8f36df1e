"""The hardware counters of one capture, from its beginning until the window of its last target is over.

Theory of operation
    `begin` is called when the capture begins, before the recorders are asked, and waits a bounded time for the
    sampling; the rest continues by itself. The driver reports which targets have a context on which GPU. Each of these
    GPUs is sampled if the caller may read its counters, into a file in the raw folder of each target that uses it,
    where the target's decoder finds it.

    Each target has a `TargetSampling`. When its window is over, `collected` waits a bounded time for the rows up to
    there and closes its files; `release` closes them at once. With the last one of a GPU its sampling ends.

    Every LOOK_S, and when a window is over, the driver is asked again which processes are on the GPUs
    (counter_request.AccessWatch). Another user's process ends the sampling of its GPU, and files end at the last check
    before it.

    Power, clocks and throttling of the same GPUs, for the same callers, are read at the same time into files of their
    own (counters/power); a problem with one does not affect the other. Capture.counters is about the counters.

Rules
    Counters never make a capture fail and never delay it beyond BEGIN_S, and 3 s after a window. If there are none, or
    fewer, every target that uses the GPU gets a warning with the reason, as does Capture.counters.
    Of a capture that a killed daemon left behind, `recover_counters` finds the counters in its files, without the
    samples since the last check of the processes on the GPU.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.spool.counter_samples import (
    MAX_FILE_BYTES,
    SUFFIX,
    CounterSamples,
    TargetGpus,
    cut_off,
    read_counter_samples,
    row_type,
    sample_files,
)

from kinetod.base.safe_text import clean
from kinetod.captures.counters.counter_request import (
    MAX_SAMPLES,
    SINCE,
    AccessWatch,
    GpuAccess,
    SamplingRequest,
    UsedGpu,
    why_strange,
)
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.counter_recording import CounterRecording, RecordedGpu, record_counters, refusal
from kinetod.counters.interface import CounterCode, CounterError, CounterPlan
from kinetod.counters.power.interface import MAX_FILE_BYTES as MAX_POWER_BYTES
from kinetod.counters.power.interface import POWER_SUFFIX, SET_NAME
from kinetod.counters.power.power_recording import PowerRecording, RecordedPower, record_power
from kinetod.gpus.gpu_reader import HOLDERS_DEADLINE_S, GpuReader
from kinetod.permissions.role_policy import Caller

log = logging.getLogger(__name__)

BEGIN_S = 5.0  # taking the counters takes 0.1 to 0.3 s, and a second more if kinetod-counters is not running yet
AGREED_S = 1.0  # if the first iteration has been agreed with other hosts
LEAST_LEAD_S = 0.5  # that a planned start needs after the sampling has begun
EARLY_S = 5.0  # before a planned start
COVER_S = 2.0  # rows come some 0.1 s after their time
END_S = 4.0  # after the last window is over
LOOK_S = 5.0
_LATE = "hardware counters: sampling began late; samples from the beginning may be missing"
_NONE = "hardware counters: none were sampled; "
_NO_POWER = "power and clocks: nothing was read; reading had not begun when the recording ended"
_UNANSWERED = "kinetod-counters did not respond before the recording ended"
_MAX_NOTES = 16
_INTERVALS = 3  # of samples that may be missing at the ends of a window without a warning
_MOMENT_NS = 1_000_000
_USUAL_METRICS = 8
_WHY = "the daemon ended before the sampling did (killed, crashed or stopped); later samples are missing"


def recover_counters(capture: pb.Capture, directory_of: Callable[[pb.Target], Path]) -> None:
    """Sets Capture.counters and warns the targets that have no verdict, before their files are decoded. Blocks."""
    found: dict[str, pb.RecordedCounters] = {}
    for target in capture.targets:
        if target.verdict != pb.VERDICT_UNSPECIFIED:
            continue
        directory = directory_of(target)
        for path in sample_files(directory / "raw"):
            try:
                samples, why = _permitted(path, TargetGpus.read(directory))
            except (FileError, SpoolError) as exc:
                path.unlink(missing_ok=True)
                target.warnings.append(clean(f"hardware counters: {exc}", 500))
                continue
            header = samples.header
            is_power = header.set == SET_NAME
            what = "power and clocks" if is_power else "hardware counters"
            target.warnings.append(f"{what} of GPU {header.gpu_index}: {why}")
            if is_power:
                continue
            before = found.get(header.gpu_uuid)
            if before is None or before.samples < len(samples.start_ns):
                found[header.gpu_uuid] = _recorded(samples, why)
    capture.counters.extend(sorted(found.values(), key=lambda each: (each.gpu.index, each.gpu.uuid)))


def _permitted(path: Path, gpus: TargetGpus) -> tuple[CounterSamples, str]:
    """Cuts off rows that the caller may not have. Returns the rest, and why it ends there. Raises FileError."""
    samples = read_counter_samples(path)
    until_ns = gpus.permitted_ns.get(samples.header.gpu_uuid)
    if until_ns is None or not (samples.end_ns > until_ns).any():
        return samples, _WHY
    cut_off(path, until_ns)
    return read_counter_samples(path), f"{_WHY}; {SINCE}"


def _recorded(samples: CounterSamples, why: str) -> pb.RecordedCounters:
    header = samples.header
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=header.gpu_index, uuid=clean(header.gpu_uuid, 64)),
        metrics=[
            pb.CounterMetric(name=clean(each.name, 128), label=clean(each.label, 128), unit=clean(each.unit, 32))
            for each in header.metrics
        ],
        samples=len(samples.start_ns),
        reason_code=CounterCode.FAILED,
        reason=why,
        start_ns=int(samples.start_ns[0]) if len(samples.start_ns) else 0,
        end_ns=int(samples.end_ns[-1]) if len(samples.end_ns) else 0,
    )


def metrics_of(plan: CounterPlan) -> list[pb.CounterMetric]:
    """The measured metrics."""
    return [pb.CounterMetric(name=each.name, label=each.label, unit=each.unit) for each in plan.metrics]


def left_out_metrics(plan: CounterPlan) -> list[pb.LeftOutMetric]:
    """The left-out metrics, with reasons."""
    return [pb.LeftOutMetric(name=each.name, why=each.why) for each in plan.left_out]


def recorded_counters(result: RecordedGpu, gpu: UsedGpu | None) -> pb.RecordedCounters:
    """The public result for a GPU. gpu: as known to the driver."""
    losses = result.losses
    index = result.gpu_index if result.gpu_index is not None else gpu.index if gpu is not None else 0
    return pb.RecordedCounters(
        gpu=pb.Gpu(index=index, uuid=result.gpu_uuid, name=gpu.name if gpu is not None else ""),
        metrics=metrics_of(result.plan),
        left_out=left_out_metrics(result.plan),
        samples=losses.rows,
        gaps=losses.gaps,
        lost_ns=losses.lost_ns,
        dropped_samples=losses.dropped_rows,
        reason_code=losses.code,
        reason=losses.reason,
        start_ns=result.start_ns,
        end_ns=result.end_ns,
    )


@dataclass(frozen=True, slots=True)
class CounterSource:
    """The client for sampling, the access rules, and the reader for power and clocks."""

    client: CounterClient
    access: GpuAccess
    gpus: GpuReader | None = None  # None: power and clocks are not read


class TargetSampling:
    """The counters of one target."""

    def __init__(self, owner: "CaptureCounters", pid: int, directory: Path) -> None:
        self.pid = pid
        self.directory = directory
        self.over = False
        self.left = False  # its files are closed: only then may the sampling end
        self.contexts: dict[str, str] = {}  # UUIDs and PCI addresses of the GPUs that it is on
        self.notes: list[str] = []  # why some GPUs have none
        self._owner = owner
        self._writing = threading.Lock()

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.directory / "raw"

    def note_contexts(self, gpus: Mapping[str, UsedGpu]) -> None:
        """Adds those of these GPUs that it uses."""
        self.contexts |= {uuid: gpu.pci_bus_id for uuid, gpu in gpus.items() if self.pid in gpu.pids}

    async def collected(self, start_ns: int, end_ns: int) -> list[str]:
        """Ends its files with the rows up to end_ns, or those that arrive in time. Returns warnings.

        start_ns, end_ns: the window; start_ns 0: unknown.
        """
        if self.over:
            return []
        self.over = True
        notes = [*self.notes, *await self._owner.leave(self, start_ns, end_ns)]
        notes = [clean(note, 500) for note in notes[:_MAX_NOTES]]
        if self.folder.is_dir():
            await asyncio.to_thread(self._write_notes, notes)
        return notes

    def _write_notes(self, notes: Sequence[str]) -> None:
        with self._writing, contextlib.suppress(OSError):  # the target's warnings have them, too
            self._gpus(notes).write(self.directory)

    def begun(self) -> None:
        """Creates the folder and notes the GPUs in it, for a later daemon that finds the files. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._gpus(self.notes).write(self.directory)

    def looked(self) -> None:
        """Notes the time up to which the caller may have the counters."""
        with self._writing, contextlib.suppress(OSError):  # otherwise the earlier time stays
            if not self.over:
                self._gpus(self.notes).write(self.directory)

    def _gpus(self, notes: Sequence[str]) -> TargetGpus:
        permitted_ns = {uuid: time_ns for uuid, time_ns in self._owner.permitted_ns.items() if uuid in self.contexts}
        return TargetGpus(
            contexts=tuple(self.contexts), addresses=self.contexts, permitted_ns=permitted_ns, notes=tuple(notes)
        )

    def release(self) -> None:
        """Ends its files at once, without waiting for rows."""
        if not self.left:
            self.over = self.left = True
            self._owner.let_go(self)


class CaptureCounters:
    """The counters of one capture. on_change is called when Capture.counters has changed."""

    def __init__(
        self,
        source: CounterSource,
        request: SamplingRequest,
        *,
        capture: pb.Capture,
        caller: Caller,
        max_bytes: int,
        check: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """max_bytes: of a file. check: raises OSError if nothing more may be written."""
        self._source = source
        self._request = request
        self._capture = capture
        self._caller = caller
        self._max_bytes = max_bytes
        self._check = check
        self._on_change = on_change
        self._watch = AccessWatch(source.access, caller)
        self._targets: list[TargetSampling] = []
        self._gpus: Mapping[str, UsedGpu] = {}
        self._recording: CounterRecording | None = None
        self._unanswered: Sequence[RecordedGpu] = ()  # the results while there is no recording
        self._power: PowerRecording | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._late = False  # the recorders were asked before it had begun
        self._over_s = float("-inf")  # end of the latest window
        self._told = False  # Capture.counters is final

    def add(self, pid: int, directory: Path) -> TargetSampling:
        """Adds the counters of one more target, before `begin`."""
        target = TargetSampling(self, pid, directory)
        self._targets.append(target)
        return target

    @property
    def permitted_ns(self) -> Mapping[str, int]:
        """Unix time up to which the caller may have the counters of each GPU; empty for callers who may have all."""
        return self._watch.permitted_ns

    @property
    def bytes_written(self) -> int:
        """Bytes written to all files."""
        return sum(each.bytes_written for each in (self._recording, self._power) if each is not None)

    # the beginning

    async def begin(self, start_time_ns: int, *, patience_s: float = BEGIN_S, asked_anew: bool = False) -> None:
        """Begins to sample and waits for it; not for a start that is far away. Raises nothing.

        start_time_ns: when the recorders collect or warm up, Unix time; 0: at once. asked_anew: wait for
        kinetod-counters even if it did not answer when the capture was created.
        """
        if self._request.silent and not asked_anew:
            patience_s = 0.0
        ahead_s = (start_time_ns - time.time_ns()) / 1e9 if start_time_ns else 0.0
        wait_s = max(0.0, ahead_s - EARLY_S)
        self._beginning = asyncio.create_task(self._begin_after(wait_s), name=f"counters of {self._capture.id}")
        if wait_s:
            return
        if start_time_ns:
            patience_s = max(0.0, min(patience_s, ahead_s - LEAST_LEAD_S))
        done, _ = await asyncio.wait({self._beginning}, timeout=patience_s)
        self._late = not done

    def _note_all(self, note: str) -> None:
        for target in self._targets:
            target.notes.append(note)

    async def _begin_after(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            await self._begin()
        except Exception:
            log.exception("the counters of capture %s could not be sampled", self._capture.id)
            self._note_all(f"{_NONE}an internal error of the daemon, whose log has the details")

    async def _begin(self) -> None:
        source, targets = self._source, [each for each in self._targets if not each.over]
        asked_ns = time.time_ns()
        self._gpus = await source.access.used(max_age_s=0.0)  # a process may just have appeared
        for target in targets:
            target.note_contexts(self._gpus)
            if not target.contexts:
                target.notes.append(_NONE + _no_gpu(target.pid, told=bool(self._gpus)))
        wanted = [uuid for uuid in self._gpus if any(uuid in target.contexts for target in targets)]
        strange = await source.access.strange(wanted, self._caller) if wanted else set[str]()
        refused = [self._refusal(uuid, self._not_permitted(uuid)) for uuid in wanted if uuid in strange]
        self._watch.begin((uuid for uuid in wanted if uuid not in strange), asked_ns)
        made = await asyncio.to_thread(_made, targets)
        folders = {
            uuid: [each.folder for each in targets if uuid in each.contexts and each.folder in made]
            for uuid in wanted
            if uuid not in strange
        }
        unanswered = CounterError(CounterCode.FAILED, _UNANSWERED)
        self._unanswered = [*refused, *(self._refusal(uuid, unanswered) for uuid in folders)]
        await asyncio.gather(self._begin_counters(folders, refused, targets), self._begin_power(folders))
        if folders and self._watch.matters and not all(each.over for each in targets):
            self._looking = asyncio.create_task(self._look(), name=f"GPUs of {self._capture.id}")

    async def _begin_counters(
        self,
        folders: Mapping[str, Sequence[Path]],
        refused: Sequence[RecordedGpu],
        targets: Sequence[TargetSampling],
    ) -> None:
        recording = await record_counters(
            self._source.client,
            folders,
            self._request.wanted,
            self._request.interval_ns,
            max_bytes=self._max_bytes,
            check=self._check,
        )
        self._recording = recording
        recording.refused = (*refused, *recording.refused)
        for result in recording.refused:
            self._refuse(result, targets)
        for target in targets:
            if target.over:
                recording.let_go(target.folder)
        self._show(recording.results())

    async def _begin_power(self, folders: Mapping[str, Sequence[Path]]) -> None:
        """Starts reading power and clocks, which no counters can block."""
        if folders and self._source.gpus is not None:
            limit = min(self._max_bytes, MAX_POWER_BYTES)
            self._power = await record_power(self._source.gpus, folders, max_bytes=limit)

    def _refusal(self, uuid: str, error: CounterError) -> RecordedGpu:
        return refusal(uuid, error, self._gpus[uuid].index)

    def _not_permitted(self, uuid: str) -> CounterError:
        return CounterError(CounterCode.NOT_PERMITTED, why_strange(self._caller, self._gpus[uuid].index))

    def _refuse(self, result: RecordedGpu, targets: Sequence[TargetSampling]) -> None:
        for target in targets:
            if result.gpu_uuid in target.contexts:
                target.notes.append(self._about(result.gpu_uuid, f"none were sampled: {result.losses.reason}"))

    def _about(self, uuid: str, text: str, what: str = "hardware counters") -> str:
        gpu = self._gpus.get(uuid)
        return f"{what} of GPU {gpu.index if gpu is not None else uuid}: {text}"

    def _show(self, results: Sequence[RecordedGpu]) -> None:
        if self._told:
            return
        shown = [recorded_counters(each, self._gpus.get(each.gpu_uuid)) for each in results]
        del self._capture.counters[:]
        self._capture.counters.extend(sorted(shown, key=lambda each: (each.gpu.index, each.gpu.uuid)))
        self._on_change()

    async def _look(self) -> None:
        """Ends the sampling of a GPU on which another user's process has appeared."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._seen()
            await asyncio.to_thread(_note_looked, self._targets)

    async def _seen(self) -> Mapping[str, UsedGpu]:
        """Checks which processes are on the GPUs, and ends refused samplings. Returns every visible GPU. Raises
        nothing.
        """
        used: Mapping[str, UsedGpu] = {}
        try:
            async with asyncio.timeout(HOLDERS_DEADLINE_S):
                used = await self._watch.look([each.pid for each in self._targets])
        except TimeoutError:
            log.warning("the driver did not report in time who uses the GPUs of capture %s", self._capture.id)
        except Exception:
            log.exception("cannot determine who uses the GPUs of capture %s", self._capture.id)
        self._end_refused()
        return used

    def _end_refused(self) -> None:
        for uuid, reason in self._watch.refused.items():
            for each in (self._recording, self._power):
                if each is not None:
                    each.end_gpu(uuid, CounterError(CounterCode.NOT_PERMITTED, reason))

    # the end

    async def leave(self, target: TargetSampling, start_ns: int, end_ns: int) -> list[str]:
        """Ends the files of a target with the rows up to end_ns. Returns warnings. See TargetSampling."""
        self._over_s = time.monotonic()
        recording, power = self._recording, self._power
        power_was_late = power is None and self._source.gpus is not None and self._still_beginning() is not None
        counters_left, power_left, _ = await asyncio.gather(
            recording.leave(target.folder, end_ns, COVER_S) if recording is not None else _nothing(),
            power.leave(target.folder, end_ns, COVER_S) if power is not None else _nothing(),
            self._look_at_end(target),
        )
        await asyncio.to_thread(self._cut_off, target.folder)
        target.left = True
        self._end_if_last()
        return [
            *self._missing_counters(target, counters_left, start_ns, end_ns),
            *([_NO_POWER] if power_was_late else self._missing(power_left, start_ns, end_ns, "power and clocks")),
        ]

    async def _look_at_end(self, target: TargetSampling) -> None:
        """Notes the GPUs on which the process has a context by now: its only GPU must stay the only one to the end."""
        used = await self._seen()
        self._watch.refuse(gpu for uuid, gpu in self._gpus.items() if uuid in target.contexts and uuid not in used)
        self._end_refused()
        target.note_contexts(used)

    def _cut_off(self, folder: Path) -> None:
        """Leaves the rows of GPUs that the caller may not have any more out of the folder's files."""
        for uuid in self._watch.refused:
            for suffix in (SUFFIX, POWER_SUFFIX):
                path = folder / f"{uuid}{suffix}"
                try:
                    cut_off(path, self._watch.permitted_ns[uuid])
                except FileError:  # it does not exist, has no row yet, or the disk is full
                    path.unlink(missing_ok=True)

    def _missing_counters(
        self, target: TargetSampling, left: Sequence[RecordedGpu], start_ns: int, end_ns: int
    ) -> list[str]:
        recording = self._recording
        if recording is None:
            return [] if target.notes else [f"{_NONE}sampling had not begun when the recording ended"]
        if not left and any(uuid in recording.gpus for uuid in target.contexts):
            return ["hardware counters: not all samples could be written to disk"]
        late = [_LATE] if left and self._late and not start_ns else []
        return [*late, *self._missing(left, start_ns, end_ns, "hardware counters")]

    def _missing(self, left: Sequence[RecordedGpu | RecordedPower], start_ns: int, end_ns: int, what: str) -> list[str]:
        missing = []
        for result in left:
            refused = self._watch.refused.get(result.gpu_uuid, "")
            uncovered = "" if refused or result.losses.code else _uncovered(result, start_ns, end_ns)
            texts = [refused or result.losses.reason, uncovered]
            missing += [self._about(result.gpu_uuid, text, what) for text in texts if text]
        return missing

    def let_go(self, target: TargetSampling) -> None:
        """Ends the files of a target at once."""
        self._over_s = time.monotonic()
        if self._recording is not None:
            self._recording.let_go(target.folder)
        self._end_if_last()

    def _end_if_last(self) -> None:
        if self._stopping is None and all(each.left for each in self._targets):
            self._stopping = asyncio.create_task(self._stop(), name=f"end of the counters of {self._capture.id}")

    def _still_beginning(self) -> asyncio.Task[None] | None:
        return None if self._beginning is None or self._beginning.done() else self._beginning

    async def _stop(self) -> None:
        if (beginning := self._still_beginning()) is not None:
            beginning.cancel()  # nobody needs samples from now on
            await asyncio.wait({beginning})
            if self._recording is None:
                self._show(self._unanswered)
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(self._stop_counters(), self._stop_power())

    async def _stop_counters(self) -> None:
        if self._recording is not None:
            results = await self._recording.stop()
            self._recording.close()
            self._show(results)

    async def _stop_power(self) -> None:
        if self._power is not None:
            await self._power.stop()

    async def ended(self) -> None:
        """Waits, once all targets have their verdicts, until Capture.counters is complete. Raises nothing."""
        for target in self._targets:
            target.release()
        if self._stopping is not None:
            left_s = max(0.0, self._over_s + END_S - time.monotonic())
            done, _ = await asyncio.wait({self._stopping}, timeout=left_s)
            if not done:
                self._show(self._recording.results() if self._recording is not None else self._unanswered)
        self._told = True

    def abandon(self) -> None:
        """Ends everything without waiting, because the daemon stops."""
        for task in (self._beginning, self._looking, self._stopping):
            if task is not None:
                task.cancel()
        if self._power is not None:
            self._power.abandon()
        if self._recording is not None and self._stopping is None:
            self._recording.abandon()


async def _nothing() -> list[Any]:
    return []


def _no_gpu(pid: int, *, told: bool) -> str:
    if told:
        return f"according to the driver, process {pid} has no context on any GPU"
    return f"the driver did not respond or reports no GPU, so the GPU of process {pid} is unknown"


def _uncovered(result: RecordedGpu | RecordedPower, start_ns: int, end_ns: int) -> str:
    """Describes the part of the window without samples at its ends; empty: none."""
    tolerance_ns = max(_INTERVALS * result.interval_ns, _MOMENT_NS)
    if not result.start_ns:
        return "there are no samples"
    late_ns, early_ns = result.start_ns - start_ns if start_ns else 0, end_ns - result.end_ns
    texts = [
        f"samples of the first {format_duration(late_ns)} are missing" if late_ns > tolerance_ns else "",
        f"samples of the last {format_duration(early_ns)} are missing" if early_ns > tolerance_ns else "",
    ]
    return "; ".join(filter(None, texts))


def _note_looked(targets: Sequence[TargetSampling]) -> None:
    for target in targets:
        target.looked()


def _made(targets: Sequence[TargetSampling]) -> set[Path]:
    """The folders that could be created."""
    made = set[Path]()
    for target in targets:
        try:
            target.begun()
            made.add(target.folder)
        except OSError as exc:
            target.notes.append(f"{_NONE}writing failed ({exc.strerror}): {target.folder}")
    return made


def file_bytes(max_trace_bytes: int) -> int:
    """The size limit of a file: MAX_SAMPLES of the usual metrics; fewer samples if there are more metrics."""
    return min(max_trace_bytes, MAX_FILE_BYTES, MAX_SAMPLES * row_type(_USUAL_METRICS).itemsize)
