"""Programs that are run in a model, and the traces that would be recorded of them."""
