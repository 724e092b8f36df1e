"""Counters of Intel's GPUs by the metric streamer of Level Zero's tools."""
