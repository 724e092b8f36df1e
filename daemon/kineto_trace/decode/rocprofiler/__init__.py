"""Decodes rocprofiler-sdk's records, AMD's counterpart of CUPTI, and the HIP calls that our collector records."""
