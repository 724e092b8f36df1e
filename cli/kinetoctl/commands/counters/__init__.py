"""The commands of `kinetoctl counters`."""
