"""What on this host stands in the way of traces, whatever the process: `kinetoctl doctor`, `kinetoctl host`."""
