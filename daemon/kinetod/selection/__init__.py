"""Lists the processes that a caller may see and selects the targets among them."""
