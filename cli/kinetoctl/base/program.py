"""What the command is called."""

PROGRAM = "kinetoctl"
COMPLETE_VARIABLE = "_KINETOCTL_COMPLETE"  # click derives the variable's name from the program's
