"""The decode worker as the daemon starts it: warm, never outliving its daemon, a confined process for each job."""

import gc
import os
import signal
import sys

from kineto_trace.base.without_pandas import go_without_pandas

from kinetod.sandbox.confinement import ENVIRONMENT, die_with_parent, serve

_NICE = 5  # a third of others' share of the CPU: the traced programs and the daemon's answers have priority


def main() -> int:
    """Serves decode jobs until standard input ends."""
    die_with_parent()
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    go_without_pandas()
    gc.disable()
    from kineto_trace.conversion.worker_job import answer, warm_up

    warm_up()
    gc.collect()
    gc.freeze()  # permanent objects are not traversed again in each child, nor copied for that
    gc.enable()
    return serve(sys.stdin.buffer, answers, answer)


if __name__ == "__main__":
    sys.exit(main())
