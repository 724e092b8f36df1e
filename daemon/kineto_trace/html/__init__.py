"""Renders the views of a job as one self-contained HTML page."""
