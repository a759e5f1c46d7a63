"""The daemon: composition root, gRPC servicers, state, command line."""

import os

# gRPC reads this once, when it is first imported; its own lines on standard error are neither
# JSON nor ours, and every failure reaches us as an exception or a status anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
