"""The daemon: composition root, gRPC servicers, state."""

import os

# gRPC reads this once, when it is first imported. It silences gRPC's own lines on standard error,
# which are not JSON; every failure reaches us as an exception or a status anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
