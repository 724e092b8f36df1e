"""Shows how the time of each GPU divides among kinds of work, annotations and copies."""
