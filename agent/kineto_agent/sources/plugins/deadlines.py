"""How long a plug-in may take for each call, in seconds. Milliseconds are usual.

An abandoned plug-in stays abandoned: these limits suit a machine on which far more threads want a CPU than there are.
"""

LOAD_S = ASK_S = PREPARE_S = START_S = STOP_S = CLOSE_S = GIVE_WAY_S = 5.0
GIVE_WAY_WAIT_S = 0.02  # part of that for which the program's thread waits
