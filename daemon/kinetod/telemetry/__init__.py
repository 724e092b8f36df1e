"""Shows the health and the metrics of the daemon and its host."""
