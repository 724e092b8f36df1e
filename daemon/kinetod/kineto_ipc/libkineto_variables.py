"""The environment variables that libkineto reads, in its own spelling (Config.cpp, init.cpp)."""

USE_DAEMON = "KINETO_USE_DAEMON"  # set, whatever its value: poll a daemon
SOCKET_DIR = "KINETO_IPC_SOCKET_DIR"  # where the sockets are; else they are abstract
CONFIG_FILE = "KINETO_CONFIG"  # instead of /etc/libkineto.conf
TRACE_DIR = "KINETO_ONDEMAND_TRACE_DIR"  # where it may write traces, from torch 2.14 on
VARIABLES = (USE_DAEMON, SOCKET_DIR, CONFIG_FILE, TRACE_DIR)
