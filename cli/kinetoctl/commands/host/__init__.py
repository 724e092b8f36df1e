"""The commands of `kinetoctl host`, which show, install and uninstall the daemon's host."""
