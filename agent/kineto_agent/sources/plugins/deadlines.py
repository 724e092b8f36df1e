"""How long a plug-in may take for each call, in seconds. Milliseconds are usual.

What is given up stays so: these are for a machine on which many more threads want a processor than there are.
"""

LOAD_S = ASK_S = PREPARE_S = START_S = STOP_S = CLOSE_S = 5.0
GIVE_WAY_S = 1.0  # a thread of the program waits
