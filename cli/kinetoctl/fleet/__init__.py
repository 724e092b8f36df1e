"""One capture on many hosts: where it runs, how its hosts begin together, and what comes of it."""
