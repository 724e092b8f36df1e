"""The errors that kinetoctl and its client library report.

    CliError                     exit code and advice are on the class
    ├── UsageProblem             2    the caller: the request is invalid
    ├── WrongAnalysis            2    the caller: no such view, option, format or table, or invalid SQL
    ├── NotFound                 3    the caller: no such process, capture or file
    │   ├── NoSuchTrace          3    the caller: neither a file nor a capture
    │   ├── NoSuchJob            3    the caller: Slurm knows no such job, task or step, or it has ended
    │   └── NoSuchPod            3    the caller: Kubernetes has no such pod
    ├── Refused                  5    the state of the target or of the daemon does not allow it now
    │   ├── Unsupported          5    the daemon does not know this call
    │   ├── ConditionNotMet      5    no GPU did in time what was waited for
    │   ├── JobNotRunning        5    the job has not started, or is suspended
    │   └── PodNotRunning        5    the pod is not running
    ├── DownloadFailed           5    this machine: the trace could not be written
    │   ├── VerificationFailed   5    the received data differ from what the daemon announced
    │   └── FileConflict         5    another file has this name
    ├── TraceUnreadable          5    a file is not a trace, or is damaged
    ├── NotComparable            5    the traces do not show whether anything became slower
    ├── NotWritten               5    this machine: a result could not be written
    │   └── ProjectExists        5    the folder of a new plug-in exists
    ├── SlurmFailed              5    Slurm's programs are missing, or get no answer
    ├── KubeFailed               5    the Kubernetes client is missing, or the API server does not answer
    ├── ChildFailed              5    this machine: a process that the command started failed
    ├── PluginRefused            5    a plug-in that kinetod would not take
    ├── NotInstalled             5    this machine: a step of an installation failed
    ├── NotMigrated              5    another daemon's files cannot be read, or kinetod would not take the result
    ├── Denied                   6    the caller's rights
    │   ├── KubeDenied           6    the caller's rights in Kubernetes
    │   ├── NeedsRoot            6    the caller's rights on this machine
    │   └── UntrustedSocket      6    somebody else may be listening, so nothing was sent
    ├── Unreachable              7    no daemon answers
    │   ├── TimedOut             7    the daemon did not answer in time
    │   └── NoKinetod            7    there is no kinetod on the pods' nodes
    ├── CancelledByDaemon        8    the call or capture was cancelled elsewhere
    ├── DaemonFault              1    the daemon's fault
    ├── AgentMissing             1    this machine: the agent's package is not installed
    ├── NotExecutable            126  kinetoctl run
    └── CommandNotFound          127  kinetoctl run

Foreign errors are translated at one seam each: those of gRPC in `client.daemon_client`, of the file system in
`client.tracing`, of the trace library here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from kineto_trace.errors import FormatError, QueryError, TraceError, ViewError

from kinetoctl.exit_codes import ExitCode


class CliError(Exception):
    """An error with a message for people. `main` prints it and exits with exit_code.

    reason_code: the daemon's machine-readable reason (docs/errors.md), empty if there is none.
    help_text: what to do or which command to run next, printed below the message.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    help_text: ClassVar[str] = ""

    def __init__(self, message: str, *, reason_code: str = "") -> None:
        super().__init__(message)
        self.reason_code = reason_code

    def about(self, what: str) -> Self:
        """This error, with what it concerns in front of its message."""
        self.args = (f"{what}: {self}",)
        return self


class UsageProblem(CliError):
    """The request is invalid."""

    exit_code = ExitCode.USAGE
    help_text = "`kinetoctl COMMAND --help` lists the options of a command and the values that they accept."


class WrongAnalysis(CliError):
    """The trace library does not know the requested view, option, format or table, or rejects the SQL."""

    exit_code = ExitCode.USAGE
    help_text = (
        "`kinetoctl report --list` lists the views, `kinetoctl report --describe` their options and columns,\n"
        "`kinetoctl query --schema` the SQL tables, and `kinetoctl export --help` the formats."
    )


class NotFound(CliError):
    """No such process, capture or file."""

    exit_code = ExitCode.NOT_FOUND
    help_text = "`kinetoctl ps --all` lists processes; `kinetoctl captures list` lists captures."


class NoSuchTrace(NotFound):
    """Neither a file nor a capture has this name."""

    help_text = "A trace is a file, a folder, a glob pattern, or the id of a capture (`kinetoctl captures list`)."


class NoSuchJob(NotFound):
    """Slurm knows no such job, task or step, or it has no processes left."""

    help_text = "`squeue --me` lists your jobs; `squeue --steps --jobs=JOB` lists the steps of a job."


class NoSuchPod(NotFound):
    """Kubernetes has no such pod."""

    help_text = "`kubectl -n NAMESPACE get pods --show-labels` lists the pods."


class Refused(CliError):
    """The state of the target or of the daemon does not allow it."""

    exit_code = ExitCode.FAILED
    help_text = "`kinetoctl doctor PID` checks a process; `kinetoctl doctor` checks the daemon's host."


class Unsupported(Refused):
    """The daemon does not know this call."""

    help_text = "`kinetoctl version` shows both versions; use a kinetoctl of the same version as the daemon."


class ConditionNotMet(Refused):
    """No GPU of the processes met a condition in time, or can meet it."""

    help_text = "`kinetoctl top` shows what the GPUs are doing; `kinetoctl top --once -o json` shows all their values."


class JobNotRunning(Refused):
    """A Slurm job has no processes yet, or they are suspended."""

    help_text = "`squeue --me` shows the state of your jobs; trace the job once it is running."


class PodNotRunning(Refused):
    """The pod has not started, or has ended."""

    help_text = "`kubectl -n NAMESPACE get pods --watch` shows when the pod is running."


class DownloadFailed(CliError):
    """The trace could not be written on this machine."""

    exit_code = ExitCode.FAILED
    help_text = "The trace is still in the daemon's store; `kinetoctl captures fetch ID` downloads it again."


class VerificationFailed(DownloadFailed):
    """The received data differ from what the daemon announced."""


class FileConflict(DownloadFailed):
    """Another file already has this name."""

    help_text = "Move that file or choose another --output-dir; existing files are never overwritten."


class TraceUnreadable(CliError):
    """A file cannot be read as a trace."""

    exit_code = ExitCode.FAILED
    help_text = (
        "A trace is a .json, .json.gz or .pftrace file, or a folder of columns. `kinetoctl captures verify ID` checks\n"
        "the daemon's copy, and `kinetoctl captures fetch ID` downloads it again."
    )


class NotComparable(CliError):
    """Two traces do not show whether anything became slower: too few steps, too much noise, or not recorded."""

    exit_code = ExitCode.FAILED
    help_text = (
        "Both traces need at least two complete steps, and more if the steps vary: record them with\n"
        "`kinetoctl trace --iterations 50`. With a larger limit, fewer steps are enough."
    )


class NotWritten(CliError):
    """A result could not be written on this machine."""

    exit_code = ExitCode.FAILED
    help_text = "Check the folder with `ls -ld` and `df -h`, or choose another one."


class ProjectExists(NotWritten):
    """The folder of a new plug-in's project already exists."""

    help_text = (
        "Give the plug-in another name, or choose another --output-dir. `kinetoctl plugin check FOLDER` shows\n"
        "whether kinetod would accept the plug-in in the existing folder."
    )


class SlurmFailed(CliError):
    """Slurm's programs are missing, or get no answer."""

    exit_code = ExitCode.FAILED
    help_text = "To trace without asking Slurm, name the hosts with --hosts and the job with --job-id."


class KubeFailed(CliError):
    """The client of Kubernetes is not installed, the kubeconfig cannot be used, or the API server does not answer."""

    exit_code = ExitCode.FAILED
    help_text = (
        "`kubectl version` shows whether the API server answers; --kubeconfig and --kube-context choose the cluster."
    )


class ChildFailed(CliError):
    """A process that the command started for itself failed: a daemon of its own, or what the demo runs."""

    exit_code = ExitCode.FAILED
    help_text = "The lines above are the end of its log. If `kinetod` is already running, the command uses that daemon."


class PluginRefused(CliError):
    """A plug-in that kinetod would not take, or no such plug-in."""

    exit_code = ExitCode.FAILED
    help_text = (
        "docs/plugins.md explains each member of a plug-in; `kinetoctl plugin list` shows the installed plug-ins."
    )


class NotInstalled(CliError):
    """A step of installing or removing kinetod failed."""

    exit_code = ExitCode.FAILED
    help_text = (
        "Completed steps stay in effect; to continue from here, run the same command again, for example\n"
        "`kinetoctl host install`."
    )


class NotMigrated(CliError):
    """The files of another daemon cannot be read, or kinetod would not take what was made of them."""

    exit_code = ExitCode.FAILED
    help_text = (
        "Nothing was written. --flags and --unit name the files to read, which may be copies from another host.\n"
        "To write the configuration by hand, see docs/dynolog.md for the settings that correspond to each flag."
    )


class Denied(CliError):
    """The caller may not do this."""

    exit_code = ExitCode.DENIED
    help_text = (
        "You are allowed to trace your own processes, which `kinetoctl ps --all` lists; an administrator of the\n"
        "daemon is allowed to trace all processes."
    )


class NeedsRoot(Denied):
    """The kernel lets only root trace the process. command: the caller's."""

    help_text = "`kinetoctl host install`, run as root, sets up a daemon that traces for all users of this host."

    def __init__(self, error: Denied, command: str) -> None:
        super().__init__(f"{error}\nRoot can trace it: {command}", reason_code=error.reason_code)


class KubeDenied(Denied):
    """Kubernetes does not allow the caller to do this."""

    help_text = (
        "To trace a pod, you need permission to get (or list) pods and to create pods/exec in its namespace, and the\n"
        "Role kinetod-client in kinetod's namespace, which an administrator binds to you. `kubectl auth can-i` shows\n"
        "what you are allowed to do."
    )


class UntrustedSocket(Denied):
    """Another user may listen at the address, so nothing was sent there."""

    help_text = (
        "kinetoctl only connects to a daemon that runs as root, as you, or as the owner of the socket's folder in\n"
        "/run, and only if nobody else can write to that folder. Use --address to name another daemon."
    )


class Unreachable(CliError):
    """No daemon answers at the address."""

    exit_code = ExitCode.UNREACHABLE
    help_text = (
        "Start a daemon with `kinetod` (for your own processes) or `sudo systemctl start kinetod` (for the host),\n"
        "or give its address with --address or KINETO_ADDRESS."
    )


class NoKinetod(Unreachable):
    """There is no kinetod on the nodes of the pods, or it lacks the port that is needed."""

    help_text = (
        "kinetod runs on nodes as a DaemonSet, in the namespace kineto unless --kinetod-namespace names another;\n"
        "`kubectl get daemonsets --all-namespaces` shows where it is."
    )


class TimedOut(Unreachable):
    """The daemon did not answer in time."""

    help_text = "The daemon may be overloaded or stopped; --timeout gives it more time."


class CancelledByDaemon(CliError):
    """The call was cancelled on the other side."""

    exit_code = ExitCode.CANCELLED
    help_text = "`kinetoctl captures list` shows what became of captures; trace again if yours is missing."


class DaemonFault(CliError):
    """The daemon failed unexpectedly."""

    help_text = "This is a bug in kinetod; see its log (`journalctl -u kinetod`)."


class AgentMissing(CliError):
    """The package of the agent is not installed beside kinetoctl."""

    help_text = "`command -v kinetoctl` shows which installation is used; the agent must be in the same one."


class NotExecutable(CliError):
    """The command of `kinetoctl run` cannot be executed."""

    exit_code = ExitCode.NOT_EXECUTABLE
    help_text = (
        "Check with `ls -l` that the file is executable (`chmod +x` makes it so); a script must begin with `#!` and\n"
        "the path of an interpreter."
    )


class CommandNotFound(CliError):
    """The command of `kinetoctl run` does not exist."""

    exit_code = ExitCode.COMMAND_NOT_FOUND
    help_text = "Check the spelling, or give the path; `command -v NAME` shows where the shell finds a command."


_WRONG = (ViewError, QueryError, FormatError)


@contextmanager
def trace_errors() -> Iterator[None]:
    """Translates the errors of the trace library into those of kinetoctl."""
    try:
        yield
    except _WRONG as exc:
        raise WrongAnalysis(str(exc), reason_code=exc.reason_code) from exc
    except TraceError as exc:
        raise TraceUnreadable(str(exc), reason_code=exc.reason_code) from exc


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Says which file could not be written, and why."""
    try:
        yield
    except OSError as exc:
        raise NotWritten(f"cannot write {path}: {exc.strerror or exc}") from exc
