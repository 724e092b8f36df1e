"""XLA's messages and a JAX program, for tests."""
