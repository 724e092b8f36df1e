"""What commands do on this machine by themselves: inject the agent into a command, run the demo, serve the Perfetto
UI.
"""
