"""What a process of the daemon's own may still do once hostile data is in it: its own folder, and no more."""
