"""How long each call of a plug-in may take.

What is given up stays so: these are for a machine on which many more threads want a processor than there are. Of all
calls but give_way(), for which a thread of the program waits, milliseconds are usual.
"""

LOAD_S = ASK_S = PREPARE_S = START_S = STOP_S = CLOSE_S = 5.0
GIVE_WAY_S = 1.0
