"""Sources that the daemon sends at run time, each on its own thread and with a deadline for every call."""
