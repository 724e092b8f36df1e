"""Options and arguments that several commands share, and what they name: processes, hosts, captures, traces and the
request.
"""
