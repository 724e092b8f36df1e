"""Everything that kinetoctl reports as an error.

    CliError                     exit code and advice are on the class
    ├── UsageProblem             2    the caller: the daemon refuses the request as it was put
    ├── WrongAnalysis            2    the caller: no such view, option, format or table, or wrong SQL
    ├── NotFound                 3    the caller: no such process, capture or file
    │   ├── NoSuchTrace          3    the caller: neither a file nor a capture
    │   ├── NoSuchJob            3    the caller: Slurm knows no such job, task or step, or it has ended
    │   └── NoSuchPod            3    the caller: Kubernetes has no such pod
    ├── Refused                  5    the target or the daemon's state does not allow it now
    │   ├── Unsupported          5    the daemon does not know this call
    │   ├── JobNotRunning        5    the job does not run yet, or is suspended
    │   └── PodNotRunning        5    the pod does not run
    ├── DownloadFailed           5    this machine: the trace could not be written
    │   ├── VerificationFailed   5    what arrived is not what the daemon announced
    │   └── FileConflict         5    another file has the name
    ├── TraceUnreadable          5    a file that is no trace, or is damaged
    ├── NotWritten               5    this machine: a result could not be written
    ├── SlurmFailed              5    Slurm's programs are not here, or do not get an answer
    ├── KubeFailed               5    the client of Kubernetes is not here, or the API server gives no answer
    ├── DemoFailed               5    a step of the demo did not work
    ├── NotInstalled             5    this machine: a step of an installation did not work
    ├── Denied                   6    the caller's rights
    │   ├── KubeDenied           6    the caller's rights in Kubernetes
    │   └── UntrustedSocket      6    the daemon's: it may be somebody else, so nothing was sent
    ├── Unreachable              7    the daemon is not there
    │   ├── TimedOut             7    the daemon did not answer in time
    │   └── NoKinetod            7    there is no kinetod on the pods' nodes
    ├── CancelledByDaemon        8    the call or capture was cancelled elsewhere
    ├── DaemonFault              1    the daemon's fault
    ├── NotExecutable            126  kinetoctl run
    └── CommandNotFound          127  kinetoctl run

Foreign errors become these at one seam each: gRPC's in `daemon_client`, the file system's in `download`, those of the
trace library in `trace_arguments`.
"""

from typing import ClassVar

from kinetoctl.exit_codes import ExitCode


class CliError(Exception):
    """An error with a message for people. `main` prints it and exits with exit_code.

    reason_code is the daemon's machine-readable reason (docs/errors.md), empty if there is none.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    help_text: ClassVar[str] = ""

    def __init__(self, message: str, *, reason_code: str = "") -> None:
        super().__init__(message)
        self.reason_code = reason_code


class UsageProblem(CliError):
    """The daemon refuses the request as it was put."""

    exit_code = ExitCode.USAGE


class WrongAnalysis(CliError):
    """The trace library does not know what is asked for."""

    exit_code = ExitCode.USAGE


class NotFound(CliError):
    """No such process, capture or file."""

    exit_code = ExitCode.NOT_FOUND
    help_text = "`kinetoctl ps --all` lists processes, `kinetoctl captures list` lists captures."


class NoSuchTrace(NotFound):
    """Neither a file nor a capture has this name."""

    help_text = "A trace is a file, a folder, a pattern, or the id of a capture (`kinetoctl captures list`)."


class NoSuchJob(NotFound):
    """Slurm knows no such job, task or step, or it has no processes any more."""

    help_text = "`squeue --me` lists your jobs, `squeue --steps --jobs=JOB` the steps of one."


class NoSuchPod(NotFound):
    """Kubernetes has no such pod."""

    help_text = "`kubectl -n NAMESPACE get pods --show-labels` lists them."


class Refused(CliError):
    """The state of the target or of the daemon does not allow it."""

    exit_code = ExitCode.FAILED


class Unsupported(Refused):
    """The daemon does not know this call."""

    help_text = "`kinetoctl version` shows both versions; use a kinetoctl of the daemon's version."


class JobNotRunning(Refused):
    """A job of Slurm has no processes yet, or they stand still."""


class PodNotRunning(Refused):
    """The pod does not run yet, or no more."""


class DownloadFailed(CliError):
    """The trace could not be written on this machine."""

    exit_code = ExitCode.FAILED
    help_text = "The trace stays in the daemon's store: `kinetoctl captures fetch ID` gets it again."


class VerificationFailed(DownloadFailed):
    """What arrived is not what the daemon announced."""


class FileConflict(DownloadFailed):
    """Another file has the name already."""

    help_text = "Move that file away or choose another --output-dir; nothing is overwritten."


class TraceUnreadable(CliError):
    """A file that cannot be read as a trace."""

    exit_code = ExitCode.FAILED


class NotWritten(CliError):
    """A result could not be written on this machine."""

    exit_code = ExitCode.FAILED


class SlurmFailed(CliError):
    """Slurm's programs are not here, or do not get an answer."""

    exit_code = ExitCode.FAILED
    help_text = "--hosts names hosts without Slurm's help, and --job-id the job there."


class KubeFailed(CliError):
    """The client of Kubernetes is not installed, the kubeconfig cannot be used, or the API server does not answer."""

    exit_code = ExitCode.FAILED


class DemoFailed(CliError):
    """A step of the demo did not work."""

    exit_code = ExitCode.FAILED


class NotInstalled(CliError):
    """A step of installing or removing kinetod did not work."""

    exit_code = ExitCode.FAILED
    help_text = "What was done before stays; the same command again goes on from there."


class Denied(CliError):
    """The caller may not do this."""

    exit_code = ExitCode.DENIED
    help_text = "You may trace processes of your own user; an administrator of the daemon may trace all."


class KubeDenied(Denied):
    """Kubernetes does not let the caller ask this."""

    help_text = (
        "Tracing a pod takes get (or list) pods and create pods/exec in its namespace, and in kinetod's what the Role\n"
        "kinetod-client has (an administrator binds it). `kubectl auth can-i` tells what you may do."
    )


class UntrustedSocket(Denied):
    """Another user may listen at the address, so nothing was sent there."""

    help_text = (
        "kinetoctl speaks to a daemon of root, of your own user, or of the user who owns its folder in /run, and only\n"
        "where nobody else can put a socket: in a folder that is writable for its owner alone. --address names another."
    )


class Unreachable(CliError):
    """There is no daemon at the address."""

    exit_code = ExitCode.UNREACHABLE
    help_text = (
        "Start a daemon with `kinetod` (for your own processes) or `sudo systemctl start kinetod` (for the host),\n"
        "or say where it listens with --address or KINETO_ADDRESS."
    )


class NoKinetod(Unreachable):
    """There is no kinetod on the nodes of the pods, or not the port that is needed."""

    help_text = "kinetod runs on nodes as a DaemonSet; the namespace is kineto unless --kinetod-namespace says another."


class TimedOut(Unreachable):
    """The daemon did not answer in time."""

    help_text = "Is it overloaded or stopped? --timeout allows it more time."


class CancelledByDaemon(CliError):
    """The call was cancelled on the other side."""

    exit_code = ExitCode.CANCELLED


class DaemonFault(CliError):
    """The daemon failed in a way it should not."""

    help_text = "This is a fault of kinetod; its log says more (`journalctl -u kinetod`)."


class NotExecutable(CliError):
    """The command of `kinetoctl run` cannot be executed."""

    exit_code = ExitCode.NOT_EXECUTABLE


class CommandNotFound(CliError):
    """The command of `kinetoctl run` does not exist."""

    exit_code = ExitCode.COMMAND_NOT_FOUND
