"""Shows the critical path of a step, as figures and drawn into the trace."""
