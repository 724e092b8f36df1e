"""What the command is called."""

PROGRAM = "kinetoctl"
STOPPED = "stopped at once"  # what a Ctrl-C did
COMPLETE_VARIABLE = "_KINETOCTL_COMPLETE"  # click derives the variable's name from the program's
