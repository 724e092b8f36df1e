"""Which training steps were recorded as a whole, and which of them show the pace of the program."""
