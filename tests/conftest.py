"""For all tests."""

import signal

# Whoever starts the tests in the background of a shell has them ignore Ctrl-C, and every process that they start
# inherits that. Some of them are sent SIGINT on purpose.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
