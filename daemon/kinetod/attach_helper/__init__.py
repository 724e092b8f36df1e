"""Runs attaches and inspections in processes of their own, as children of the daemon or as the kinetod-attach
service.
"""
