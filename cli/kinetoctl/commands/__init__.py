"""One module for each command, each with a click command called `command`; a folder is a group of commands."""
