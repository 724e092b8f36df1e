"""What must hold for the causes and findings of any trace."""

from collections.abc import Sequence

from kineto_trace.analysis.cause_views import GPU_CAUSES, host_causes, time_causes, time_causes_view
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.host_findings.standing import STANDS_STILL
from kineto_trace.analysis.host_time.user_calls import host_steps
from kineto_trace.model.context import Context

ROUNDING = 1e-6  # of shares, in %


def _are_shares(shares: Sequence[float]) -> bool:
    return abs(sum(shares) - 100) <= ROUNDING and all(0 < each <= 100 + ROUNDING for each in shares)


def wrong(context: Context) -> list[str]:
    """What is wrong: causes that do not tile the steps, details that do not add up, findings that claim too much."""
    found, problems = context.get(time_causes), []
    if (found.time_ns < 0).any():
        problems.append("negative time")
    rows = time_causes_view(context).rows()
    for place, device in enumerate(found.devices):
        if found.time_ns[place].sum(axis=0).tolist() != found.steps.length.tolist():
            problems.append(f"GPU {device}: the causes do not sum to the steps")
        idle = found.measured()[place][len(GPU_CAUSES) :].sum()
        if sum(part.time_ns for part in found.details if part.device == device) != idle:
            problems.append(f"GPU {device}: the details do not sum to its idle time")
        own = [each["share_pct"] for each in rows if each["device"] == device]
        if found.steps.measured_ns and not _are_shares(own):
            problems.append(f"GPU {device}: shares of {own}")
    host = context.get(host_causes)
    window = context.get(host_steps)
    if host.causes and sum(cause.total_ns for cause in host.causes) != window.total_ns:
        problems.append("host: the causes do not sum to the steps")
    of_host = [each["share_pct"] for each in rows if each["device"] is None]
    if bool(of_host) != bool(host.causes) or (of_host and not _are_shares(of_host)):
        problems.append(f"host: shares of {of_host}")
    told = context.get(findings)
    for finding in told.findings:
        most = found.total(*finding.causes)
        if finding.name == STANDS_STILL:
            continue  # it claims nothing
        if not finding.causes or not 0 < finding.saving_ns <= min(told.window_ns, most):
            problems.append(f"{finding.name} claims {finding.saving_ns} of {most}")
    return problems
