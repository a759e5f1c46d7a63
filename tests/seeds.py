"""Where what tests draw comes from. `make hunt` and `make kill-test` draw a seed and print it."""

import os

SEED = int(os.environ.get("SEALANE_SEED", "1"))
