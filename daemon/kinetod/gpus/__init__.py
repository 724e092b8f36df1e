"""Reads the state and users of this host's GPUs through the vendors' libraries, in a separate process."""
