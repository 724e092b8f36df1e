"""Shows where the time of training steps goes, how busy each GPU is, and what a trace lacks."""
