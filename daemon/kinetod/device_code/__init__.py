"""What the device code in a program's files can do, as far as the files tell."""
