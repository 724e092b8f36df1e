"""Reads the state and the users of this host's GPUs through the vendors' libraries, in a process of its own."""
