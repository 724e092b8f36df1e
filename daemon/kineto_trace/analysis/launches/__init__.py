"""Shows how long launches take and how much launched work waits in the queues of streams."""
