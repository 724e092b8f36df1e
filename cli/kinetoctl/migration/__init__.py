"""Reads the configuration of another profiler's daemon and writes kinetod's: flags, unit file, what became of each."""
