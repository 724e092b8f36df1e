"""The command line of kinetod; what users type lives here: api, errors, exit codes, entry points and the demo's
target.
"""
