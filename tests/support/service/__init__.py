"""The daemon, its helpers and its command line, started, scripted or stopped by a test."""
