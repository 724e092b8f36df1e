"""Values in calls that both sides know: a rank of `Selector`, and how a web front end names the user that it calls for.

In gRPC's metadata: one user of the daemon's host by USER_KEY; or whoever a certificate stands for, by CERTIFICATE_KEY
once for each of its names, in the order in which they count: URI:…, DNS:…, and CN:… where there are no others.
"""

ANY_RANK = -1  # in `ranks`: every process that has one
USER_KEY, CERTIFICATE_KEY = "kineto-for-user", "kineto-for-certificate"
MAX_NAMES = 16  # of one certificate
USER_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}"
CERTIFICATE_NAME = r"(URI|DNS|CN):[\x20-\x7e]{1,300}"
