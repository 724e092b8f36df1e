"""Profiles in the forms that other tools ingest: pprof and OTLP."""
