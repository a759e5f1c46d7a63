"""The seed of random values in tests. `make hunt` and `make kill-test` choose one and print it."""

import os

SEED = int(os.environ.get("SEALANE_SEED", "1"))
