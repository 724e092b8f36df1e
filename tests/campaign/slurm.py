"""What a real Slurm does to captures: steps, arrays, heterogeneous jobs, ends of jobs, control groups, its scripts.

    .venv/bin/python tests/campaign/slurm.py

Runs as root, with Debian's slurm-wlm and munge. Everything runs twice if control groups can be made (cgroup v1): with
proctrack/linuxproc, where the environment says which process is in which job, and with proctrack/cgroup, where the
kernel does. Exit status 1 if something is not as it should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_protos.v1 import profiler_pb2 as pb
from support.peers.slurm import (
    ADA,
    BOB,
    CGROUP,
    DEADLINE_S,
    GPUS,
    KINETOCTL,
    LINUXPROC,
    TASK,
    Cluster,
    has_freezer,
    running_cluster,
    why_not,
)
from support.service.cli import Result
from support.waiting import until


class Missed(Exception):
    """A check of the campaign has failed."""


def same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Missed(f"{what}: {found!r} instead of {expected!r}")


def within(text: str, whole: str) -> None:
    if text not in whole:
        raise Missed(f"{text!r} is not in {whole!r}")


def targets(result: Result) -> list[tuple[str, dict[str, Any]]]:
    """Host and target of each process."""
    hosts = json.loads(result.stdout)["hosts"] if result.stdout else []
    return [(host["host"], target) for host in hosts if host["capture"] for target in host["capture"]["targets"]]


def traced(cluster: Cluster, name: str, *options: str, uid: int = ADA) -> list[str]:
    """The node and the step's Python of each traced process; all of them must be DONE."""
    result = cluster.trace(name, "--no-fetch", *options, uid=uid)
    found = targets(result)
    if result.code not in (0, 4) or any(target["verdict"] != "VERDICT_DONE" for _, target in found):
        raise Missed(f"{name}: exit status {result.code}\n{result.stdout}{result.stderr}{cluster.logs()}")
    return [f"{host} {target['process']['command'][-1]}" for host, target in found]


def failing(cluster: Cluster, name: str, code: int, text: str) -> None:
    """Expects an error with this exit status and these words."""
    result = cluster.trace(name, "--no-fetch")
    same(f"exit status of {name}", result.code, code)
    within(text, result.stderr + result.stdout)


def steps(cluster: Cluster) -> None:
    """Each step is traced alone."""
    first, second = cluster.nodes
    script = f"{TASK} batch & srun -n1 -w {first} {TASK} zero & sleep 1; srun --overlap -n2 -N2 {TASK} one & wait"
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--wrap", script)
    cluster.ready([job], 4)
    same(
        "the job",
        sorted(traced(cluster, str(job))),
        [f"{first} batch", f"{first} one", f"{first} zero", f"{second} one"],
    )
    same("step 0", traced(cluster, f"{job}.0"), [f"{first} zero"])
    same("step 1", traced(cluster, f"{job}.1"), [f"{first} one", f"{second} one"])
    same("the batch step", traced(cluster, f"{job}.batch"), [f"{first} batch"])
    same("step 1 on a node", traced(cluster, f"{job}.1", "--host", second), [f"{second} one"])
    elsewhere = cluster.kinetoctl(
        "ps", "--slurm-job", f"{job}.0", "--host-address", "unix:/no/{address}/{host}", uid=ADA
    )
    within(f"unix:/no/127.0.0.1/{first}", elsewhere.stderr)
    failing(
        cluster, f"{job}.7", 3, f"Slurm job {job}.7 has no such step at the moment; its steps are: {job}.0, {job}.1"
    )


def components(cluster: Cluster) -> None:
    """A heterogeneous job is traced as a whole and by its components."""
    first, second = cluster.nodes
    script = f"srun --het-group=0,1 {TASK} both"
    job = cluster.submit("-n1", "-w", first, ":", "-n1", "-w", second, "--wrap", script)
    cluster.ready([job], 2)
    same("the job", traced(cluster, str(job)), [f"{first} both", f"{second} both"])
    same("component 0", traced(cluster, f"{job}+0"), [f"{first} both"])
    same("component 1", traced(cluster, f"{job}+1"), [f"{second} both"])
    same("its step", traced(cluster, f"{job}+1.0"), [f"{second} both"])
    failing(cluster, f"{job}+2", 3, f"Slurm job {job} has no component {job}+2")


def arrays(cluster: Cluster) -> None:
    """Tasks of an array are traced by their numbers."""
    job = cluster.submit("--array=1-4%3", "--ntasks=1", "--wrap", f"srun {TASK} $SLURM_ARRAY_TASK_ID")
    ids = cluster.ids(f"{job}_1", f"{job}_2", f"{job}_3")
    cluster.ready(ids, 3)

    def tasks(name: str) -> list[str]:
        return sorted(text.rpartition(" ")[2] for text in traced(cluster, name))

    same("all", tasks(str(job)), ["1", "2", "3"])
    same("two", tasks(f"{job}_[1,3-4]"), ["1", "3"])
    same("a step of one", tasks(f"{job}_2.0"), ["2"])
    same("one by its own id", tasks(str(ids[0])), ["1"])
    failing(cluster, f"{job}_4", 5, f"Slurm job {job}_4 is PENDING (JobArrayTaskLimit): it has no processes yet")
    failing(cluster, f"{job}_9", 3, f"Slurm job {job} has no task {job}_9")


def unprepared(cluster: Cluster) -> None:
    """Jobs that did not request an agent at their start get one when they are traced."""
    job = cluster.submit(
        "--nodes=2", "--ntasks-per-node=1", "--export=ALL,KINETO_AGENT=0", "--wrap", f"srun {TASK} bare"
    )

    def found() -> list[tuple[str, dict[str, Any]]] | None:
        result = cluster.trace(str(job), "--no-fetch")
        return targets(result) if result.code == 0 else None

    for host, target in until(found, "the job is traced", DEADLINE_S, state=cluster.logs):
        same(f"verdict on {host}", target["verdict"], "VERDICT_DONE")
        same(f"whether it was attached to on {host}", target["attach"] is not None, True)


def gpus(cluster: Cluster) -> None:
    """Prolog and Epilog maintain the map of GPUs and jobs on each node."""
    job = cluster.submit("--nodes=2", "--gres=gpu:2", "--wrap", f"srun {TASK}")
    cluster.ready([job], 2)
    for node in cluster.nodes:
        found = sorted(cluster.on(node, "grep", "-r", "", "/run/kinetod-slurm").split())
        same(f"GPUs of {node}", found, [f"/run/kinetod-slurm/{gpu}:{job}" for gpu in range(GPUS)])
    cluster.end_jobs()
    for node in cluster.nodes:
        until(lambda node=node: not cluster.on(node, "ls", "/run/kinetod-slurm"), f"the map of {node} is empty")  # type: ignore[misc]


def the_end(cluster: Cluster) -> None:
    """A job that ends during a capture leaves what was recorded, and no agent."""
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--wrap", f"srun {TASK}")
    cluster.ready([job], 2)
    arguments = ("trace", "--slurm-job", str(job), "--duration", "50s", "--no-fetch", "-o", "json")
    environ = {"KINETO_HOST_ADDRESS": cluster.template}
    capture = cluster.start(*KINETOCTL, *arguments, uid=ADA, environ=environ)

    def collecting() -> bool:
        request = pb.ListCapturesRequest()
        captures = [
            each for stub in cluster.stubs() for each in stub.ListCaptures(request, timeout=DEADLINE_S).captures
        ]
        found = [target for each in captures for target in each.targets if target.process.job_id == str(job)]
        return [target.state for target in found if target.counts] == [pb.TARGET_STATE_COLLECT] * 2

    until(collecting, "both nodes collect", DEADLINE_S, state=cluster.logs)
    cluster.end_jobs()
    output, errors = capture.communicate(timeout=DEADLINE_S)
    same("exit status", capture.returncode, 4)
    ended = [(target["verdict"], target["reason_code"]) for _, target in targets(Result(0, output, errors))]
    same("verdicts", ended, [("VERDICT_PARTIAL", "TARGET_EXITED")] * 2)
    same("agents", [stub.GetHost(pb.GetHostRequest(), timeout=DEADLINE_S).agents for stub in cluster.stubs()], [0, 0])
    failing(cluster, str(job), 3, f"Slurm job {job} is CANCELLED: it has no processes left")


def what_does_not_run(cluster: Cluster) -> None:
    """Jobs that wait, are suspended or do not exist give errors that say so."""
    job = cluster.submit("--begin=now+1hour", "--wrap", "true")
    failing(cluster, str(job), 5, f"Slurm job {job} is PENDING (BeginTime): it has no processes yet")
    failing(cluster, "999999", 3, "Slurm does not know job 999999")
    job = cluster.submit("--wrap", f"srun {TASK}")
    cluster.ready([job], 1)
    cluster.run("scontrol", "suspend", str(job))
    failing(cluster, str(job), 5, f"Slurm job {job} is SUSPENDED: its processes are suspended")


def owners(cluster: Cluster) -> None:
    """A job's owner may trace others' processes that the kernel attributes to the job; nobody may trace the owner's."""
    node = cluster.nodes[0]
    job = cluster.submit("--ntasks=1", "-w", node, "--wrap", f"srun {TASK} adas")
    cluster.ready([job], 1)
    group = f"/sys/fs/cgroup/freezer/slurm_{node}/uid_{ADA}/job_{job}/step_0/cgroup.procs"
    enter = f"echo $$ > {group};" if cluster.proctrack == CGROUP else ""
    user = f"setpriv --reuid={BOB} --regid={BOB} --clear-groups"
    started = cluster.start(
        "sh",
        "-c",
        f"{enter} exec {user} {TASK} bobs",
        node=node,
        environ={"SLURM_JOB_ID": str(job), "KINETO_AGENT": "1"},
    )
    try:
        cluster.ready([job], 2)
        both = cluster.proctrack == CGROUP
        same("Ada's", sorted(traced(cluster, str(job))), [f"{node} adas", *([f"{node} bobs"] if both else [])])
        same("Bob's", traced(cluster, str(job), uid=BOB), [f"{node} bobs"])
    finally:
        cluster.on(node, "sh", "-c", f"kill -9 $(pgrep -u {BOB})")
        started.communicate(timeout=DEADLINE_S)


CHECKS: tuple[Callable[[Cluster], None], ...] = (
    steps, components, arrays, unprepared, gpus, the_end, what_does_not_run, owners,
)  # fmt: skip


def main() -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    missed = 0
    kinds = [LINUXPROC, *([CGROUP] if has_freezer() else [])]
    for proctrack in kinds:
        with running_cluster(proctrack=proctrack) as cluster:
            for check in CHECKS:
                try:
                    check(cluster)
                except (Missed, AssertionError) as exc:
                    missed += 1
                    print(f"{proctrack} {check.__name__}: MISSED\n{exc}", flush=True)
                else:
                    print(f"{proctrack} {check.__name__}: ok", flush=True)
                cluster.end_jobs()
    if CGROUP not in kinds:
        print("without proctrack/cgroup: there is no cgroup v1 here")
    print(f"{len(kinds) * len(CHECKS) - missed} passed, {missed} failed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
