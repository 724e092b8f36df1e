"""Records what Python code executes, by sampling stacks or by tracing every call."""
