"""Getting the agent into a process that nobody prepared."""
