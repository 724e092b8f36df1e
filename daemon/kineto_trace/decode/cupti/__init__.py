"""Decodes CUPTI's activity records, by the layouts and clocks of each CUPTI version."""
