"""Finds traces in files, folders and object stores, and opens them whatever their form."""
