"""The pages: what each asks the daemon and the analyses, and shows."""
