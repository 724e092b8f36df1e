"""Where the threads of a process stand, read from outside."""
