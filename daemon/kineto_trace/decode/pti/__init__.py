"""Decodes PTI's records, by the layouts of each version of Intel's library."""
