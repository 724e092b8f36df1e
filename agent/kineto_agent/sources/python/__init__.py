"""Records the execution of Python code, by sampling stacks or by tracing every call."""
