"""Small parts that do not depend on the daemon's work: errors, log set-up, metrics, file locks and fair queues."""
