"""The client library: everything that a program needs to take a trace from one daemon, without a command line."""
