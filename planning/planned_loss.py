"""The largest loss for which plans are made.

In a file of its own, so that the configuration can check it without importing the model and numpy.
"""

from typing import Final

PLANNED_LOSS_MAX: Final = 0.1
"""Largest loss for which plans are made. Beyond it, parity within the budget repairs little more
and the model isn't verified; far beyond it, the model takes minutes for one message size. Further
losses are repaired by retransmission."""
