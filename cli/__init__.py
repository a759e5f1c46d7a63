"""The command lines: `sealaned`, `sealanectl`, `sealane`."""

import os

# As in sealane.daemon, which the daemon's clients don't import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
