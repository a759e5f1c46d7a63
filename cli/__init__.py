"""The command lines: `sealaned`, `sealanectl`, `sealane`."""

import os

# As in sealane.daemon, which a client of it need not import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
