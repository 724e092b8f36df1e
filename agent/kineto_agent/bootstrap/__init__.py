"""Starts the agent in a process: from a .pth file, through sitecustomize, by a call, or over the channel of a live
attach.
"""
