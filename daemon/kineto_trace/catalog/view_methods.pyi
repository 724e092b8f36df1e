"""All views as functions whose arguments are their options.

`make views` makes this file from the code, and a test checks that it is current.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from inspect import Signature
from typing import Literal

from kineto_trace.catalog.view_runner import Paths
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View

Sources = Paths | Context | Trace | Iterable[Paths]

class Views:
    """All analyses: `views.NAME(sources, option=value, …)` runs one, `views()` returns all of them by name.

    sources, executor and the errors of each function are those of run_view().
    """

    def __call__(self) -> Mapping[str, View]:
        """Returns all analyses by name, sorted by name."""

    def annotation_counters(
        self,
        sources: Sources,
        *,
        counter: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by user annotation, for the GPU work launched in it, nested annotations excluded.

        Same rules and options as kernel_counters.

        Columns: rank, name, device, time_us, shared_pct, counter, unit, value, error, residual, method, why.
        """

    def annotation_latency(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The latency of each annotation, such as an inference request or batch, by percentile; the slowest come first.

        Latency is the time from the start of the annotation to its end on the host, or to the end of the last GPU activity
        launched in it, whichever is later. Names that differ only in a trailing #number, such as those of steps, share
        a row. Percentiles between two values are interpolated: with fewer than 100 values, the 99th is close to the
        longest.

        Columns: rank, name, count, p50_us, p90_us, p95_us, p99_us, p99_9_us, max_us, mean_host_us, mean_gpu_us.
        """

    def blocked_on_full_queue(
        self,
        sources: Sources,
        *,
        max_queue_length: int = 1024,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How long the queue of each stream was full, so that the next launch would have blocked.

        Streams whose queue was never full have no row.

        Options:
        - max_queue_length: the length at which a queue counts as full.

        compat=hta: the figures of get_time_spent_blocked_on_full_queue: only the last such stream of each rank.

        Columns: rank, device, stream, blocked_us, blocked_pct.
        """

    def call_tree(
        self,
        sources: Sources,
        *,
        python: bool = False,
        max_depth: int = 0,
        executor: Executor | None = None,
    ) -> Result:
        """Operators and annotations of all threads merged by call path: equal chains of names form one row.

        All training steps count as one, "ProfilerStep". Rows are ordered from the outside in; siblings are ordered by
        device time, then host time, largest first.

        Options:
        - python: include Python functions (recorded calls, not samples).
        - max_depth: the number of levels to show; 0 shows all.

        Columns: rank, path, name, kind, depth, calls, host_total_us, host_self_us, device_total_us, device_self_us.
        """

    def child_processes(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What each child process used, such as the workers of a DataLoader; those with the largest share of a CPU first.

        A worker near 100 % is busy: more workers would deliver more, if there are free cores. A worker that neither runs
        nor waits for a CPU is waiting for storage, for work, or for the process to take its output. Children that lived for
        less than half a second may be missing.

        Columns: rank, pid, name, seconds, cpu_pct, cpu_wait_pct, major_faults, read_bytes.
        """

    def collective_counters(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What the collectives of one rank move over NVLink and PCIe, and their bus bandwidth, by kind and size.

        Values are computed as in the view kernel_counters, but only collectives count as work, because other kernels hardly
        use NVLink. A ring sends about as many bytes over NVLink as the bus bandwidth implies (nvlink_pct near 100), an
        all_reduce inside the switch (NVLS) about half. If nvlink_pct is lower, the data goes over PCIe or the network, or
        ranks wait.

        Columns: rank, collective, process_group, group_size, bytes, device, calls, time_us, busbw_gb_s,
        nvlink_received_gb_s, nvlink_sent_gb_s, nvlink_pct, pcie_read_gb_s, pcie_write_gb_s, why.
        """

    def collective_summary(
        self,
        sources: Sources,
        *,
        align: Literal["auto", "clock", "collectives"] = "auto",
        sizes: Literal["exact", "log2", "all"] = "exact",
        groups: Literal["alike", "each"] = "alike",
        executor: Executor | None = None,
    ) -> Result:
        """The collectives of the view `collectives` grouped by kind, process group, size and type.

        Rows are sorted by the sum of the transfer times.

        Options:
        - sizes: which sizes share a row: "exact" (equal sizes), "log2" (from one power of two to just below the next, the
          steps of nccl-tests) or "all". Where a row covers several sizes, bytes is their mean.
        - groups: "alike" puts process groups with the same description and size into one row, for example all
          tensor-parallel groups; "each" keeps them apart.
        - align: as in the view `collectives`.

        Columns: collective, process_group, group_description, group_size, dtype, bytes, calls, total_us, mean_us,
        min_us, max_us, wait_us, algbw_gb_s, busbw_gb_s, max_busbw_gb_s, mean_start_skew_us, max_start_skew_us,
        skew_uncertainty_us, last_rank, last_rank_pct, compute_pct.
        """

    def collectives(
        self,
        sources: Sources,
        *,
        align: Literal["auto", "clock", "collectives"] = "auto",
        executor: Executor | None = None,
    ) -> Result:
        """Every NCCL or RCCL collective over all ranks, in order of time.

        Collectives are matched across ranks by process group and sequence number. The transfer time is the shortest
        duration over all ranks, because the durations of the others include waiting for the last rank. Bandwidths follow
        nccl-tests: algbw = size / time, busbw = algbw x 2(n-1)/n (all_reduce), (n-1)/n (all_gather, reduce_scatter,
        all_to_all, gather, scatter), 1 (others). Where the ranks' sizes differ (gather, scatter), the largest one counts.
        Traces do not show which algorithm and protocol NCCL chose: RING_LL in the name of a kernel does not indicate it.

        Options:
        - align: how the clocks of the ranks are compared. "auto" uses the measured offsets in the traces, refined by
          collectives (docs/analysis.md, "Several ranks in one file"), and the ends of collectives for ranks whose offset is
          unknown; "clock" uses only the measured offsets; "collectives" uses only the ends of collectives.

        Columns: collective, process_group, group_description, group_size, dtype, bytes, sequence, ranks_seen, start_ns,
        duration_us, transfer_us, algbw_gb_s, busbw_gb_s, start_skew_us, end_skew_us, skew_uncertainty_us, last_rank,
        compute_pct.
        """

    def comm_comp_overlap(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How much of the communication time of each GPU overlaps with computing kernels.

        Communication kernels are recognized by their names (such as nccl or rccl).

        compat=hta: the figures of get_comm_comp_overlap.

        Kernel types follow HTA's patterns, which miss ncclDevKernel in the middle of a name and match all names that begin
        with hip. Without GPU events there is one row with zeros, as in HTA.

        Columns: rank, device, communication_us, overlapped_us, overlap_pct.
        """

    def counter_curves(
        self,
        sources: Sources,
        *,
        max_points: int = 1000,
        executor: Executor | None = None,
    ) -> Result:
        """The hardware counters measured in percent, over time: one curve for each GPU and counter.

        Options:
        - max_points: the maximum number of rows per curve, as in the view counters. 0 keeps all.

        Columns: rank, device, counter, time_ns, value_pct.
        """

    def counter_summary(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Each counter of the trace in one row: its mean over time, its extremes and its last value.

        A value holds until the next one, and the last one until the end of the recording. Samples from before the recording
        window count from its beginning.

        Columns: rank, counter, unit, samples, mean, min, max, last.
        """

    def counters(
        self,
        sources: Sources,
        *,
        max_points: int = 0,
        executor: Executor | None = None,
    ) -> Result:
        """Every counter in the trace over time: hardware, Linux kernel, allocator, and any others in a trace file.

        The value of a hardware counter is the mean of the sample that begins at the time of the row; a missing value means
        that no sample followed. The Linux kernel's counters are rates per second over the interval that begins at the time
        of the row. In a file, hardware counters may extend beyond the recording window. Those samples have rows, too; the
        last one before the window holds at its beginning.

        Options:
        - max_points: the maximum number of rows per counter; the rows that show the shape of the curve best are kept
          (largest triangle three buckets). 0 keeps all.

        Columns: rank, counter, unit, time_ns, time_us, value.
        """

    def counters_with_operators(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The counters measured by CUPTI's range profiler: one row per range and counter, with the launching operators.

        While ranges are profiled, kernels run one after another and are not recorded themselves. The n-th range by time
        (category cuda_profiler_range) therefore belongs to the n-th call of cudaLaunchKernel….

        compat=hta: the figures of get_cupti_counter_data_with_operators: the same, but without the last step.

        Columns: rank, kernel, start_ns, duration_us, op_stack, top_op, bottom_op, counter, value, flop.
        """

    def critical_path(
        self,
        sources: Sources,
        *,
        annotation: str = "ProfilerStep",
        instance: int | str | tuple[int, int] | None = None,
        data_loading: Sequence[str] = ('^enumerate\\(Data(Loader|Pipe)\\)#',),
        infer: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The chain of events that determined the length of a window, edge by edge in order of time.

        The path is traced backwards from the end of the window. Each event was held up by the last of the things that it
        had to wait for: the event before it on its thread or stream, its launch, a synchronisation, the thread of the
        backward pass, the runtime's lock. The durations therefore add up to the length of the window. Shortening an event
        that is not on the path does not shorten the window.

        Options:
        - annotation: the window spans all annotations whose names contain this text; "" means the whole trace. It ends with
          the annotation, or with the last GPU activity launched in it if that is later.
        - instance: only the n-th of these annotations, counted from 0, or a range such as "2:4" (both ends included).
        - data_loading: patterns (regular expressions) for the names of annotations and operators that load data.
        - infer: without cuda_sync records, infer from times what each call waited for.

        compat=hta: the graph and the longest path of HTA's critical_path_analysis (version 0.6.1).

        Times are rounded to whole microseconds. The time between outermost operators and inside synchronising calls has
        no weight, launch delays count only where the queue was empty, and kernel-kernel delays only below 1500 us. As in
        HTA, `instance` defaults to the first one, and `data_loading` has no effect unless it is given. Where HTA fails on
        a trace, a note says so and the path is the exact one.

        Columns: rank, position, start_us, duration_us, edge, bound_by, name, category, op, thread, device, stream,
        inferred.
        """

    def critical_path_breakdown(
        self,
        sources: Sources,
        *,
        annotation: str = "ProfilerStep",
        instance: int | str | tuple[int, int] | None = None,
        data_loading: Sequence[str] = ('^enumerate\\(Data(Loader|Pipe)\\)#',),
        infer: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The time of the critical path by what bounds it. Same options and rules as the view critical_path.

        If the trace has no GPU activity, the contribution of GPUs is missing, not zero.

        compat=hta: the figures of CPGraph.summary().

        Copies and fills count as gpu_compute_bound, and edges without a weight (dependency, sync_dependency) are left out.

        Columns: rank, bound_by, time_us, share_pct, edges.
        """

    def cuda_graphs(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The CUDA graphs that were launched, longest total GPU time first.

        A launch runs everything that was captured into the graph, with one call. Launches of one graph from different
        operators have separate rows. A graph is identified by its id; in traces without such ids, launches are grouped by
        the kernels that they ran. The view `graph_operators` lists the operators whose work was captured.

        Columns: rank, graph, device, launched_by, launches, kernels, copies_and_fills, call_us, gpu_us, span_us,
        total_us, share_pct, top_kernel, operators, operators_pct.
        """

    def data_loading(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """How long the DataLoader blocks the training thread, and why: its own work, or waiting for workers.

        Worker processes are not in the trace of the training process: each has a trace of its own. Loading that does not
        use torch's DataLoader, such as an iterator in the program's own code, is not recognized; see the view hot_lines.

        Columns: rank, what, function, file, time_us, per_step_us, share_pct, idle_pct, moments.
        """

    def diff_call_paths(
        self,
        sources: Sources,
        *,
        total: bool = False,
        executor: Executor | None = None,
    ) -> Result:
        """Call paths of two traces: time per step of operators and annotations in each chain of calls, and what changed.

        The names in a path are separated by " > "; paths are those of the view `call_tree`. Times are self times. Same
        rules as diff_step_times. Changed rows come first, largest difference first.

        Options:
        - total: include nested calls.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per.
        """

    def diff_event_names(
        self,
        sources: Sources,
        *,
        device: Literal["all", "cpu", "gpu"] = "all",
        step: int | None = None,
        short_names: bool = False,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """All events of two traces by name: their count, their total time, and what changed.

        Options:
        - device: "cpu" for operators, annotations and calls; "gpu" for kernels, copies and fills; "all" for both.
        - step: only events that began in this training step (N of ProfilerStep#N); GPU work belongs to the step of the call
          that launched it. Without this option, all events count.
        - short_names: drop template arguments, parameters and return types of kernels, so that variants of a kernel share a
          row (HTA's use_short_name).

        compat=hta: the figures of TraceDiff.compare_traces and TraceDiff.ops_diff.

        All rows that HTA keeps count, including Python functions (and here those of the last step), with HTA's rounding.
        Without `step` it compares the first step.

        Columns: name, change, calls_baseline, calls_other, calls_delta, total_baseline_us, total_other_us,
        total_delta_us, total_delta_pct.
        """

    def diff_kernel_names(
        self,
        sources: Sources,
        *,
        short_names: bool = False,
        executor: Executor | None = None,
    ) -> Result:
        """Kernels, copies and fills of two traces by name: their GPU time per step, and what changed.

        A kernel belongs to the step in which it was launched. Same rules as diff_step_times. Changed rows come first,
        largest difference first.

        Options:
        - short_names: drop template arguments, parameters and return types, so that variants of a kernel share a row.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per.
        """

    def diff_modules(
        self,
        sources: Sources,
        *,
        total: bool = False,
        executor: Executor | None = None,
    ) -> Result:
        """Modules of two traces by their path in the model: their self time per step, and what changed.

        Times of a module exclude nested modules. The backward pass of a module (the backward operators of its operators)
        has a row of its own, whose name ends in " (backward)". Same rules as diff_step_times. Changed rows come first,
        largest difference first.

        Options:
        - total: include nested modules.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per.
        """

    def diff_operators(
        self,
        sources: Sources,
        *,
        total: bool = False,
        executor: Executor | None = None,
    ) -> Result:
        """Operators of two traces by name: their self time per step, and what changed.

        Host time excludes nested operators; GPU time is that of the work that the operator itself launched. The columns
        `total_…` include nested operators, but an operator nested in one of the same name counts only once. GPU work
        launched outside any operator counts for the annotation around its launch. Same rules as diff_step_times. Changed
        rows come first, largest difference first.

        Options:
        - total: include nested operators in all columns.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per, total_verdict, total_baseline_us, total_other_us,
        total_delta_us, total_delta_pct.
        """

    def diff_python_functions(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Python functions of two traces: time per step in which each was the innermost function, and what changed.

        C code called by a function counts for that function. Functions are matched by file and name, regardless of line and
        folder. Sampled time is the number of samples times the sampling interval, waiting included. Same rules as
        diff_step_times. Changed rows come first, largest difference first.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per.
        """

    def diff_step_times(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The time of a training step in two traces, and which parts of it changed.

        The first row is the whole step on the host. Below it are the roles of the view `step_breakdown`, which add up to
        it. All views that compare traces use only the measured steps (see the view overview). The verdict separates real
        differences from noise between steps: at most 5 % of the rows reported as changed differ only by chance, and the
        interval of such a row excludes 0. Two recordings of the same program may still differ because of clocks, placement
        or other programs, since the noise is measured within each recording.

        Columns: name, time, verdict, baseline_us, other_us, delta_us, delta_pct, delta_low_us, delta_high_us,
        step_delta_pct, calls_baseline, calls_other, p_value, per.
        """

    def diff_tree(
        self,
        sources: Sources,
        *,
        path: str = "0",
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The matched modules of two traces: the node at `path` in the first row, then its children in order.

        Steps, modules, their backward passes, optimizer steps and data loading are matched by kind and name in order, as in
        the diff view of the TensorBoard profiler plug-in; everything between them is grouped. Times are sums over all
        steps. Only the first thread counts. GPU time counts for the node that launched the work.

        Options:
        - path: the node, as in the column `path`: 0 is the root, 0-2 its child 2.

        compat=plugin: the diff view of the TensorBoard profiler plug-in, which assigns GPU time by external ids.

        Columns: path, depth, name, name_baseline, name_other, children, total_baseline_us, total_other_us,
        total_delta_us, total_delta_pct, host_baseline_us, host_other_us, host_delta_us, host_delta_pct,
        device_baseline_us, device_other_us, device_delta_us, device_delta_pct, accumulated_baseline_us,
        accumulated_other_us, accumulated_delta_us.
        """

    def diff_tree_operators(
        self,
        sources: Sources,
        *,
        path: str = "0",
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The operators inside one node of the view diff_tree in two traces, by name: sums over all steps.

        Rows are sorted by difference in GPU time, then in host time; the largest come first.

        Options:
        - path: the node, as in the column `path` of diff_tree: 0 is the root, 0-2 its child 2.

        compat=plugin: the diff view of the TensorBoard profiler plug-in, which assigns GPU time by external ids.

        Columns: name, change, calls_baseline, calls_other, calls_delta, device_total_baseline_us,
        device_total_other_us, device_total_delta_us, device_total_delta_pct, device_self_baseline_us,
        device_self_other_us, device_self_delta_us, device_self_delta_pct, host_total_baseline_us, host_total_other_us,
        host_total_delta_us, host_total_delta_pct, host_self_baseline_us, host_self_other_us, host_self_delta_us,
        host_self_delta_pct.
        """

    def distributed_devices(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The GPUs that each rank used, with their machine and process.

        compat=plugin: the figures of the TensorBoard profiler plug-in.

        Only GPUs whose properties are in the file are listed. For files of a TensorBoard log folder
        ("<machine>_<process id>.pt.trace.json"), machine and process come from the file name; other names count as
        machines, whose processes are numbered from 0.

        Columns: rank, host, process, device, name, memory_bytes, compute_capability.
        """

    def distributed_ops(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The collectives of each rank by name: number of calls, bytes, time, and how much of the time was transfer.

        Times are those of the kernels. Sizes come from the arguments that PyTorch records with them.

        compat=plugin: the figures of the TensorBoard profiler plug-in.

        Only the operators nccl:… and gloo:… broadcast, reduce, all_reduce, all_gather and reduce_scatter count, with their
        own time on the host too. Bytes are the elements of their inputs times 8 (long), 4 (float, int), 2 (Half,
        BFloat16), 1 (uchar) or 0. Collectives are matched by their order, and averages are rounded.

        Columns: rank, name, calls, total_bytes, avg_bytes, total_us, avg_us, transfer_us, avg_transfer_us.
        """

    def distributed_overlap(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How much of each step every rank spent on computation, on communication, and on both at the same time.

        A step ends with the last GPU activity that it launched. Communication kernels are recognized by their names; a rank
        without such kernels communicates while operators such as gloo:all_reduce run. For ranks without any GPU activity,
        computation is missing, not zero.

        compat=plugin: the figures of the TensorBoard profiler plug-in.

        Communication is everything with the external id of one of ten operators, and the time of these operators
        themselves on the host. The row "all" is in whole microseconds. There is no result unless every rank has the same
        number of these operators.

        Columns: step, rank, computation_us, overlapping_us, communication_us, other_us.
        """

    def distributed_wait(
        self,
        sources: Sources,
        *,
        align: Literal["auto", "clock", "collectives"] = "auto",
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How much of its communication time each rank spent waiting for the others.

        Collectives are matched across ranks by process group and sequence number. The shortest duration of a collective is
        its transfer; the rest of a rank's duration is waiting. Overlapping collectives of a rank count once. As in
        distributed_overlap, a step ends with the last GPU activity that it launched; everything until then counts.

        Options:
        - align: has no effect on durations; see the view `collectives`.

        compat=plugin: the figures of the TensorBoard profiler plug-in.

        Collectives are matched by their order, only ten operators count, and an operator's own time on the host counts like
        a kernel. The step "" is for collectives outside of steps; the row "all" is in whole microseconds.

        Columns: step, rank, transfer_us, synchronizing_us.
        """

    def event_selection(
        self,
        sources: Sources,
        *,
        kind: Sequence[str] = (),
        name: str = "",
        iteration: Sequence[int] = (),
        iteration_index: Sequence[int] = (),
        start_us: float | None = None,
        end_us: float | None = None,
        min_us: float = 0,
        stream: Sequence[int] = (),
        where: Literal["under", "before", "after"] = "under",
        op: str = "",
        position: int = 0,
        with_kernels: bool = False,
        limit: int = 1000,
        executor: Executor | None = None,
    ) -> Result:
        """The events that meet all conditions, ordered by start. Without conditions, all events.

        HTA's filters correspond to options: IterationFilter (iteration), IterationIndexFilter and FirstIterationFilter
        (iteration_index=0), TimeRangeFilter (start_us, end_us), NameFilter (name), GPUKernelFilter (kind=gpu),
        CPUOperatorFilter (kind=cpu), MemCopyEventFilter (kind=gpu_memcpy with a name), ZeroDurationFilter (min_us=0.001),
        UnderOperatorFilter, BeforeOperatorFilter and AfterOperatorFilter (op, where, position). For CompositeFilter and
        CombinedOperatorFilter, give several conditions; for RankFilter, select the traces. For QueryFilter, use SQL: SELECT
        … FROM kernel WHERE …, with all columns of each kind of event.

        Options:
        - kind: kinds of events; gpu or cpu selects all kinds on that side.
        - name: a regular expression that must match at the beginning of the name.
        - iteration: numbers of steps.
        - iteration_index: positions of steps in the trace, 0 for the first.
        - start_us: only events that start at this time or later, relative to the beginning of the trace.
        - end_us: only events that end at this time or earlier, relative to the beginning of the trace.
        - min_us: the minimum duration.
        - stream: numbers of GPU streams.
        - op: an operator or annotation with exactly this name; events are selected by their time relative to it.
        - where: "under" selects the host events during that operator, "before" those that ended before it, "after" those
          that started after it.
        - position: which run of that operator, 0 for the first, -1 for the last.
        - with_kernels: also list the GPU work that the selected calls launched.
        - limit: the maximum number of events to list; 0 lists all.

        Columns: rank, kind, name, iteration, start_ns, time_us, duration_us, thread, device, stream, op.
        """

    def findings(
        self,
        sources: Sources,
        *,
        top: int = 10,
        executor: Executor | None = None,
    ) -> Result:
        """What to change first, with the time that each change would save and the evidence.

        The view looks for GPU idle time by cause (view time_causes; Python functions, annotations and operators by name),
        threads that are short of CPU, communication and copies that no computation hides, other programs that take turns on
        the GPU, models that run without a backward pass in a training program, layout changes of images, matrix products
        without tensor cores, double precision, elementwise kernels that could be fused, many small kernels of one function
        or of the optimizer, and kernels that leave part of the GPU idle. With hardware counters (kinetoctl trace
        --counters), which take precedence over estimates, it also finds kernels that are bound by memory, tensor cores or
        latency, and clocks that are held down. The savings of functions, waits, allocations and small kernels come from
        replaying the steps on the host and the GPU without them; other savings never exceed the time that view time_causes
        assigns to their cause. All are shares of the time that the steps take when they are not recorded, if that is known.
        The advice suits the GPUs of the trace. Atypical first steps, and findings that would save less than half a per
        cent, are left out; findings whose possible saving is unknown come last. Without a GPU, the view looks for time that
        the host loses: in the program's own functions, in data loading, in the optimizer, and in threads that compete for
        the GIL or the CPUs. If nothing moves, the view only shows where the program waits.

        Options:
        - top: the maximum number of findings.

        Columns: rank, place, finding, title, saving_us, saving_pct, saving_per_step_us, uncertainty_pct, advice,
        evidence, op, call_stack, kernels, where, guess.
        """

    def flame_graph(
        self,
        sources: Sources,
        *,
        of: Literal["python", "ops", "kernels", "modules", "modules_gpu"] = "ops",
        thread: int | None = None,
        step: int | None = None,
        idle: bool = False,
        least: float = 0.0,
        executor: Executor | None = None,
    ) -> Result:
        """Merged stacks, as flame graphs draw them: equal stacks form one row, and those with the most time come first.

        Time is counted once: the time of a frame's callees is in the rows of their stacks, so the rows sum to 100 %. All
        training steps share the name "ProfilerStep".

        Options:
        - of: "ops" for operators and annotations by their time on the host; "python" for Python functions, by samples and
          line where stacks were sampled, otherwise by the time of calls; "kernels" for GPU work below the frames that
          launched it; "modules" for modules by their time on the host, "modules_gpu" by the GPU time launched in them.
        - thread: id of the only thread to include; for kernels, the thread that launched them.
        - step: number of the only step to include (N of ProfilerStep#N); kernels belong to the step of their launch.
        - idle: also count samples in which a thread was idle.
        - least: stacks with less than this share (in %) are combined into one row.

        Columns: rank, stack, name, kind, self_us, self_pct, samples, stacks.
        """

    def flops_utilization(
        self,
        sources: Sources,
        *,
        peak: float = 0.0,
        executor: Executor | None = None,
    ) -> Result:
        """How much of the GPU's peak the model used (model FLOPs utilization, MFU).

        Operations are those of `operator_flops`: matrix products, convolutions and attention that ran, including those
        recomputed by activation checkpointing.

        Options:
        - peak: the peak of the GPU in TFLOP/s, for all precisions; 0: from the GPU's data sheet.

        Columns: rank, gpu, time_us, work_tflop, speed_tflop_s, precision, peak_tflop_s, utilization_pct, known_pct.
        """

    def frequent_sequences(
        self,
        sources: Sources,
        *,
        op: str = "aten::",
        min_pattern_len: int = 3,
        top_k: int = 5,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The most frequent sequences of GPU activities launched by the runs of an operator.

        A run counts if no other matching run encloses it on its thread. Its activities are those launched on its thread
        while it runs, in order of their starts.

        Options:
        - op: operators, annotations and Python functions whose names contain this text match.
        - min_pattern_len: the minimum number of activities in a sequence.
        - top_k: the number of sequences to list; 0 lists all.

        compat=hta: the figures of get_frequent_cuda_kernel_sequences.

        All sequences are listed (HTA uses top_k only for its pictures). Of the events whose names match, only those at the
        smallest depth of their call stack count. Activities of the backward thread can belong to annotations of the other
        thread. Stream 0 does not count; synchronisations do. If HTA fails, the figures are the exact ones (of all
        sequences).

        Columns: rank, pattern, length, count, gpu_us, cpu_us.
        """

    def gpu_annotations(
        self,
        sources: Sources,
        *,
        on: Literal["gpu", "cpu"] = "gpu",
        duration_ratio: float = 0.8,
        num_kernels: int = 1000,
        allowlist: Sequence[str] = (),
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The annotations that take the most time; all others share one row.

        On the GPU, an annotation lasts on each stream from the start of the first activity launched in it to the end of the
        last one. Nested annotations each count in full.

        Options:
        - on: where the time is measured, gpu or cpu.
        - num_kernels: the maximum number of annotations to list. If there are more, annotations are listed only until they
          make up duration_ratio of the time.
        - duration_ratio: see num_kernels.
        - allowlist: annotations whose names contain one of these strings are always listed.

        compat=hta: the figures of get_gpu_user_annotation_breakdown.

        Rows are sorted by name. The quantile of running sums decides which annotations become one row, whose statistics
        are then those of the sums.

        Columns: rank, name, count, sum_us, max_us, min_us, mean_us, std_us.
        """

    def gpu_clocks(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Power, clocks and temperature of each GPU, and how much of the time it was throttled.

        Reasons that were not sampled are missing, not zero. The view throttling lists the spans.

        Columns: rank, device, power_w, max_power_w, power_limit_w, sm_clock_mhz, max_sm_clock_mhz, memory_clock_mhz,
        temperature_c, max_temperature_c, power_throttled_pct, heat_throttled_pct, hardware_throttled_pct,
        steps_throttled_pct, throttled_sm_clock_mhz.
        """

    def gpu_counters(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by GPU: how busy its units, memory and links were, and how much of the time was sampled.

        Values are those of the whole GPU, whichever process used it. Samples without a value, or with an impossible one
        (percentages above 105, negative values), count as time without a sample.

        Columns: rank, device, counter, metric, unit, mean, p50, p95, max, samples, sample_us, unsampled_pct.
        """

    def gpu_summary(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How busy each GPU was from the start of the first measured step to the end of the last one.

        Utilization counts the union of kernels only. SM efficiency is the mean of min(blocks per multiprocessor of all
        running kernels, 1); occupancy is the mean of the kernels' estimates weighted by their time. Both are estimates from
        launch shapes, not measurements. The tensor-core share covers all kernels, recognized by their names. The memory
        peak needs recorded allocations.

        compat=plugin: the figures use the plug-in's steps and its list of kernel names.

        Only kernels that it can attribute to an operator count for tensor cores. Percentages have two digits.

        Columns: rank, device, name, memory_bytes, compute_capability, kernels, kernel_us, utilization_pct, busy_pct,
        sm_efficiency_pct, occupancy_pct, tensor_core_pct, peak_memory_bytes.
        """

    def gpu_utilization(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How busy each GPU was over the recording, in at most 100 buckets of 1, 10, 100, … µs each.

        The recording is the profiler's own range if the file states it, otherwise the time from the first to the last
        event. The last bucket also covers the remainder. Time that the GPU's source did not record does not count.

        compat=plugin: the same figures apart from the precision of the times.

        Columns: rank, device, start_ns, duration_us, utilization_pct.
        """

    def graph_operators(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What the operators in CUDA graphs cost, longest total GPU time first.

        A replay runs no operators: these are the operators that ran when the graph was captured, while the agent was in the
        process. Graphs whose capture the agent did not see are missing, with a note.

        Columns: rank, graph, operator, path, input_shape, calls, launches, kernels, copies_and_fills, gpu_us, total_us,
        share_pct, top_kernel.
        """

    def hlo_ops(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The cost of each HLO instruction of a JAX program, longest total time first.

        On a CPU, XLA itself records the operations. On NVIDIA GPUs, the kernels of the trace are matched with the modules
        that the program compiled: a kernel that may have run several instructions gets only what they have in common. CPU
        operations can be nested: a loop, for example, contains its body.

        Columns: rank, hlo_op, hlo_module, op_name, source, where, runs, total_us, mean_us, max_us, share_pct.
        """

    def hot_lines(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The lines of the program's own code with the most time on the training thread, including everything they call.

        A moment belongs to the innermost function that is part of neither a package nor Python itself. Other threads, and
        time outside the steps, do not count. The line of a function that calls others is known only if nearly all samples
        of that call agree.

        Columns: rank, function, file, line, part, calls, time_us, per_step_us, share_pct, idle_pct, moments.
        """

    def idle_breakdown(
        self,
        sources: Sources,
        *,
        consecutive_kernel_delay: float = 30,
        streams: Sequence[int] = (),
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The gaps between the kernels, copies and fills of each stream, by cause.

        A gap is the time from the end of all earlier activities of the stream to the start of the next one. Its categories:
        - host_wait: the call that launched the next activity began only after the gap had begun.
        - kernel_wait: the activity was launched in time, and the gap is shorter than consecutive_kernel_delay: the overhead
          of starting one kernel after another.
        - other: neither; for example, the stream waited for an event of another stream.

        Options:
        - consecutive_kernel_delay: in us.
        - streams: only these streams; all by default.

        compat=hta: the figures of get_idle_time_breakdown.

        A gap begins at the end of the activity that started before, so it is negative where activities overlap. The first
        activity of a stream counts as "other" without a gap, and categories without activities have no row. The share and
        the statistics have two digits. For MTIA, the events mtia_ccp_events count. (HTA documents the delay in ns, but
        interprets it as us.)

        Columns: rank, device, stream, category, idle_us, idle_pct, count, mean_us, std_us, min_us, p25_us, p50_us,
        p75_us, max_us.
        """

    def idle_causes(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Why each GPU was idle, by cause.

        A gap is a span of the window without any kernel, copy or fill on the GPU. The activity that ends it determines the
        cause: it was launched before the gap began (queued), or launched late, by a host that had waited for the GPU
        (synchronisation), for the next batch (data_loading), for other ranks (communication) or for CUDA's memory
        allocation (memory), or that was simply busy (host: the launch-bound case). kineto_trace.analysis.idle_gaps
        describes the rule in full.

        Columns: rank, device, cause, gaps, idle_us, idle_pct, window_pct, longest_us, op, op_us.
        """

    def idle_gaps(
        self,
        sources: Sources,
        *,
        limit: int = 100,
        cause: Literal["host", "synchronisation", "data_loading", "communication", "memory", "queued", "unknown"] | None = None,
        executor: Executor | None = None,
    ) -> Result:
        """The longest gaps of all GPUs, each with its cause and what the host did.

        Options:
        - limit: the maximum number of gaps.
        - cause: only gaps with this cause.

        Columns: rank, device, start_ns, idle_us, cause, step, op, doing, doing_us, function, blocking_call,
        launch_call, before, after, call_stack.
        """

    def kernel_breakdown(
        self,
        sources: Sources,
        *,
        duration_ratio: float = 0.8,
        num_kernels: int = 10,
        include_memory: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The kernels that take the most time, for each type of work; all others of a type share one row.

        Options:
        - num_kernels: the maximum number of kernels to list per type. If a type has more, kernels are listed only until
          they make up duration_ratio of its time.
        - duration_ratio: see num_kernels.
        - include_memory: include copies and fills.

        compat=hta: the second table of get_gpu_kernel_breakdown.

        Rows are sorted by type and name. The quantile of running sums decides which kernels become one row, whose
        statistics are then those of the sums.

        Columns: rank, kernel_type, name, count, sum_us, max_us, min_us, mean_us, std_us.
        """

    def kernel_counters(
        self,
        sources: Sources,
        *,
        counter: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by kernel: how each one uses the GPU's units and memory; longest total time first.

        Samples measure the whole GPU. Where a kernel ran alone for three samples or longer, the value is the time-weighted
        mean of the samples within it. Otherwise, each sample is modelled as the time-weighted mean of everything that ran
        in it, and least squares over all samples give the values (0 to 100 for percentages); idle time has a value of its
        own. A value is given only with enough evidence: the kernel ran alone for the length of at least 50 samples, its
        share of the samples varies independently of other work, the 95 % interval is at most ± 10 points, and the residual
        is at most 8 points (for counters other than percentages: per cent of their largest sample).

        Options:
        - counter: only counters whose names contain this text (case-insensitive).

        Columns: rank, name, device, time_us, shared_pct, counter, unit, value, error, residual, method, why.
        """

    def kernel_precision(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The precision in which kernels compute, longest total time first. Collectives are left out.

        The narrowest type in a kernel's name counts, since wider ones next to it belong to sums and results. If a name
        contains no type (compiled and fused kernels), the narrowest input type of the operator counts, if it was recorded.

        Columns: rank, precision, bits, calls, total_us, share_pct, tensor_core_us.
        """

    def kernel_type_breakdown(
        self,
        sources: Sources,
        *,
        include_memory: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The GPU's busy time by the types of work that ran. Each moment counts once.

        Options:
        - include_memory: count copies and fills as a type.

        compat=hta: the first table of get_gpu_kernel_breakdown.

        It has the sums over all ranks, types by HTA's patterns, and shares with one digit.

        Columns: rank, kernel_type, sum_us, share_pct.
        """

    def kernels(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The kernels by name, longest total time first. Copies and fills are not kernels.

        Blocks per multiprocessor and occupancy are means weighted by duration, over the launches for which they are known.

        compat=plugin: the plug-in's list of names decides which kernels use tensor cores; unknown launch figures are 0.

        Times are in whole µs, and launch figures have two digits.

        Columns: rank, name, tensor_cores, calls, total_us, mean_us, max_us, min_us, blocks_per_sm, occupancy_pct,
        share_pct.
        """

    def kernels_by_op(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The kernels by name, operator and launch properties, longest total time first.

        The operator is the innermost one around the call that launched the kernel, on its thread; if there is none, the
        innermost annotation. Kernels of a CUDA graph belong to the operator that captured them, if the agent saw the
        capture, otherwise to the operator around the launch of the graph. An operator is eligible for tensor cores if its
        name is in a built-in list, or if the operator or one nested in it used them.

        compat=plugin: the operator is the one with the external id of the call.

        It is "CallTreeRoot" for the id 0 and for kernels without a call. Kernels whose call belongs to no operator are left
        out, and the name alone decides about eligibility. Mean times are in whole µs, and launch figures have two digits.

        Columns: rank, name, op, grid, block, registers, shared_memory_bytes, tensor_cores, op_eligible, calls,
        total_us, mean_us, max_us, min_us, blocks_per_sm, occupancy_pct, share_pct.
        """

    def kernels_with_annotations(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Every GPU activity with the innermost annotation around its launch.

        Activities whose launch is not in the trace get the shortest annotation of their stream that overlaps them.

        compat=hta: the figures of get_gpu_kernels_with_user_annotations.

        Every activity gets the shortest annotation of its stream that overlaps it; activities of other streams with exactly
        the same times get it too. Those of 0 us get none at its edges (with pandas 3, HTA gives them none at all). HTA
        fails if rounding made an activity end before it starts; here such activities have no annotation. Synchronisations
        count as activities.

        Columns: rank, name, device, stream, start_ns, duration_us, annotation.
        """

    def launch_stats(
        self,
        sources: Sources,
        *,
        runtime_cutoff: float = 50,
        launch_delay_cutoff: float = 100,
        include_memory: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The call, the activity and the delay of every launch whose call and activity are both in the trace.

        A graph launch has one row for each of its kernels.

        Options:
        - runtime_cutoff: calls longer than this (us) are long.
        - launch_delay_cutoff: delays longer than this (us) are long.
        - include_memory: include copies and fills.

        compat=hta: the launches of get_cuda_kernel_launch_stats.

        These are the launches by cudaLaunchKernel and cudaLaunchKernelExC, with include_memory also by cudaMemcpyAsync and
        cudaMemsetAsync. Driver calls and graph launches do not count.

        Columns: rank, correlation, call, activity, cpu_us, gpu_us, launch_delay_us, short_activity, long_call,
        long_delay.
        """

    def launch_summary(
        self,
        sources: Sources,
        *,
        runtime_cutoff: float = 50,
        launch_delay_cutoff: float = 100,
        include_memory: bool = True,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How many launches look inefficient: activities shorter than their call, long calls, long delays.

        The options are those of launch_stats. A graph launch counts its call once for each kernel. If no
        launch has both its call and its activity in the trace, all figures are missing, not zero.

        compat=hta: the same launches as in launch_stats. The counts are those of the values in HTA's histograms.

        Columns: rank, launches, short_activities, long_calls, long_delays, cpu_us, gpu_us, mean_delay_us,
        median_delay_us, max_delay_us.
        """

    def memory_bandwidth(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The bandwidth of copies and fills by kind, at every change. Memory traffic of kernels is not included.

        A running copy counts with its bytes divided by its duration; simultaneous copies add up.

        compat=hta: the figures of get_memory_bw_time_series: the bandwidth that the file states, over rounded times.

        Columns: rank, device, kind, time_ns, time_us, bandwidth.
        """

    def memory_bandwidth_summary(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Statistics of the values of memory_bandwidth above 0. Each value counts once, no matter how long it lasted.

        compat=hta: the figures of get_memory_bw_summary.

        Columns: rank, device, kind, count, mean, std, min, p25, p50, p75, max.
        """

    def memory_curve(
        self,
        sources: Sources,
        *,
        max_points: int = 0,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How much memory each device held over time: one row per allocation or release, with the level after it.

        Where the trace does not state totals, the curve is relative to the start of the recording.

        Options:
        - max_points: the maximum number of rows per device; the rows that best preserve the shape of the curve are kept
          (largest triangle three buckets). 0 keeps all.

        compat=plugin: the curve of the TensorBoard profiler plug-in.

        Every change is two points at the same time, the level before it and the level after it, and a device has at most
        10240 points unless max_points is given.

        Columns: rank, device, time_ns, time_us, allocated_bytes, reserved_bytes.
        """

    def memory_events(
        self,
        sources: Sources,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
        min_bytes: int = 0,
        max_bytes: int | None = None,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Every block of memory: which operator allocated it, when it was released, and how long it was held.

        A release belongs to the last allocation at its address. Blocks allocated before the recording have no allocation
        time and no operator; blocks still held at its end have no release time. Rows are ordered by allocation time, blocks
        from before the recording first.

        Options:
        - start_ns, end_ns: only blocks that were allocated or released between these times (Unix ns, both included).
        - min_bytes, max_bytes: only blocks of at least min_bytes and at most max_bytes.

        compat=plugin: the events of the TensorBoard profiler plug-in.

        Pairs come first, by release, then blocks that were not released, then blocks that were not allocated. An address
        that was allocated twice without a release shows only the second allocation.

        Columns: rank, device, operator, size_bytes, allocation_us, release_us, duration_us, address.
        """

    def memory_fragmentation(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """How much of the reserved memory the allocator had not handed out: one row per device.

        Such memory is cached for later use, or lies in gaps between blocks that are too small for a new block. Where the
        trace has no reserved bytes (as for the CPU), a row has only the peak.

        Columns: rank, device, peak_bytes, peak_ns, reserved_bytes, unused_bytes, unused_pct, mean_unused_pct,
        most_unused_bytes, most_unused_ns.
        """

    def memory_holders(
        self,
        sources: Sources,
        *,
        points: int = 120,
        operators: int = 8,
        executor: Executor | None = None,
    ) -> Result:
        """Which operators' blocks filled the memory of each device over time, at equally spaced moments.

        The operators that held the most at any of these moments have rows of their own; the others share one. Only blocks
        allocated during the recording count: memory allocated earlier has no operator and is not in these rows.

        Options:
        - points: number of moments per device.
        - operators: number of operators with rows of their own.

        Columns: rank, device, time_ns, time_us, operator, held_bytes.
        """

    def memory_peak(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What filled the memory of each device at its peak: one row per device and operator.

        A block counts if it was allocated at or before that time and released after it. Memory allocated before the
        recording has a row of its own, with no operator or block count. Rows are grouped by device, most bytes
        first.

        Columns: rank, device, peak_bytes, time_ns, reserved_bytes, operator, held_bytes, held_pct, blocks.
        """

    def memory_peak_blocks(
        self,
        sources: Sources,
        *,
        top: int = 50,
        executor: Executor | None = None,
    ) -> Result:
        """The blocks that were held at the memory peak of each device, by operator and Python stack.

        Blocks are those of the view memory_peak, except memory allocated before the recording. Stacks are those of the
        operators, as in the view operators. Rows are grouped by device, most bytes first.

        Options:
        - top: number of rows per device.

        Columns: rank, device, time_ns, operator, held_bytes, blocks, call_stack.
        """

    def memory_snapshot(
        self,
        sources: Sources,
        *,
        at_ns: int | None = None,
        top: int = 500,
        executor: Executor | None = None,
    ) -> Result:
        """What each device held at one moment: one row per block, the largest first.

        A block counts if it was allocated at or before that time and released after it. At the end, a device has one row
        for all smaller blocks and one for memory allocated before the recording. Stacks are those of the operators, as in
        the view operators.

        Options:
        - at_ns: the moment (Unix ns). Default: the peak of each device.
        - top: number of blocks per device with rows of their own.

        Columns: rank, device, time_ns, allocated_bytes, operator, size_bytes, blocks, address, allocation_us, age_us,
        call_stack.
        """

    def memory_statistics(
        self,
        sources: Sources,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """What each operator allocated and released on each device.

        An allocation or release counts for the innermost operator running on its thread at that time, and for all operators
        around it, once per name. Rows with the largest self_size_increase_bytes come first.

        Options:
        - start_ns, end_ns: only records between these times (Unix ns, both included).

        compat=plugin: the memory view of the TensorBoard profiler plug-in.

        It uses the plug-in's operator tree, counts calls only of operators that the plug-in visits (it does not enter a
        node without any record), and has CPU and GPUs only. Rows are sorted by name.

        Columns: rank, device, operator, calls, size_increase_bytes, self_size_increase_bytes, allocation_count,
        self_allocation_count, allocation_bytes, self_allocation_bytes.
        """

    def module_counters(
        self,
        sources: Sources,
        *,
        counter: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by module (nn.Module), nested modules included, as in the view modules.

        Same rules and options as kernel_counters. For modules that run at the same time, the values cover only the time in
        which one of them ran alone.

        Columns: rank, path, name, depth, part, device, time_us, shared_pct, counter, unit, value, error, residual,
        method, why.
        """

    def modules(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The modules of the model as they call each other, with the host and GPU time of each.

        There is one row per call path: a module that is called from two places has two rows. Outer modules come before
        inner ones, in the order of their first calls. An operator belongs to the innermost module running when it starts,
        a kernel to the one running when it is launched. The backward figures of a module are those of its forward
        operators, linked by autograd's sequence numbers; the other figures do not include them. With PyTorch Lightning,
        modules are its "[pl][module]" operators.

        compat=plugin: the module view of the TensorBoard profiler plug-in, for PyTorch Lightning its Lightning view.

        Every row has the figures of all calls of the module, wherever it was called from. Device time counts only if an
        operator has the external id. There are no backward figures.

        Columns: rank, path, name, module_id, depth, occurrences, operators, host_total_us, host_self_us,
        host_overhead_us, device_total_us, device_self_us, backward_host_us, backward_device_us.
        """

    def not_recorded(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What a trace lacks, why, and which option of `kinetoctl trace` records it.

        Losses come first: sources that began late or ended early, and records that were dropped or cannot be read. Parts
        that are missing altogether follow. A trace from kinetod states which activity types and options were requested,
        which sources recorded, and why others could not. Traces from other tools state few of their options, so some
        reasons stay unknown. With several ranks, each item appears once, with the longest time or the total number of
        records. The view validate lists everything that a trace may contain.

        Columns: what, option, why, hides, torch_profiler, ranks.
        """

    def op_counters(
        self,
        sources: Sources,
        *,
        counter: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by operator; GPU work belongs to operators as in the view kernels_by_op.

        Same rules and options as kernel_counters.

        Columns: rank, name, device, time_us, shared_pct, counter, unit, value, error, residual, method, why.
        """

    def op_kernel_delay(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The sequences of kernels that ATen operators launch themselves, and the delays of the first kernel of each.

        A launch belongs to the innermost "aten::…" operator that is running on its thread when the call begins.

        compat=hta: the figures of get_aten_op_kernels_and_delay.

        Only calls named cuda…LaunchKernel… and cuLaunchKernel… count. A launch belongs to the operator, of any thread, that
        started last among those that were still running when the call ended. Launches without a kernel, on which HTA fails,
        are left out. Delays are rounded to three digits.

        Columns: rank, op, kernels, kernel_count, count, launch_delay_us, runtime_delay_us.
        """

    def operator_flops(
        self,
        sources: Sources,
        *,
        peak: float = 0.0,
        bandwidth: float = 0.0,
        executor: Executor | None = None,
    ) -> Result:
        """Matrix products, convolutions and attention by operator and shape (roofline): operations, speed, and its limit.

        Operations are computed from the recorded sizes of the inputs: a multiply-add counts as two, and attention with a
        causal mask counts half. Bytes are the minimum that must be moved, so "memory" is certain, while "arithmetic" is the
        limit with perfect caches. The rows with the most GPU time come first.

        Options:
        - peak: the peak of the GPU in TFLOP/s, for all precisions; 0: from the GPU's data sheet.
        - bandwidth: the memory bandwidth of the GPU in GB/s; 0: from the GPU's data sheet.

        Columns: rank, name, input_shape, precision, calls, call_gflop, device_us, host_us, speed_tflop_s, peak_tflop_s,
        peak_pct, intensity_flop_byte, bound, roof_tflop_s, roof_pct.
        """

    def operators(
        self,
        sources: Sources,
        *,
        group_by: Literal["name", "name+shape", "type"] = "name",
        stacks: bool = False,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Operators by name: how often each ran, and its time on the host and on the GPU.

        A kernel, copy or fill belongs to the innermost operator around the call that launched it, which is found by the
        correlation id. Times are sums over all calls; overlapping work counts each time. The total of an operator includes
        nested operators, so totals of different rows must not be added; an operator nested in another of the same row
        adds nothing. Rows are ordered by device_self_us, largest first; without GPU work, by host_self_us, and the GPU
        columns are missing.

        Options:
        - group_by: "name"; "name+shape" for one row per distinct input shapes; "type" for one row per kind of work, such as
          matrix products, by the names of PyTorch's operators (nodes of the backward pass have the kind of their forward
          operator).
        - stacks: one row per distinct call stack. Stacks are the recorded ones or, if there are none, those of the trace's
          Python functions; operators without a stack have a row of their own.

        compat=plugin: the operator view of the TensorBoard profiler plug-in.

        Calls belong to operators by external ids, operators that overlap because of rounding are dropped, and an operator
        whose parent has the same name, and no other child, is not counted. The plug-in's list of names decides which
        kernels use tensor cores. Only recorded call stacks count; with `stacks`, operators without one are left out. Data
        loading, optimizer steps and DDP's forward are not operators. There is no cumulative share.

        Columns: rank, name, input_shape, calls, device_self_us, device_total_us, host_self_us, host_exclusive_us,
        host_total_us, device_self_pct, host_self_pct, cumulative_pct, tensor_core_eligible, tensor_core_self_pct,
        tensor_core_total_pct, call_stack.
        """

    def overview(
        self,
        sources: Sources,
        *,
        step_ends: Literal["host", "device"] = "host",
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The headline figures of a trace in one row: the average step, and how well its GPUs were used.

        The parts of the step and the option step_ends are those of step_breakdown, the GPU figures those of gpu_summary,
        and the tensor-core figures those of tensor_core_use. Steps that the recording cut off do not count. Neither do
        first steps that do not show the program's pace: warm-up steps, and steps in which the host ran ahead of the GPU. If
        no step is complete, the shares refer to the recorded parts; in a trace without steps, to the whole trace. Without
        any GPU activity in the trace, the GPU figures are missing, not zero.

        compat=plugin: the figures of the underlying views with compat=plugin.

        Columns: rank, steps, step_us, kernel_pct, memcpy_pct, memset_pct, communication_pct, runtime_pct,
        dataloader_pct, cpu_exec_pct, other_pct, unrecorded_pct, gpus, gpu_name, utilization_pct, sm_efficiency_pct,
        occupancy_pct, tensor_core_pct, tensor_core_eligible_pct, kernels, kernel_us.
        """

    def process_use(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """How the process used the host's CPUs, memory pages and storage, and what limits it; one row.

        All figures are the Linux kernel's counters for the process, without its child processes (DataLoader workers).

        Columns: rank, seconds, cpu_cores, cpu_wait_cores, usable_cores, host_cores, quota_cores, throttled_pct,
        other_cores, minor_faults, major_faults, read_bytes, written_bytes, read_chars, written_chars.
        """

    def profiler_steps(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The "ProfilerStep#N" annotations on the host, ordered by start.

        Without any GPU activity in the trace, the GPU figures are missing, not zero.

        compat=hta: the steps of get_profiler_steps.

        These are the numbers of the steps that remain after HTA has dropped the last one (if there are at least two), each
        once and in ascending order. Where a step appears twice, its first row counts.

        Columns: rank, step, start_ns, complete, duration_us, gpu_activities, gpu_us.
        """

    def python_samples(
        self,
        sources: Sources,
        *,
        by: Literal["function", "line"] = "line",
        thread: str = "",
        idle: bool = True,
        executor: Executor | None = None,
    ) -> Result:
        """Where sampled Python code ran, by function and line: most running samples first, idle code last.

        Only the innermost Python frame of a sample counts, including all C code that it called. Samples of unknown state
        (from older captures) count as running.

        Options:
        - by: "line", or "function" for one row per function.
        - thread: only threads whose name contains this text.
        - idle: false leaves out code that was only ever seen idle.

        Columns: rank, function, line, running, running_pct, running_us, waiting, idle, gil_holder, idle_for, caller,
        threads, lines.
        """

    def queue_length(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The number of launched activities that have not started yet, for each stream, at every change.

        The number grows when the launching call begins and shrinks when the activity starts. A graph launch adds all its
        kernels at once.

        compat=hta: the figures of get_queue_length_time_series: only calls that HTA knows as launches (no graphs).

        Columns: rank, device, stream, time_ns, time_us, queue_length.
        """

    def queue_length_summary(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Statistics of the values of queue_length for each stream. Each value counts once, no matter how long it lasted.

        Only time_mean weights each value by the time for which it lasted.

        compat=hta: the figures of get_queue_length_summary.

        Columns: rank, device, stream, count, mean, std, min, p25, p50, p75, max, time_mean.
        """

    def rank_steps(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Every measured step of every rank: how long it took on the host, and how long the rank waited in it.

        Waiting is that of the view ranks, step by step: it is derived from durations alone, so clocks do not matter, and
        collectives count for the step in which they were launched. If ranks number their steps differently, their steps are
        matched by start time and shown with the numbers of the first rank. Incomplete steps have no rows, nor do first
        steps that do not show the program's usual pace (see the view ranks). Rows are ordered by rank and step.

        Columns: rank, step, start_ns, step_us, waiting_us.
        """

    def rank_time_causes(
        self,
        sources: Sources,
        *,
        least: float = 0.0,
        executor: Executor | None = None,
    ) -> Result:
        """Where the time of all ranks' steps goes, by the causes of time_causes; they sum to 100 %.

        The shares of a rank cover all its GPUs. The ranks with the least and the most of a cause show whether it affects
        the whole job or only some ranks; time_causes has the causes of each rank and GPU. If no rank has GPU activity, the
        causes are the parts of the host's steps.

        Options:
        - least: causes with less than this share (in %) on every rank are merged into one row.

        Columns: share_pct, step_us, least_pct, least_rank, most_pct, most_rank, meaning, what, total_us, cause.
        """

    def rank_waits(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Which rank waited for which, the longest waits first.

        No rank can leave an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before all others have entered
        it. The rank with the shortest duration therefore came last, and other ranks waited for it for the rest of their
        durations. Clocks do not matter. Collectives are matched by process group and sequence number.

        Columns: rank, waits_for, wait_us, wait_pct, collectives, mean_wait_us, where.
        """

    def rank_what_if(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What the job would gain if a rank were as fast as the others, or if transfers took no time; largest gain first.

        The figures come from a critical path over all ranks. Each rank is modelled as two chains of its own work between
        collectives, one on its GPU and one on its host; a collective ends on all of its ranks once the last of them has
        begun it and its transfer is over. To simulate a rank as fast as the others, its work between any two consecutive
        collectives is replaced by the median of the other ranks, and the path is computed again. So the time in which one
        rank waits for another counts as a gain of the other rank's work, never of communication.

        If the same operators take longer on one rank's host than on the others, it probably has a slower core, or shares
        it. The medians of operators and launching calls are compared by name, in the training thread and in the threads
        that run the backward pass. A slower host is reported if three quarters of at least eight names take longer, by at
        least 10 % in the median, and if that explains at least a quarter of the host's additional work.

        A note says how well the model reproduces the time of the job; if the error exceeds 10 %, there are no rows. Nor are
        there rows if the job would be slower with equally fast ranks: then ranks wait in ways that the traces do not show,
        for example because calls to CUDA were not recorded. Work before the first and after the last collective that
        several ranks share is left out. With more than 16 ranks, those with the most work of their own are shown.

        Collectives on the host (gloo, MPI) leave no event that shows when the training thread waited for them, so the work
        of the ranks is unknown. For such jobs, the savings are upper bounds derived from the durations of the collectives:
        how much longer the others waited for a rank than for the second-to-last one, and the transfers.

        Columns: change, rank, collective, process_group, saving_us, saving_pct, saving_per_step_us, more_work_us,
        host_pace, cause, about.
        """

    def ranks(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """One row for each rank: its steps, how long it computes, how long it waits, and how long others wait for it.

        The ranks that the others wait for longest come first. Collectives make the steps of all ranks equally long, so
        computation_us and waited_for_us show which rank is slow. A rank that the others wait for, but that computes no
        longer than they do, is late because of its host. If the same operators take longer there than on the other ranks,
        and this explains at least a quarter of the waiting, the row says by how much.

        Incomplete steps do not count, nor do first steps that do not show the program's usual pace (see the view overview),
        nor the collectives launched in them. Waiting is derived from durations alone (see the view rank_waits), so clocks
        do not matter; other kernels may have run at the same time. A rank is called slow or late if the others wait for it
        for at least 2 % of a step: slow if its computation takes at least 3 % longer than the median rank's, otherwise
        late. But a rank that waits for at least half as long itself is not called late: either that wait made it late, or
        the ranks take turns being late. For these verdicts, waiting counts only while the waiting rank computes nothing.

        Columns: rank, host, gpu, steps, step_us, step_p50_us, step_p95_us, step_max_us, slowest_steps, computation_us,
        slower_pct, communication_us, waiting_us, waited_for_us, about.
        """

    def recommendations(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """What to change first: one row for each figure of the overview that exceeds its threshold.

        The rules:
        - data_loading: more than 5 % of the mean step is spent waiting for data.
        - data_parallel: DataParallel runs on more than one GPU.
        - nccl_backend: DistributedDataParallel runs without NCCL on NVIDIA GPUs of compute capability 3.5 or higher.
        - communication: more than 10 % of the mean step is communication that no other work hides.
        - low_utilization: a GPU runs kernels in less than 50 % of the steps' time.
        - tensor_cores: no kernel uses tensor cores on a GPU that has them (NVIDIA: compute capability 7 or higher),
          although some operators could.
        - memory: more than 90 % of a GPU's memory was allocated at some time (needs recorded allocations).

        The advice names only what the GPUs of the trace can do: bfloat16 and TF32 from compute capability 8.0 on,
        torch.compile from 7.0 on, and a larger batch only where memory is left.

        compat=plugin: the plug-in's breakdown, utilization and kernel names.

        Only the first GPU is checked for tensor cores, and of several devices with too much memory the first one is
        reported.

        Columns: rank, rule, value, threshold, unit, advice, evidence.
        """

    def recordings(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What was recorded, where and with which versions: one row for each trace.

        All values come from the trace; values that it does not have are missing. Only kinetod's own traces have the command
        line and the job. The window is the requested time span or, if unknown, that of the activities in the trace.

        Columns: rank, world_size, host, process, pid, command, job, labels, gpus, framework, python, cuda, driver_cuda,
        cupti, kinetod, capture, start_ns, length_us.
        """

    def roofline(
        self,
        sources: Sources,
        *,
        by: Literal["kernel", "op"] = "kernel",
        executor: Executor | None = None,
    ) -> Result:
        """What limits each kernel or operator, as measured: memory, computing, or neither (latency).

        Counters are those of the views kernel_counters and op_counters. If DRAM or the compute units reach 60 % of their
        peak, the higher one decides; the threshold is that of Nsight Compute's rule for latency. If neither reaches it, the
        row is latency-bound. That verdict needs a value for DRAM. If multiprocessors have work for at least 60 % of the
        time, it also needs one for every unit that the work may use: the tensor pipe and, except for kernels that multiply
        on tensor cores, ordinary cores (kinetoctl trace --counters=tensor). Without these values, the verdict is "not
        known", as it is for collectives and copies between host and GPU, which are limited by a link (view
        collective_counters).

        Options:
        - by: kernel, or op for operators.

        Columns: rank, name, device, time_us, share_pct, verdict, why, dram_pct, dram_error_pct, dram_gb_s, peak_gb_s,
        tensor_pct, cores_pct, compute_pct, sm_busy_pct, occupancy_pct, precision, speed_tflop_s, peak_tflop_s,
        intensity_flop_byte.
        """

    def settings(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The settings of torch, Python and the environment when the recording began; those that cost time come first.

        Only environment variables on an allow list are read, so that no secrets are recorded. `torch.num_threads` is what a
        new thread of the program would get. Only optimizers that have stepped are listed; `parameters` counts tensors.

        Columns: rank, setting, value, effect, judgement.
        """

    def sm_efficiency(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The estimated SM efficiency of each GPU over time: one row per span in which the same kernels run.

        The estimate is min(sum of the running kernels' blocks per multiprocessor, 1). There are no rows for time without
        kernels.

        compat=plugin: only launch figures that the file states count.

        A few more rows of about 0 % appear between kernels, because the plug-in adds with doubles.

        Columns: rank, device, start_ns, duration_us, sm_efficiency_pct.
        """

    def step_breakdown(
        self,
        sources: Sources,
        *,
        step_ends: Literal["host", "device"] = "host",
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """What each training step spent its time on; the last row is the average of the measured steps.

        A step that began before the recording or ended after it has a row, but does not count towards the average. Neither
        do first steps that do not show the program's pace: warm-up steps, and steps in which the host ran ahead of the GPU.

        Each moment of a step counts for one role: the first of kernel, memcpy, memset, communication, runtime, dataloader
        and cpu_exec that is active then, or other if none is. Time that a source did not record (see the view validate)
        counts as unrecorded, since its roles are unknown. The parts of a row therefore add up to the length of the step.
        The average covers the steps without unrecorded time, if there are any. The role kernel excludes communication
        kernels; communication includes NCCL's kernels, recognized by their names or arguments, and host ranges such as
        "nccl:all_reduce" and "gloo:broadcast". Without any GPU activity in the trace, the times of kernels, copies and
        fills are missing, not zero.

        Options:
        - step_ends: "host" uses the steps as the host sees them ("ProfilerStep#N"). "device" applies the rule of the
          TensorBoard plug-in: each step ends with the last GPU activity that it launched and starts when the previous step
          ends, and steps at the end whose GPU work may be missing are left out.

        compat=plugin: steps end on the device, whatever `step_ends` says, and percentages have two digits.

        GPU ranges can be steps and cpu_exec, only ten collectives are communication, and driver calls do not count. Once
        the roles so far fill all steps, the next role counts in full, so that rows may sum to more than the step.

        Columns: rank, step, start_ns, complete, total_us, kernel_us, memcpy_us, memset_us, communication_us,
        runtime_us, dataloader_us, cpu_exec_us, other_us, unrecorded_us, kernel_pct, memcpy_pct, memset_pct,
        communication_pct, runtime_pct, dataloader_pct, cpu_exec_pct, other_pct, unrecorded_pct.
        """

    def step_counters(
        self,
        sources: Sources,
        *,
        counter: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """Hardware counters by training step and by phase of the steps.

        On the GPU, a step lasts from its first activity to the first activity of the next step, or to its own last activity
        if there is no next step. Its value is the mean over that time, exact except for the two samples at its ends. The
        mean of all steps comes first. A phase covers the GPU work launched in it; its values are determined as in the view
        kernel_counters.

        Options:
        - counter: only counters whose names contain this text (case-insensitive).

        Columns: rank, step, phase, device, time_us, counter, unit, value, sampled_pct, error, why.
        """

    def step_phases(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """Where the host time of each training step goes: loading, forward, backward, optimizer, other code.

        No GPU is needed. Loading and the optimizer come from torch's annotations, forward and backward from the operators
        and autograd's sequence numbers; gaps of up to a millisecond within a phase belong to it. Each moment counts once,
        so the phases add up to the length of the step. With a GPU, these are the times of the launches, not of the kernels.
        Steps that the recording cut off are left out if there are others.

        Columns: rank, step, start_ns, total_us, loading_us, forward_us, backward_us, optimizer_us, other_us,
        loading_pct, forward_pct, backward_pct, optimizer_pct, other_pct.
        """

    def step_spread(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """How long each step took on the host, over all ranks, ordered by step number.

        If ranks number their steps differently, their steps are matched by start time and shown with the numbers of the
        first rank.

        Columns: step, ranks, min_us, median_us, p95_us, max_us, spread_pct, slowest_rank.
        """

    def stragglers(
        self,
        sources: Sources,
        *,
        steps: int | str | Sequence[int] | None = None,
        num_candidates: int = 2,
        align: Literal["auto", "clock", "collectives"] = "auto",
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """The ranks that the others wait for, most expensive first.

        All collectives that appear on several ranks count. The last rank to begin a collective is late if it begins after
        the second-to-last by more than the uncertainty of the clocks. This costs the group the time between these two
        starts, or the time the others waited in the collective if that is less; simultaneous waits count once. A rank is a
        candidate if the others waited for it for more than 2 % of the time from the first to the last collective, and more
        than twice as long as for the median of the other ranks (so ranks that take turns being late are not candidates).
        The view `rank_what_if` shows what the job would gain if the rank were as fast as the others.

        Options:
        - steps: numbers of steps such as "3,4,5"; all if not given.
        - num_candidates: maximum number of ranks marked as candidates.
        - align: how the clocks of the ranks are compared, as in the view `collectives`.

        compat=hta: the figures of get_potential_stragglers.

        HTA evaluates kernels whose names begin with ncclKernel (not ncclDevKernel) and that last at least 1 % of a mean
        iteration, and of these the last one per rank, stream, iteration and name. It keeps the stream and name whose
        durations differ most between ranks (standard deviation, averaged over iterations). In every iteration the
        num_candidates ranks that start this kernel last are late; the candidates are the ranks that are late in most
        iterations. HTA uses the clocks as they are, and leaves out the last step.

        Columns: rank, candidate, late_steps, late_collectives, caused_us, mean_late_us, uncertainty_us.
        """

    def temporal_breakdown(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "hta"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """Idle, computing and other time of each GPU between its first and its last event.

        Computing time is the union of all kernels other than communication kernels, which are recognized by their names
        (such as nccl or rccl). Idle time is the time outside the union of all kernels, copies and fills.

        compat=hta: the figures of get_temporal_breakdown.

        There is one row for all devices together. cuda_sync events count as busy time, HTA's patterns decide on kernel
        types, percentages have two digits, and HTA's loading rules apply (last step dropped, whole microseconds).

        Columns: rank, device, idle_us, compute_us, non_compute_us, kernel_time_us, idle_pct, compute_pct,
        non_compute_pct.
        """

    def tensor_core_use(
        self,
        sources: Sources,
        *,
        compat: Literal["none", "plugin"] = "none",
        executor: Executor | None = None,
    ) -> Result:
        """How much of the kernels' time uses tensor cores, and how much of it could.

        "kernels" is the share of all kernels' time spent in kernels that use tensor cores, recognized by name. "eligible
        operators" is the share of all operators' kernel time spent in operators that could use them: the innermost
        operators from a list of matrix multiplications, convolutions, attention and similar operators, and the operators
        nested in these.

        compat=plugin: the plug-in's lists of names decide, and kernels belong to operators by external ids.

        Only kernels that an eligible operator launched itself count.

        Columns: rank, figure, used_pct, not_used_pct.
        """

    def tensors(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """The distinct tensors of a trace: where they came from, which operators used them, and how long they were held.

        Tensors that share storage (views) count as one. If the trace has allocations, a storage is one tensor from its
        allocation to its release; otherwise inputs with the same address whose uses overlap in time are one tensor. Tensors
        are numbered by first appearance.

        Traces read from files do not contain the addresses of inputs. Their rows are the blocks of memory that operators
        allocated, and the operators that used them are unknown.

        Columns: rank, tensor, size_bytes, size_is_exact, device, made_by, uses, first_used_by, last_used_by,
        allocation_us, first_use_us, last_use_us, release_us, unused_us, address.
        """

    def thread_times(
        self,
        sources: Sources,
        *,
        thread: str = "",
        executor: Executor | None = None,
    ) -> Result:
        """What each thread did over time, in intervals of about 0.1 s; threads that neither ran nor waited are left out.

        Options:
        - thread: only threads whose name contains this text.

        Columns: rank, start_us, duration_us, thread, name, cpu_pct, cpu_wait_pct, blocked_pct, switches.
        """

    def threads(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What each thread did, including threads without Python; those with the most CPU time first.

        CPU time, waiting for a CPU, switches and page faults are the Linux kernel's counters. Threads that did nothing are
        left out. The columns from `samples` on come from sampled stacks.

        Columns: rank, thread, name, python, cpu_us, cpu_pct, cpu_wait_us, cpu_wait_pct, blocked_pct,
        voluntary_switches, involuntary_switches, minor_faults, major_faults, samples, running, waiting, idle, has_gil,
        idle_for.
        """

    def throttling(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """When GPUs were throttled, according to the samples: spans by reason, in order of time.

        The actual span may begin and end up to one sampling interval earlier or later.

        Columns: rank, device, reason, start_ns, duration_us, sm_clock_mhz, power_w, temperature_c.
        """

    def time_causes(
        self,
        sources: Sources,
        *,
        detail: bool = False,
        warm_up: bool = False,
        least: float = 0.0,
        executor: Executor | None = None,
    ) -> Result:
        """Where every nanosecond of the steps goes: the causes of each GPU sum to 100 %.

        While a GPU has work, the kind of work counts. Computation comes first, so communication and copies only count where
        no computation hides them. While the GPU is idle (also before its first and after its last activity in a step), what
        the host did counts: it waited for data, for the GPU, in a collective or for memory; it was in an operator or a
        launch call; it ran a Python function, slept, logged, or waited for a lock, the GIL or a file; or the launched work
        waited in its queue. Time that the trace does not explain is called unknown, with the reason. The first steps are
        left out if they do not show the pace of the program (warm-up, or the host ran ahead of the GPU).
        kineto_trace.analysis.idle_pieces describes the rules in full. In a trace without GPU activity, each moment of the
        host's steps belongs to one part, as in view step_phases: loading, forward, backward, optimizer, or the program's
        own code.

        Options:
        - detail: one row for each operator, function and so on in the GPU's idle time.
        - warm_up: also count the first steps that are otherwise left out.
        - least: causes with less than this share (in %) are merged into one row.

        Columns: rank, device, share_pct, step_us, meaning, what, part_us, total_us, cause.
        """

    def validate(
        self,
        sources: Sources,
        *,
        executor: Executor | None = None,
    ) -> Result:
        """What analyses need from a trace, whether this trace has it, and how to record it if not.

        An argument of a type that readers of Kineto traces do not expect (see HTA's validate_trace_format) has a row of its
        own. The notes list what was lost when the trace was recorded or read. Advice names options of kinetoctl for traces
        that kinetod recorded, and options of torch.profiler for all others.

        Columns: rank, part, ok, rows, complete_pct, needed_for, advice.
        """

def signature(view: View) -> Signature: ...
def docstring(view: View) -> str: ...

views: Views
