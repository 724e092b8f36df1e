"""Sources that the daemon brings in at run time, each on a thread of its own and with a deadline for every call."""
