"""Programs of frameworks that own the training loop: each with a checkpoint, an evaluation or a callback in it."""
