"""Defines how finished traces are kept, as folders of Parquet files and in object stores."""
