"""The training programs. Each has `main(planted)`: "" is the program without a cause, the control."""
