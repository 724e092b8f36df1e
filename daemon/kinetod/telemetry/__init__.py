"""Reports the health and metrics of the daemon and its host."""
