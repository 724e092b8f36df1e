"""Traces of GPU training: raw records to columns, columns to files and figures. No service code in here."""
